"""The gradients of keys and values, from transposed scores, so that no product transposes them."""

import triton
import triton.language as tl

from .arguments import Head
from .device_rules import keep_scale
from .dropping import dropout_rows, kept
from .masking import key_tile, keys_of_head, seeing_queries, visible_queries
from .primitives import (
    load_row_stats,
    load_sequence,
    load_tile,
    query_side,
    store_tile,
    tile_pointers,
)
from .scores import head_scores, logits


@triton.jit
def _drop(weights, grad, q_idx, rows, keys, head, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    """Dropped weights and the gradient of undropped ones, (N, M).

    One rate for all is left to scale the sum of what the weights are multiplied with.
    """
    dropout = head.dropout
    dropped = weights
    if dropout.seed is not None:
        rows = dropout_rows(q_idx, rows, head.sequence, head.index, dropout, MASKED)
        keep = kept(rows, keys.first, dropout, BLOCK_N, True)
        factor = keep_scale(rows.threshold.to(weights.dtype))
        if dropout.thresholds is not None:
            factor = factor[None, :]
            dropped = weights * factor
        dropped = tl.where(keep, dropped, 0.0)
        grad = tl.where(keep, grad * factor, 0.0)
    return dropped, grad


@triton.jit
def _accumulate(
    dk, dv, k, v, keys, side, start, end, head, mask,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
    LINEAR: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the gradients that query tiles [start, end) of one head send to a key tile."""
    BLOCK_N: tl.constexpr = k.shape[0]
    acc: tl.constexpr = dk.dtype
    for tile in tl.range(start, end, BLOCK_M, disable_licm=True):
        q_idx = tile + tl.arange(0, BLOCK_M)
        at = tl.cast(tile, tl.int64)
        seen, rows, bias = q_idx, q_idx, q_idx
        if MASKED:
            seen, rows, bias = visible_queries(keys, side, q_idx, head, mask)
        row_max, log_sum, delta = load_row_stats(side, q_idx, rows, MASKED)
        q = load_tile(side.q + at * side.q_stride, rows, HEAD_DIM, MASKED)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION, out_dtype=acc)
        scores, slope = logits(scores, bias, q_idx[None, :], keys.idx[:, None], head, LINEAR)
        unit = tl.broadcast_to(head.scores.unit, scores.shape)
        weights = tl.exp2(tl.fma(scores, unit, -row_max[None, :]) - log_sum[None, :])
        if MASKED:
            weights = tl.where(seen, weights, 0.0)
        grad_out = load_tile(side.grad_out + at * side.grad_stride, rows, V_DIM, MASKED)
        grad = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION, out_dtype=acc)
        dropped, grad = _drop(weights, grad, q_idx, rows, keys, head, BLOCK_N, MASKED)
        dropped = dropped.to(grad_out.dtype)
        dv = tl.dot(dropped, grad_out, dv, input_precision=PRECISION, out_dtype=acc)
        grad = weights * (grad - delta[None, :])
        if head.arg.cap is not None:
            grad *= slope
        if MASKED:
            grad = tl.where(seen, grad, 0.0)
        dk = tl.dot(grad.to(q.dtype), q, dk, input_precision=PRECISION, out_dtype=acc)
    return dk, dv


@triton.jit(do_not_specialize=["rows", "kv_rows"])
def dkv_kernel(
    operands, grad_k, grad_v, stats, table, mask, dropout, score,
    score_scale: tl.float64, scale: tl.float64, heads, rows, kv_rows,
    ALIGN: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, LINEAR: tl.constexpr, EVERYWHERE: tl.constexpr,
):  # fmt: skip
    """One program per (key tile, key head): the query heads of its group one after another."""
    program = tl.program_id(0)
    kv_heads = heads // GROUP
    kv_head = program % kv_heads
    sequence, first = load_sequence(table, program // kv_heads, rows, kv_rows, ALIGN)
    limits = sequence.limits
    if first >= limits.end_key:
        return
    keys = key_tile(first, sequence, mask, BLOCK_N)
    used = keys.start < keys.end
    batch, row = sequence.kv_batch, sequence.kv_row
    pointers = tile_pointers(operands.k, batch, row, kv_head, keys.idx, BLOCK_D)
    k = load_tile(pointers, used, HEAD_DIM, True)
    pointers = tile_pointers(operands.v, batch, row, kv_head, keys.idx, BLOCK_V)
    v = load_tile(pointers, used, V_DIM, True)

    seeing, cuts = seeing_queries(first, limits, BLOCK_M, BLOCK_N, EVERYWHERE)
    accumulate: tl.constexpr = stats.saved.dtype.element_ty
    dk = tl.zeros([BLOCK_N, BLOCK_D], accumulate)
    dv = tl.zeros([BLOCK_N, BLOCK_V], accumulate)
    PARTS: tl.constexpr = 1 if EVERYWHERE else 3
    for member in range(GROUP):
        index = kv_head * GROUP + member
        side = query_side(
            operands, stats, sequence, index, heads, rows, seeing, BLOCK_M, BLOCK_D, BLOCK_V
        )
        scores = head_scores(score, sequence, index, tl.full((), score_scale, accumulate), LINEAR)
        head = Head(sequence, index, dropout, score, scores)
        shown = keys_of_head(keys, head, mask)
        for part in tl.static_range(PARTS):  # masked head, unmasked middle, masked tail
            dk, dv = _accumulate(
                dk, dv, k, v, shown, side, cuts[part], cuts[part + 1], head, mask,
                HEAD_DIM, V_DIM, BLOCK_M, PRECISION, LINEAR, part != 1,
            )  # fmt: skip
    in_kv = keys.idx < limits.end_key
    if dropout.seed is not None and dropout.thresholds is None:
        dv = dv * keep_scale(tl.full((), dropout.threshold, accumulate))
    pointers = tile_pointers(grad_k, batch, row, kv_head, keys.idx, BLOCK_D)
    store_tile(pointers, dk * tl.full((), scale, accumulate), in_kv, HEAD_DIM)
    pointers = tile_pointers(grad_v, batch, row, kv_head, keys.idx, BLOCK_V)
    store_tile(pointers, dv, in_kv, V_DIM)
