"""The instructions of the plain kernels' main loops, on record: no feature may cost them any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import triton

from .offline import TARGETS, compiling_for
from .reading import main_loops

_TARGET, _DTYPE, _HEAD_DIMS = "sm_90", "bfloat16", (64, 128)


def record() -> dict[str, Any]:
    """Triton's version, and by head dimension and kernel the counts of every main loop."""
    from .cases import DTYPES, launch_all

    found: dict[str, Any] = {"triton": triton.__version__}
    for head_dim in _HEAD_DIMS:
        with compiling_for(TARGETS[_TARGET]) as compiled:
            launch_all("plain", DTYPES[_DTYPE], head_dim)
        found[f"D = {head_dim}"] = {
            kernel.name.removesuffix("_kernel"): loops
            for kernel in compiled
            if (loops := main_loops(kernel))
        }
    return found


def write(path: Path) -> None:
    """Write the record as JSON, one main loop per line."""
    lines = []
    for key, value in record().items():
        if isinstance(value, str):
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
            continue
        kernels = (
            f"  {json.dumps(name)}: [\n    " + ",\n    ".join(map(json.dumps, loops)) + "\n  ]"
            for name, loops in value.items()
        )
        lines.append(f"{json.dumps(key)}: {{\n" + ",\n".join(kernels) + "\n}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
