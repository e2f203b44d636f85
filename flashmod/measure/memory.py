"""Peak memory of a function, from every allocation of torch's allocator, those inside ops too."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

MIB = 1 << 20
_EVENT = re.compile(
    rb'"name": "\[memory\]".*?"ts": ([\d.]+).*?"Bytes": (-?\d+)'
    rb'.*?"Device Type": (\d+), "Addr": (\d+)',
    re.DOTALL,
)
_CPU = b"0"  # c10::DeviceType


class _Event(NamedTuple):
    time: float
    size: int  # bytes; negative when freed
    address: int


def peak_mib(fn: Callable[[], object], device: str | torch.device = "cpu") -> float:
    """Largest memory that ``fn`` holds at once beyond what was allocated when it started, in MiB.

    On a CPU the allocation events of torch.profiler are added up: nothing but torch tensors and
    the workspaces of torch's ops is counted, and blocks that ``fn`` frees without having allocated
    them do not lower the result. On CUDA the caching allocator's own peak is read (and reset).

    Args:
        fn: called once, without arguments; what it returns is dropped.
        device: where the memory is counted.

    Raises:
        RuntimeError: a torch profiler is already running.
        ValueError: the device has no meter.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _cuda_peak(fn, device) / MIB
    if device.type != "cpu":
        raise ValueError(f"no memory meter for device '{device}': cpu and cuda have one")
    return _highest(_allocations(fn)) / MIB


def _cuda_peak(fn: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fn()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _highest(events: list[_Event]) -> int:
    """Peak of the bytes alive, counting only blocks that were allocated within ``events``."""
    alive: dict[int, int] = {}
    total = peak = 0
    for event in sorted(events, key=lambda e: e.time):
        total -= alive.pop(event.address, 0)
        if event.size > 0:
            alive[event.address] = event.size
            total += event.size
            peak = max(peak, total)
    return peak


def _allocations(fn: Callable[[], object]) -> list[_Event]:
    if torch.autograd._profiler_enabled():  # starting another would silently end the first
        raise RuntimeError(
            "the memory meter uses torch.profiler, and one is already running: stop it first"
        )
    meter = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quiet_stderr():
        meter.start()
    try:
        with _memory_events_only():
            fn()
    finally:
        with _quiet_stderr():
            meter.stop()
    with tempfile.TemporaryDirectory(prefix="flashmod") as folder:
        path = os.path.join(folder, "trace.json")
        meter.export_chrome_trace(path)
        return _read(path)


def _read(path: str) -> list[_Event]:
    """Memory events of a Chrome trace, read as text: a parsed trace would take gigabytes."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as trace:
        found = (match.groups() for match in _EVENT.finditer(trace))
        return [
            _Event(float(time), int(size), int(address))
            for time, size, kind, address in found
            if kind == _CPU
        ]


@contextlib.contextmanager
def _memory_events_only() -> Iterator[None]:
    """Keep the profiler from recording every op too; tile loops run tens of thousands."""
    enable = getattr(torch.autograd, "_enable_record_function", None)
    if enable is None:
        yield
        return
    enable(False)
    try:
        yield
    finally:
        enable(True)


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Drop the two ``USDT:`` lines that a profiler session writes to the process's stderr."""
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        original = os.dup(2)
    except OSError:  # no stderr, no noise
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(original, 2)
            os.close(original)
            held.seek(0)
            rest = [line for line in held if not line.startswith(b"USDT:")]
            if rest:
                os.write(2, b"".join(rest))
