"""The gradients of keys and values, from transposed scores, so that no product transposes them."""

import triton
import triton.language as tl

from .masking import keep_scale, kept, key_tile, row_keys, seeing_queries, visible_queries
from .primitives import (
    load_row_stats,
    load_sequence,
    load_tile,
    query_side,
    store_tile,
    tile_pointers,
)


@triton.jit
def _accumulate(
    dk, dv, k, v, keys, side, start, end, sequence, head, mask, dropout, scale,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the gradients that query tiles [start, end) of one head send to a key tile."""
    BLOCK_N: tl.constexpr = k.shape[0]
    acc: tl.constexpr = dk.dtype
    for tile in tl.range(start, end, BLOCK_M, disable_licm=True):
        q_idx = tile + tl.arange(0, BLOCK_M)
        at = tl.cast(tile, tl.int64)
        seen, rows = q_idx, q_idx
        if MASKED:
            seen, rows = visible_queries(keys, side, q_idx, sequence, head, mask)
        row_max, log_sum, delta = load_row_stats(side, q_idx, rows, MASKED)
        q = load_tile(side.q + at * side.q_stride, rows, HEAD_DIM, MASKED)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION, out_dtype=acc)
        shifted = tl.fma(scores, tl.broadcast_to(scale, scores.shape), -row_max[None, :])
        weights = tl.exp2(shifted - log_sum[None, :])
        if MASKED:
            weights = tl.where(seen, weights, 0.0)
        grad_out = load_tile(side.grad_out + at * side.grad_stride, rows, V_DIM, MASKED)
        grad = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION, out_dtype=acc)
        dropped = weights
        if dropout.seed is not None:
            keep = kept(
                row_keys(q_idx, sequence, head, dropout), keys.first, dropout, BLOCK_N, True
            )
            dropped = tl.where(keep, weights, 0.0)
            grad = tl.where(keep, grad * keep_scale(dropout, acc), 0.0)
        dropped = dropped.to(grad_out.dtype)
        dv = tl.dot(dropped, grad_out, dv, input_precision=PRECISION, out_dtype=acc)
        grad = weights * (grad - delta[None, :])
        if MASKED:
            grad = tl.where(seen, grad, 0.0)
        dk = tl.dot(grad.to(q.dtype), q, dk, input_precision=PRECISION, out_dtype=acc)
    return dk, dv


@triton.jit(do_not_specialize=["rows", "kv_rows"])
def dkv_kernel(
    operands, grad_k, grad_v, stats, table, mask, dropout,
    score_scale: tl.float64, scale: tl.float64, heads, rows, kv_rows,
    ALIGN: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
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

    seeing, cuts = seeing_queries(first, limits, mask, BLOCK_M, BLOCK_N)
    accumulate: tl.constexpr = stats.saved.dtype.element_ty
    dk = tl.zeros([BLOCK_N, BLOCK_D], accumulate)
    dv = tl.zeros([BLOCK_N, BLOCK_V], accumulate)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        side = query_side(
            operands, stats, sequence, head, heads, rows, seeing, BLOCK_M, BLOCK_D, BLOCK_V
        )
        for part in tl.static_range(3):  # masked head, unmasked middle, masked tail
            dk, dv = _accumulate(
                dk, dv, k, v, keys, side, cuts[part], cuts[part + 1], sequence, head,
                mask, dropout, tl.full((), score_scale, accumulate),
                HEAD_DIM, V_DIM, BLOCK_M, PRECISION, part != 1,
            )  # fmt: skip
    in_kv = keys.idx < limits.end_key
    if dropout.seed is not None:
        dv = dv * keep_scale(dropout, accumulate)
    pointers = tile_pointers(grad_k, batch, row, kv_head, keys.idx, BLOCK_D)
    store_tile(pointers, dk * tl.full((), scale, accumulate), in_kv, HEAD_DIM)
    pointers = tile_pointers(grad_v, batch, row, kv_head, keys.idx, BLOCK_V)
    store_tile(pointers, dv, in_kv, V_DIM)
