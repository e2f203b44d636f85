"""The forward kernel: online softmax over tiles (Milakov and Gimelshein 2018; Dao et al. 2022)."""

import triton
import triton.language as tl

from .masking import keep_scale, kept, query_tile, seen_keys, visible_keys
from .primitives import key_side, load_sequence, load_tile, stats_block, store_tile, tile_pointers


@triton.jit
def _attend(
    acc, row_max, row_sum, q, query, keys, start, end, sequence, head, mask, dropout, scale,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Fold key tiles [start, end) into the running maximum, sum and output of every query row."""
    for tile in tl.range(start, end, BLOCK_N):
        kv_idx = tile + tl.arange(0, BLOCK_N)
        at = tl.cast(tile, tl.int64)
        seen, rows = kv_idx, kv_idx
        if MASKED:
            seen, rows = visible_keys(query, keys, kv_idx, sequence, head, mask)
        k = load_tile(keys.k + at * keys.k_stride, rows, HEAD_DIM, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=acc.dtype)
        if MASKED:
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        pivot = new_max
        if MASKED:  # rows that have seen no key yet
            pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        scale_of = tl.broadcast_to(scale, scores.shape)
        weights = tl.exp2(tl.fma(scores, scale_of, -(pivot * scale)[:, None]))
        rescale = tl.exp2((row_max - pivot) * scale)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        if dropout.seed is not None:
            keep = kept(query.dropout_keys, tile, dropout, BLOCK_N, False)
            weights = tl.where(keep, weights, 0.0)
        v = load_tile(keys.v + at * keys.v_stride, rows, V_DIM, MASKED)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION, out_dtype=acc.dtype)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _store_row_stats(stats, block, idx, rows, row_max, row_sum, in_q):
    """Store row maximum and log-sum in base 2, and lse in base e; -inf for rows that saw no key."""
    dead = row_max == float("-inf")
    row_max = tl.where(dead, 0.0, row_max)
    log_sum = tl.log2(row_sum)
    tl.store(stats.saved + 2 * block * rows + idx, row_max, mask=in_q)
    tl.store(stats.saved + (2 * block + 1) * rows + idx, log_sum, mask=in_q)
    lse = (row_max + log_sum) * 0.6931471805599453
    tl.store(stats.last + block * rows + idx, tl.where(dead, float("-inf"), lse), mask=in_q)


@triton.jit(do_not_specialize=["rows", "kv_rows"])
def forward_kernel(
    operands, out, stats, table, mask, dropout, score_scale: tl.float64, heads, rows, kv_rows,
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
    batch, row = sequence.q_batch, sequence.q_row
    pointers = tile_pointers(operands.q, batch, row, head, query.idx, BLOCK_D)
    q = load_tile(pointers, query.lo < query.hi, HEAD_DIM, True)
    q = tl.where(score_scale < 0, -q, q)  # so that the largest product is the largest logit
    accumulate: tl.constexpr = stats.saved.dtype.element_ty
    scale = tl.abs(tl.full((), score_scale, accumulate))

    seen, cuts = seen_keys(first, limits, mask, BLOCK_M, BLOCK_N)
    keys = key_side(operands, sequence, head // GROUP, seen, BLOCK_N, BLOCK_D, BLOCK_V)
    acc = tl.zeros([BLOCK_M, BLOCK_V], accumulate)
    row_max = tl.full([BLOCK_M], float("-inf"), accumulate)
    row_sum = tl.zeros([BLOCK_M], accumulate)
    for part in tl.static_range(3):  # masked head, unmasked middle, masked tail
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, query, keys, cuts[part], cuts[part + 1], sequence, head,
            mask, dropout, scale, HEAD_DIM, V_DIM, BLOCK_N, PRECISION, part != 1,
        )  # fmt: skip

    row_sum = tl.where(row_max == float("-inf"), 1.0, row_sum)
    idx, block = sequence.q_row + query.idx, stats_block(sequence, head, heads)
    _store_row_stats(stats, block, idx, rows, row_max * scale, row_sum, in_q)
    factor = 1.0 / row_sum
    if dropout.seed is not None:
        factor = factor * keep_scale(dropout, accumulate)
    pointers = tile_pointers(out, batch, row, head, query.idx, BLOCK_V)
    store_tile(pointers, acc * factor[:, None], in_q, V_DIM)
