"""A stand-in for a GPU: launches compile for a target and are recorded instead of run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction


class Target(NamedTuple):
    """A GPU to compile for.

    Args:
        shared_limit: bytes of shared memory (LDS) that one program may have.
    """

    name: str
    gpu: GPUTarget
    shared_limit: int


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", GPUTarget("cuda", 80, 32), 166_912),
        Target("sm_90", GPUTarget("cuda", 90, 32), 232_448),
        Target("sm_100", GPUTarget("cuda", 100, 32), 232_448),
        Target("gfx942", GPUTarget("hip", "gfx942", 64), 65_536),
    )
}


class Compiled(NamedTuple):
    """One kernel as the compiler left it, with the compile-time arguments of its launch."""

    name: str
    constants: dict[str, Any]
    kernel: Any


class _OfflineDriver(DriverBase):
    """What Triton's launch path asks of a driver up to the launch itself."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target.gpu

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., Any]:
        raise NotImplementedError("an offline target runs nothing")

    def get_current_device(self) -> str:  # a key of Triton's per-device caches
        return self.target.name

    def get_current_stream(self, device: str) -> int:
        return 0


def require_compiler() -> None:
    """Raise RuntimeError under the interpreter: jitted functions are decided when imported."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET=1 turns kernels into Python functions that cannot be compiled: "
            "unset it and start again"
        )


@contextlib.contextmanager
def compiling_for(target: Target) -> Iterator[list[Compiled]]:
    """Within the context every launch compiles for ``target`` and is appended to the list."""
    require_compiler()
    records: list[Compiled] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        records.append(Compiled(self.__name__, kwargs, kernel))
        return kernel

    driver = triton.runtime.driver
    before = getattr(driver, "_active", None)
    driver.set_active(_OfflineDriver(target))
    JITFunction.run = compile_only
    try:
        yield records
    finally:
        JITFunction.run = launch
        driver.set_active(before)
