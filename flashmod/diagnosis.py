"""What ``python -m flashmod`` prints: what is installed, what a call would use, and why."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterator

import torch

from .backends import tiled
from .functional import explain
from .spec import TileConfig
from .training.environment import cpu_name, driver, unused_nvidia_gpu, versions


def report() -> str:
    """The whole diagnosis as text; a section per question."""
    sections = {
        "versions": _versions(),
        "devices": _devices(),
        "triton": _triton(),
        "tiles (block_m x block_n, warps, stages)": _tiles(),
        "W&B": _wandb(),
        "sample call: q, k, v of shape (1, 128, 4, 64), float16": _sample(),
    }
    blocks = [
        "\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items()
    ]
    return "\n\n".join(blocks)


def _versions() -> Iterator[str]:
    yield f"python             {platform.python_version()} on {platform.platform()}"
    for name, version in versions().items():
        yield f"{name:<18} {version or 'not installed'}"


def _devices() -> Iterator[str]:
    yield f"cpu: {cpu_name()}, {torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gib = properties.total_memory / 2**30
        yield f"cuda:{index}: {properties.name}, {gib:.0f} GiB, driver {driver()}"
    hint = unused_nvidia_gpu()
    if hint:
        yield hint
    elif not torch.cuda.is_available():
        yield "no GPU that torch can use: attention runs as torch tiles"


def triton_state() -> str:
    """Whether the kernels can be imported, and would be interpreted; imports nothing."""
    if importlib.util.find_spec("triton") is None:
        return (
            "not importable: pip install 'flashmod[triton]' on Linux; the torch tiles do without it"
        )
    if os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes"):
        return "importable, interpreted (TRITON_INTERPRET is set): slow, for tests on a CPU"
    return (
        "importable, compiled: kernels need a GPU; TRITON_INTERPRET=1 runs them on a CPU for tests"
    )


def _triton() -> Iterator[str]:
    yield triton_state()


def _tiles() -> Iterator[str]:
    yield f"{'tiled':<33} {_tile(tiled.DEFAULT_TILES)}"
    if importlib.util.find_spec("triton") is None:
        return
    from .backends.triton.tiles import table

    for row, tile in table().items():
        yield f"{row:<33} {_tile(tile)}"


def _tile(tile: TileConfig) -> str:
    return f"{tile.block_m} x {tile.block_n}, {tile.num_warps}, {tile.num_stages}"


def _wandb() -> Iterator[str]:
    mode = os.environ.get("WANDB_MODE")
    if importlib.util.find_spec("wandb") is None:
        yield "not installed: pip install 'flashmod[train]'; metrics.csv and result.json do without"
    else:
        yield (
            f"mode: {mode}"
            if mode
            else "mode: offline (WANDB_MODE is not set; online needs WANDB_MODE=online)"
        )


def _sample() -> list[str]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.empty(1, 128, 4, 64, dtype=torch.float16, device=device)
    return explain(q, q, q).splitlines()
