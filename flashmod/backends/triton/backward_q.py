"""The gradient of the queries, and ``delta``, which both gradient kernels read.

Weights are recomputed from saved row statistics. No atomics: every gradient row belongs to one
program, so results are bitwise repeatable. Hidden pairs are selected away, never multiplied by 0,
so that no NaN travels along them.
"""

import triton
import triton.language as tl

from .masking import keep_scale, kept, query_tile, seen_keys, visible_keys
from .primitives import (
    key_side,
    load_row_stats,
    load_sequence,
    load_tile,
    query_side,
    store_tile,
    tile_pointers,
)


@triton.jit(do_not_specialize=["rows"])
def delta_kernel(
    out, grad_out, grad_lse, delta, heads, rows,
    V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """delta = sum(out * grad_out) - grad_lse, for BLOCK_M rows of one batch row and head."""
    program = tl.program_id(0)
    head, block = program % heads, program // heads
    blocks = tl.cdiv(rows, BLOCK_M)
    batch, row = block // blocks, (block % blocks) * BLOCK_M
    positions = tl.arange(0, BLOCK_M)
    inside = row + positions < rows
    o = load_tile(tile_pointers(out, batch, row, head, positions, BLOCK_V), inside, V_DIM, True)
    pointers = tile_pointers(grad_out, batch, row, head, positions, BLOCK_V)
    g = load_tile(pointers, inside, V_DIM, True)
    accumulate: tl.constexpr = delta.dtype.element_ty
    total = tl.sum(o.to(accumulate) * g.to(accumulate), 1)
    idx = (row + positions).to(tl.int64)
    if grad_lse.ptr is not None:
        base = grad_lse.ptr + batch.to(tl.int64) * grad_lse.strides[0]
        base += head.to(tl.int64) * grad_lse.strides[1]
        total -= tl.load(base + idx * grad_lse.strides[2], mask=inside, other=0.0)
    tl.store(delta + (batch.to(tl.int64) * heads + head) * rows + idx, total, mask=inside)


@triton.jit
def _accumulate(
    dq, q, grad_out, row_stats, query, keys, start, end, sequence, head, mask, dropout, scale,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the gradients that key tiles [start, end) send to a query tile."""
    row_max, log_sum, delta = row_stats
    for tile in tl.range(start, end, BLOCK_N):
        kv_idx = tile + tl.arange(0, BLOCK_N)
        at = tl.cast(tile, tl.int64)
        seen, rows = kv_idx, kv_idx
        if MASKED:
            seen, rows = visible_keys(query, keys, kv_idx, sequence, head, mask)
        k = load_tile(keys.k + at * keys.k_stride, rows, HEAD_DIM, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=dq.dtype)
        shifted = tl.fma(scores, tl.broadcast_to(scale, scores.shape), -row_max[:, None])
        weights = tl.exp2(shifted - log_sum[:, None])
        v = load_tile(keys.v + at * keys.v_stride, rows, V_DIM, MASKED)
        grad = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION, out_dtype=dq.dtype)
        if dropout.seed is not None:
            keep = kept(query.dropout_keys, tile, dropout, BLOCK_N, False)
            grad = tl.where(keep, grad * keep_scale(dropout, dq.dtype), 0.0)
        grad = weights * (grad - delta[:, None])
        if MASKED:
            grad = tl.where(seen, grad, 0.0)
        dq = tl.dot(grad.to(k.dtype), k, dq, input_precision=PRECISION, out_dtype=dq.dtype)
    return dq


@triton.jit(do_not_specialize=["rows", "kv_rows"])
def dq_kernel(
    operands, grad_q, stats, table, mask, dropout, score_scale: tl.float64, scale: tl.float64,
    heads, rows, kv_rows,
    ALIGN: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (query tile, head)."""
    program = tl.program_id(0)
    head = program % heads
    sequence, first = load_sequence(table, program // heads, rows, kv_rows, ALIGN)
    limits = sequence.limits
    if first >= limits.q_len:
        return
    query = query_tile(first, sequence, head, dropout, BLOCK_M)
    in_q = query.idx < limits.q_len
    own = (first, limits.q_len)
    side = query_side(operands, stats, sequence, head, heads, rows, own, BLOCK_M, BLOCK_D, BLOCK_V)
    at = first.to(tl.int64)
    sees = query.lo < query.hi
    q = load_tile(side.q + at * side.q_stride, sees, HEAD_DIM, True)
    grad_out = load_tile(side.grad_out + at * side.grad_stride, sees, V_DIM, True)
    row_stats = load_row_stats(side, query.idx, sees, True)

    seen, cuts = seen_keys(first, limits, mask, BLOCK_M, BLOCK_N)
    keys = key_side(operands, sequence, head // GROUP, seen, BLOCK_N, BLOCK_D, BLOCK_V)
    accumulate: tl.constexpr = stats.saved.dtype.element_ty
    dq = tl.zeros([BLOCK_M, BLOCK_D], accumulate)
    for part in tl.static_range(3):  # masked head, unmasked middle, masked tail
        dq = _accumulate(
            dq, q, grad_out, row_stats, query, keys, cuts[part], cuts[part + 1], sequence, head,
            mask, dropout, tl.full((), score_scale, accumulate),
            HEAD_DIM, V_DIM, BLOCK_N, PRECISION, part != 1,
        )  # fmt: skip
    batch, row = sequence.q_batch, sequence.q_row
    pointers = tile_pointers(grad_q, batch, row, head, query.idx, BLOCK_D)
    store_tile(pointers, dq * tl.full((), scale, accumulate), in_q, HEAD_DIM)
