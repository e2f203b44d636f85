"""Host side of the kernels: what each pass allocates, launches and gives."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from ...spec import AttentionCall, Forward, Gradients, TileConfig
from . import schedule
from .arguments import Operands, RowStats, TensorArg
from .backward_bias import bias_kernel
from .backward_kv import dkv_kernel
from .backward_q import delta_kernel, dq_kernel
from .forward import forward_kernel
from .launch import launch, padded
from .structs import (
    dropout_arg,
    mask_arg,
    on_device,
    score_arg,
    score_scale,
    sequence_table,
    stats_arg,
    tensor_arg,
)
from .tiles import choose


def forward_tiles(q: Tensor, v: Tensor, call: AttentionCall) -> TileConfig:
    """The tile sizes of :func:`forward`."""
    return choose("forward", max(q.shape[-1], v.shape[-1]), q.dtype, call)


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Forward:
    """See :class:`flashmod.dispatch.Backend`; ``saved`` is what :class:`RowStats` says."""
    batch, rows, heads, _ = q.shape
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(batch, rows, heads, v.shape[-1])
    lse = q.new_full((batch, heads, rows), -math.inf, dtype=accumulate)
    # A weight of a row in no sequence, its sink's too, is exp2(... - inf) = 0.
    saved = q.new_full((batch, heads, 2, rows), math.inf, dtype=accumulate)
    tiles = forward_tiles(q, v, call)
    stats = stats_arg(call, q, tiles, accumulate)
    if out.numel() and call.num_sequences:
        work = schedule.query_tiles(call, batch * rows, tiles.block_m)
        operands = Operands(tensor_arg(q), tensor_arg(k), tensor_arg(v), None)
        launch(
            forward_kernel, work.shape[0] * heads, tiles, q, k, v, call,
            operands, tensor_arg(out), RowStats(saved, lse), stats,
            sequence_table(call, work, q, k), mask_arg(call, q.dtype),
            dropout_arg(call, q.dtype), score_arg(call), score_scale(call),
        )  # fmt: skip
    row_stats = None if stats.rows is None else stats.rows.movedim(2, 0)
    return Forward(out, lse, saved, row_stats, stats.tiles)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    saved: Tensor,
    call: AttentionCall,
    mask_grad: bool,
) -> Gradients:
    """See :class:`flashmod.dispatch.Backend`."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    grads = Gradients(dq, dk, dv, _zero_bias(call) if mask_grad else None, _zero_sink(call, q))
    if not (out.numel() and call.num_sequences):
        return grads
    batch, rows, heads, _ = q.shape
    row_stats = RowStats(saved, _delta(grad_out, grad_lse, out, saved.dtype))
    if call.sink is not None:
        grads = grads._replace(sink=_sink_gradient(call.sink, row_stats))
    if not k.numel():
        return grads
    operands = Operands(tensor_arg(q), tensor_arg(k), tensor_arg(v), tensor_arg(grad_out))
    features = (mask_arg(call, q.dtype), dropout_arg(call, q.dtype), score_arg(call))
    rest = (*features, score_scale(call), call.scale)
    head_dim = max(q.shape[-1], v.shape[-1])

    tiles = choose("dq", head_dim, q.dtype, call)
    work = schedule.query_tiles(call, batch * rows, tiles.block_m)
    launch(
        dq_kernel, work.shape[0] * heads, tiles, q, k, v, call,
        operands, tensor_arg(dq), row_stats, sequence_table(call, work, q, k), *rest,
    )  # fmt: skip
    tiles = choose("dkv", head_dim, q.dtype, call)
    work = schedule.key_tiles(call, batch * k.shape[1], tiles.block_n)
    launch(
        dkv_kernel, work.shape[0] * k.shape[2], tiles, q, k, v, call,
        operands, tensor_arg(dk), tensor_arg(dv), row_stats,
        sequence_table(call, work, q, k), *rest,
    )  # fmt: skip
    if grads.attn_mask is not None:
        args = (operands, row_stats, sequence_table(call, None, q, k), *rest[:-1])
        grads = grads._replace(attn_mask=_bias_gradient(q, k, v, call, grads.attn_mask, *args))
    return grads


def _bias_gradient(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, grad: Tensor, operands: Any, *args: Any
) -> Tensor:
    """The gradient of ``attn_mask`` in ``grad``, or where an axis of pairs is summed over, anew.

    The heads that share such a bias then work side by side, and their sums are added at the end.
    """
    count, bias_heads, q_size, kv_size = grad.shape
    over = {"OVER_Q": q_size == 1, "OVER_K": kv_size == 1}
    heads = q.shape[2]
    result = grad
    if q_size == 1 or kv_size == 1:
        bias_heads = heads
        result = grad.new_zeros((count, heads, q_size, kv_size), dtype=args[0].saved.dtype)
    tiles = choose("dbias", max(q.shape[-1], v.shape[-1]), q.dtype, call)
    programs = triton.cdiv(q_size, tiles.block_m) * triton.cdiv(kv_size, tiles.block_n)
    launch(
        bias_kernel, count * bias_heads * programs, tiles, q, k, v, call,
        operands, tensor_arg(result), *args, q_size, kv_size, bias_heads,
        call.num_sequences // count, heads // bias_heads, **over,
    )  # fmt: skip
    if result.shape != grad.shape:
        result = result.sum(1, keepdim=True)
    return result.to(grad.dtype)


def _zero_bias(call: AttentionCall) -> Tensor | None:
    mask = call.attn_mask
    return None if mask is None else torch.zeros(mask.shape, dtype=mask.dtype, device=mask.device)


def _zero_sink(call: AttentionCall, q: Tensor) -> Tensor | None:
    if call.sink is None:
        return None
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_zeros(q.shape[0], q.shape[2], dtype=accumulate)


def _sink_gradient(sink: Tensor, row_stats: RowStats) -> Tensor:
    """(B, H): minus the sum over rows of the sink's weight times delta."""
    row_max, log_sum = row_stats.saved.unbind(2)
    logit = sink.detach().to(row_max.dtype)[..., None] / math.log(2)
    weight = (logit - row_max - log_sum).exp2()
    return -torch.where(weight == 0, 0.0, weight * row_stats.last).sum(2)


def _delta(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, dtype: torch.dtype) -> Tensor:
    batch, rows, heads, v_dim = out.shape
    delta = out.new_empty(batch, heads, rows, dtype=dtype)
    block_v = padded(v_dim)
    block_m = max(16, 8192 // block_v)
    lse_arg = TensorArg(None, ()) if grad_lse is None else TensorArg(grad_lse, grad_lse.stride())
    grid = batch * triton.cdiv(rows, block_m) * heads
    with on_device(out):
        delta_kernel[(grid,)](
            tensor_arg(out), tensor_arg(grad_out), lse_arg, delta, heads, rows,
            V_DIM=v_dim, BLOCK_M=block_m, BLOCK_V=block_v,
        )  # fmt: skip
    return delta
