"""What this machine still has room and time for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

_SHARE = 0.8  # of what is free: allocators round up, and other processes live here too
_PROBE = 256  # rows of the attention that is timed


def available_bytes(device: torch.device) -> int:
    """Memory that may be taken now: free on the device; on a CPU also within every limit set."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _SHARE)
    return int(min(_cpu_limits(), default=1 << 62) * _SHARE)


def _cpu_limits() -> Iterator[int]:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield 1024 * next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError):  # absent, or "max"
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        yield limit - int((group / "memory.current").read_text())
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            yield limit - pages * resource.getpagesize()


@cache
def dense_seconds_per_pair(device: torch.device) -> float:
    """Time of dense attention's forward and backward per query-key pair and head, roughly."""
    q = torch.ones(4, _PROBE, 64, device=device, requires_grad=True)
    seconds = []
    for _ in range(5):
        _synchronise(device)
        start = time.perf_counter()
        with torch.enable_grad():
            out = (q @ q.mT).softmax(-1) @ q
            torch.autograd.grad(out.sum(), q)
        _synchronise(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds) / (4 * _PROBE * _PROBE)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
