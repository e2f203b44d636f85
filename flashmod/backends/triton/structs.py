"""The host's values as the structs that kernels receive."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from ...spec import AttentionCall, TileConfig
from ...stats import plan_tiles
from .arguments import DropoutArg, MaskArg, ScoreArg, SequenceTable, StatsArg, TensorArg
from .mask_functions import compiled_mask_fn

_LOG2_E = 1 / math.log(2)
_TINY = 2.0**-100  # stands for a scale of 0, and keeps -inf * scale at -inf


def tensor_arg(x: Tensor) -> TensorArg:
    """Strides of axes of size 1 are arbitrary: fixed, so that they never ask for a new compile."""
    unit = (0, 0, 0, 1)
    strides = (
        one if size == 1 else stride
        for size, stride, one in zip(x.shape, x.stride(), unit, strict=True)
    )
    return TensorArg(x, tuple(strides))


def sequence_table(call: AttentionCall, work: Tensor | None, q: Tensor, k: Tensor) -> SequenceTable:
    """Rows lie inside the buffers whatever was asked for: kernels do the same with lengths."""
    last_q, last_k = (max(x.shape[0] * x.shape[1], 1) - 1 for x in (q, k))
    lengths = [call.q_lengths, call.kv_lengths]
    if call.attn_mask is not None:
        for axis in (0, 1):
            size = call.attn_mask.shape[axis + 2]
            if size > 1:
                lengths[axis] = lengths[axis].clamp(max=size)
    return SequenceTable(
        work,
        call.q_starts.clamp(0, last_q),
        lengths[0].contiguous(),
        call.kv_starts.clamp(0, last_k),
        lengths[1].contiguous(),
        call.sequence_ids.contiguous(),
        call.limits.contiguous(),
    )


def mask_arg(call: AttentionCall, dtype: torch.dtype) -> MaskArg:
    fn = compiled_mask_fn(call.mask_fn) if call.mask_fn else None
    q_labels, kv_labels = (_wide(x, dtype) for x in (call.q_labels, call.kv_labels))
    args = tuple(call.mask_args)
    mask = call.attn_mask
    if mask is None:
        return MaskArg((), args, None, None, fn, q_labels, kv_labels)
    wide = _wide(mask.detach(), dtype)
    assert wide is not None
    strides = tuple(
        0 if size == 1 else stride for size, stride in zip(wide.shape, wide.stride(), strict=True)
    )
    keys, pairs = (wide, None) if wide.shape[2] == 1 else (None, wide)
    return MaskArg(strides, args, keys, pairs, fn, q_labels, kv_labels)


def score_arg(call: AttentionCall) -> ScoreArg:
    slopes, sink = (None if x is None else x.detach() for x in (call.alibi_slopes, call.sink))
    cap = torch.tensor(call.softcap, dtype=torch.float32).item() if call.softcap else None
    return ScoreArg(
        0 if slopes is None or slopes.shape[0] == 1 else slopes.shape[1],
        0 if sink is None or sink.shape[0] == 1 else sink.shape[1],
        cap,
        None if cap is None else call.softcap - cap,
        None if slopes is None else slopes.contiguous(),
        None if sink is None else sink.contiguous(),
    )


def is_linear(call: AttentionCall) -> bool:
    """Whether a logit is its product times a scale."""
    bias = call.attn_mask is not None and call.attn_mask.is_floating_point()
    return not (bias or call.softcap or call.alibi_slopes is not None)


def dropout_arg(call: AttentionCall, dtype: torch.dtype) -> DropoutArg:
    if call.dropout_seed is None:
        return DropoutArg(0, None, None)
    words = call.dropout_seed.reshape(1).view(torch.int32)
    return DropoutArg(call.dropout_threshold, words, _wide(call.dropout_thresholds, dtype))


def stats_arg(call: AttentionCall, q: Tensor, tiles: TileConfig, dtype: torch.dtype) -> StatsArg:
    """Room for the statistics of a forward pass: nothing happened yet; none if nobody asks."""
    if not call.collect_stats:
        return StatsArg(0, None, None, None)
    batch, rows, heads, _ = q.shape
    plan = plan_tiles(call, heads, tiles)
    of_rows = q.new_zeros(batch, heads, 2, rows, dtype=dtype)
    of_rows[:, :, 0] = -math.inf
    counts = torch.zeros(3, plan.total, dtype=torch.int32, device=q.device)
    offsets = torch.tensor(plan.offsets, dtype=torch.int64, device=q.device)
    return StatsArg(plan.total, counts, offsets, of_rows)


def score_scale(call: AttentionCall) -> float:
    return call.scale * _LOG2_E or _TINY


def _wide(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Triton lays out a product's operands by the narrowest load they depend on.

    Float64 products have no layout for less than 8 bytes ("fp64 don't support largeK MMA").
    """
    if x is None or dtype != torch.float64:
        return x
    return x.double() if x.is_floating_point() else x.long()


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launch on the tensor's device; the interpreter computes as quietly as a device does."""
    if x.is_cuda:
        return torch.cuda.device(x.device)
    import numpy as np  # the interpreter's; the library itself needs torch alone

    return np.errstate(all="ignore")
