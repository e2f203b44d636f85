"""Triton kernels for GPUs and, in tests, for Triton's interpreter."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...spec import AttentionCall
from .dropout import dropout_mask
from .passes import backward, forward, forward_tiles

__all__ = ["backward", "dropout_mask", "forward", "forward_tiles", "unsupported_reasons"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_HEAD_DIM = 256


def unsupported_reasons(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> list[str]:
    """Why the kernels cannot run a call; empty when they can."""
    reasons = []
    if not q.is_cuda and not (q.device.type == "cpu" and triton.knobs.runtime.interpret):
        reasons.append(
            f"needs a GPU that Triton serves, got {q.device.type} tensors (for Triton's "
            "interpreter on a CPU set TRITON_INTERPRET=1 before importing flashmod)"
        )
    if q.dtype not in _DTYPES:
        reasons.append(f"dtype {q.dtype} is not float16, bfloat16, float32 or float64")
    for name, size in (("D", q.shape[-1]), ("D_v", v.shape[-1])):
        if not 1 <= size <= _MAX_HEAD_DIM:
            reasons.append(f"head dimension {name} = {size} is not within 1..{_MAX_HEAD_DIM}")
    tiles = call.tile_config()
    if tiles and any(block < 16 or block & (block - 1) for block in tiles[:2]):
        reasons.append(f"tiles {tiles[0]}x{tiles[1]} are not powers of two of 16 or more")
    return reasons
