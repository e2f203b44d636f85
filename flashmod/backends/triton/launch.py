"""Host side of the kernels: arguments, work lists and grids."""

from __future__ import annotations

import contextlib
import logging
import math
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from ...spec import AttentionCall, TileConfig
from . import schedule
from .arguments import DropoutArg, MaskArg, Operands, RowStats, SequenceTable, TensorArg
from .backward_kv import dkv_kernel
from .backward_q import delta_kernel, dq_kernel
from .forward import forward_kernel
from .mask_functions import compiled_mask_fn
from .tiles import choose

logger = logging.getLogger(__name__)
_LOG2_E = 1 / math.log(2)
_TINY = 2.0**-100  # stands for a scale of 0, and keeps -inf * scale at -inf


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, S, H, D_v), lse (B, H, S), and saved row statistics (2, B, H, S), see RowStats."""
    batch, rows, heads, _ = q.shape
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(batch, rows, heads, v.shape[-1])
    lse = q.new_full((batch, heads, rows), float("-inf"), dtype=accumulate)
    stats = q.new_zeros(2, batch, heads, rows, dtype=accumulate)
    if out.numel() and k.numel() and call.num_sequences:
        tiles = choose("forward", max(q.shape[-1], v.shape[-1]), q.dtype, call)
        work = schedule.query_tiles(call, batch * rows, tiles.block_m)
        operands = Operands(_arg(q), _arg(k), _arg(v), None)
        _launch(
            forward_kernel, work.shape[0] * heads, tiles, q, k, v, call,
            operands, _arg(out), RowStats(stats, lse), _table(call, work, q, k),
            _mask(call, q.dtype), _dropout(call), _score_scale(call),
        )  # fmt: skip
    return out, lse, stats


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, contiguous, in the shapes and dtypes of q, k, v."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not (out.numel() and k.numel() and call.num_sequences):
        return dq, dk, dv
    batch, rows, heads, _ = q.shape
    delta = _delta(grad_out, grad_lse, out, stats.dtype)
    operands = Operands(_arg(q), _arg(k), _arg(v), _arg(grad_out))
    row_stats = RowStats(stats, delta)
    rest = (_mask(call, q.dtype), _dropout(call), _score_scale(call), call.scale)
    head_dim = max(q.shape[-1], v.shape[-1])

    tiles = choose("dq", head_dim, q.dtype, call)
    work = schedule.query_tiles(call, batch * rows, tiles.block_m)
    _launch(
        dq_kernel, work.shape[0] * heads, tiles, q, k, v, call,
        operands, _arg(dq), row_stats, _table(call, work, q, k), *rest,
    )  # fmt: skip
    tiles = choose("dkv", head_dim, q.dtype, call)
    work = schedule.key_tiles(call, batch * k.shape[1], tiles.block_n)
    _launch(
        dkv_kernel, work.shape[0] * k.shape[2], tiles, q, k, v, call,
        operands, _arg(dk), _arg(dv), row_stats, _table(call, work, q, k), *rest,
    )  # fmt: skip
    return dq, dk, dv


def _delta(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, dtype: torch.dtype) -> Tensor:
    batch, rows, heads, v_dim = out.shape
    delta = out.new_empty(batch, heads, rows, dtype=dtype)
    block_v = _padded(v_dim)
    block_m = max(16, 8192 // block_v)
    lse_arg = TensorArg(None, ()) if grad_lse is None else TensorArg(grad_lse, grad_lse.stride())
    grid = batch * triton.cdiv(rows, block_m) * heads
    with _on_device(out):
        delta_kernel[(grid,)](
            _arg(out), _arg(grad_out), lse_arg, delta, heads, rows,
            V_DIM=v_dim, BLOCK_M=block_m, BLOCK_V=block_v,
        )  # fmt: skip
    return delta


def _launch(
    kernel: Any,
    programs: int,
    tiles: TileConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    *args: Any,
) -> None:
    head_dim, v_dim = q.shape[-1], v.shape[-1]
    _announce(kernel.__name__, q.dtype, head_dim, v_dim, tiles, call.mask_fn)
    with _on_device(q):
        kernel[(programs,)](
            *args, q.shape[2], q.shape[1], max(k.shape[1], 1),
            ALIGN=call.align, GROUP=q.shape[2] // k.shape[2], HEAD_DIM=head_dim, V_DIM=v_dim,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            BLOCK_D=_padded(head_dim), BLOCK_V=_padded(v_dim), PRECISION=_precision(q.dtype),
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


def _arg(x: Tensor) -> TensorArg:
    """Strides of axes of size 1 are arbitrary: fixed, so that they never ask for a new compile."""
    unit = (0, 0, 0, 1)
    strides = (
        one if size == 1 else stride
        for size, stride, one in zip(x.shape, x.stride(), unit, strict=True)
    )
    return TensorArg(x, tuple(strides))


def _table(call: AttentionCall, work: Tensor, q: Tensor, k: Tensor) -> SequenceTable:
    """Starts lie inside the buffers whatever was asked for, as kernels make lengths do."""
    last_q, last_k = (x.shape[0] * x.shape[1] - 1 for x in (q, k))
    return SequenceTable(
        work,
        call.q_starts.clamp(0, last_q),
        call.q_lengths.contiguous(),
        call.kv_starts.clamp(0, last_k),
        call.kv_lengths.contiguous(),
        call.sequence_ids.contiguous(),
        call.limits.contiguous(),
    )


def _mask(call: AttentionCall, dtype: torch.dtype) -> MaskArg:
    fn = compiled_mask_fn(call.mask_fn) if call.mask_fn else None
    keys = call.key_mask
    if keys is not None and dtype == torch.float64:
        # Triton lays out a product's operands by the narrowest load they depend on, and float64
        # products have no layout for bytes ("fp64 don't support largeK MMA").
        keys = keys.long()
    return MaskArg(() if keys is None else keys.stride(), tuple(call.mask_args), keys, fn)


def _dropout(call: AttentionCall) -> DropoutArg:
    if call.dropout_seed is None:
        return DropoutArg(None, 0)
    return DropoutArg(call.dropout_seed.reshape(1).view(torch.int32), call.dropout_threshold)


def _score_scale(call: AttentionCall) -> float:
    return call.scale * _LOG2_E or _TINY


def _precision(dtype: torch.dtype) -> str:
    """Follow torch's own setting for float32 products; other dtypes have no choice."""
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launch on the tensor's device; the interpreter computes as quietly as a device does."""
    if x.is_cuda:
        return torch.cuda.device(x.device)
    import numpy as np  # the interpreter's; the library itself needs torch alone

    return np.errstate(all="ignore")
