"""The gradient of the queries, and ``delta``, which all gradient kernels read.

Weights are recomputed from saved row statistics. No atomics: every gradient row belongs to one
program, so results are bitwise repeatable. Hidden pairs are selected away, never multiplied by 0,
so that no NaN travels along them.
"""

import triton
import triton.language as tl

from .arguments import Head
from .device_rules import keep_scale
from .dropping import kept
from .masking import query_tile, seen_keys, visible_keys
from .primitives import (
    key_side,
    load_row_stats,
    load_sequence,
    load_tile,
    query_side,
    store_tile,
    tile_pointers,
)
from .scores import head_scores, logits


@triton.jit(do_not_specialize=["rows"])
def delta_kernel(
    out, grad_out, grad_lse, delta, heads, rows,
    V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """delta = sum(out * grad_out) - grad_lse, for BLOCK_M rows of one batch row and head.

    Where ``out`` is 0 whatever ``grad_out`` holds is left out: rows that see no key ignore it.
    """
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
    o = o.to(accumulate)
    total = tl.sum(o * tl.where(o == 0, 0.0, g.to(accumulate)), 1)
    idx = (row + positions).to(tl.int64)
    if grad_lse.ptr is not None:
        base = grad_lse.ptr + batch.to(tl.int64) * grad_lse.strides[0]
        base += head.to(tl.int64) * grad_lse.strides[1]
        total -= tl.load(base + idx * grad_lse.strides[2], mask=inside, other=0.0)
    tl.store(delta + (batch.to(tl.int64) * heads + head) * rows + idx, total, mask=inside)


@triton.jit
def tile_gradient(
    q, grad_out, row_stats, query, keys, tile, head, mask,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    LINEAR: tl.constexpr, MASKED: tl.constexpr, OF_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """The gradient (M, N) of a tile of logits, or OF_PRODUCTS before cap, and the keys (N, D)."""
    row_max, log_sum, delta = row_stats
    acc: tl.constexpr = row_max.dtype
    kv_idx = tile + tl.arange(0, BLOCK_N)
    at = tl.cast(tile, tl.int64)
    seen, rows, bias = kv_idx, kv_idx, kv_idx
    if MASKED:
        seen, rows, bias = visible_keys(query, keys, kv_idx, head, mask)
    k = load_tile(keys.k + at * keys.k_stride, rows, HEAD_DIM, MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=acc)
    scores, slope = logits(scores, bias, query.idx[:, None], kv_idx[None, :], head, LINEAR)
    unit = tl.broadcast_to(head.scores.unit, scores.shape)
    weights = tl.exp2(tl.fma(scores, unit, -row_max[:, None]) - log_sum[:, None])
    v = load_tile(keys.v + at * keys.v_stride, rows, V_DIM, MASKED)
    grad = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION, out_dtype=acc)
    if head.dropout.seed is not None:
        keep = kept(query.dropout, tile, head.dropout, BLOCK_N, False)
        factor = keep_scale(query.dropout.threshold.to(acc))
        if head.dropout.thresholds is not None:
            factor = factor[:, None]
        grad = tl.where(keep, grad * factor, 0.0)
    grad = weights * (grad - delta[:, None])
    if OF_PRODUCTS and head.arg.cap is not None:
        grad *= slope
    if MASKED:
        grad = tl.where(seen, grad, 0.0)
    return grad, k


@triton.jit
def _accumulate(
    dq, q, grad_out, row_stats, query, keys, start, end, head, mask,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    LINEAR: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the gradients that key tiles [start, end) send to a query tile."""
    for tile in tl.range(start, end, BLOCK_N):
        grad, k = tile_gradient(
            q, grad_out, row_stats, query, keys, tile, head, mask,
            HEAD_DIM, V_DIM, BLOCK_N, PRECISION, LINEAR, MASKED, True,
        )  # fmt: skip
        dq = tl.dot(grad.to(k.dtype), k, dq, input_precision=PRECISION, out_dtype=dq.dtype)
    return dq


@triton.jit(do_not_specialize=["rows", "kv_rows"])
def dq_kernel(
    operands, grad_q, stats, table, mask, dropout, score,
    score_scale: tl.float64, scale: tl.float64, heads, rows, kv_rows,
    ALIGN: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, LINEAR: tl.constexpr, EVERYWHERE: tl.constexpr,
):  # fmt: skip
    """One program per (query tile, head)."""
    program = tl.program_id(0)
    index = program % heads
    sequence, first = load_sequence(table, program // heads, rows, kv_rows, ALIGN)
    limits = sequence.limits
    if first >= limits.q_len:
        return
    query = query_tile(first, sequence, index, mask, dropout, BLOCK_M)
    in_q = query.idx < limits.q_len
    own = (first, limits.q_len)
    side = query_side(operands, stats, sequence, index, heads, rows, own, BLOCK_M, BLOCK_D, BLOCK_V)
    at = first.to(tl.int64)
    sees = query.lo < query.hi
    q = load_tile(side.q + at * side.q_stride, sees, HEAD_DIM, True)
    grad_out = load_tile(side.grad_out + at * side.grad_stride, sees, V_DIM, True)
    row_stats = load_row_stats(side, query.idx, sees, True)

    accumulate: tl.constexpr = stats.saved.dtype.element_ty
    scores = head_scores(score, sequence, index, tl.full((), score_scale, accumulate), LINEAR)
    head = Head(sequence, index, dropout, score, scores)
    seen, cuts = seen_keys(first, limits, BLOCK_M, BLOCK_N, EVERYWHERE)
    keys = key_side(operands, sequence, index // GROUP, seen, BLOCK_N, BLOCK_D, BLOCK_V)
    dq = tl.zeros([BLOCK_M, BLOCK_D], accumulate)
    PARTS: tl.constexpr = 1 if EVERYWHERE else 3
    for part in tl.static_range(PARTS):  # masked head, unmasked middle, masked tail
        dq = _accumulate(
            dq, q, grad_out, row_stats, query, keys, cuts[part], cuts[part + 1], head, mask,
            HEAD_DIM, V_DIM, BLOCK_N, PRECISION, LINEAR, part != 1,
        )  # fmt: skip
    batch, row = sequence.q_batch, sequence.q_row
    pointers = tile_pointers(grad_q, batch, row, index, query.idx, BLOCK_D)
    store_tile(pointers, dq * tl.full((), scale, accumulate), in_q, HEAD_DIM)
