"""How a kernel is launched."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from ...spec import AttentionCall, TileConfig
from .structs import is_linear, on_device

logger = logging.getLogger(__name__)


def launch(
    kernel: Any,
    programs: int,
    tiles: TileConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    *args: Any,
    **constants: bool,
) -> None:
    """Launch a kernel that takes ``args`` and what every kernel over tiles takes."""
    head_dim, v_dim = q.shape[-1], v.shape[-1]
    _announce(kernel.__name__, q.dtype, head_dim, v_dim, tiles, call.mask_fn)
    with on_device(q):
        kernel[(programs,)](
            *args, q.shape[2], q.shape[1], max(k.shape[1], 1),
            ALIGN=call.align, GROUP=q.shape[2] // k.shape[2], HEAD_DIM=head_dim, V_DIM=v_dim,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            BLOCK_D=padded(head_dim), BLOCK_V=padded(v_dim), PRECISION=_precision(q.dtype),
            LINEAR=is_linear(call), EVERYWHERE=call.everywhere, **constants,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip


@cache
def _announce(
    kernel: str, dtype: torch.dtype, head_dim: int, v_dim: int, tiles: TileConfig, mask_fn: str
) -> None:
    """Once per configuration: its first call takes seconds, unless Triton has it on disk."""
    logger.info(
        "preparing %s for %s, head dimensions %d and %d, tiles %s%s: the first launch compiles",
        kernel, dtype, head_dim, v_dim, tuple(tiles), f", mask {mask_fn}" if mask_fn else "",
    )  # fmt: skip


def _precision(dtype: torch.dtype) -> str:
    """Follow torch's own setting for float32 products; other dtypes have no choice."""
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


def padded(size: int) -> int:
    """The width of a tile of ``size`` columns."""
    return max(16, triton.next_power_of_2(size))
