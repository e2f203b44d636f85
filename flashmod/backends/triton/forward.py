"""The forward kernel: online softmax over tiles (Milakov and Gimelshein 2018; Dao et al. 2022)."""

import triton
import triton.language as tl

from .arguments import Head
from .counting import count_tile, fold_spread, spread_of, store_row_statistics
from .device_rules import keep_scale
from .dropping import kept
from .masking import query_tile, seen_keys, visible_keys
from .primitives import key_side, load_sequence, load_tile, stats_block, store_tile, tile_pointers
from .scores import finish_rows, head_scores, logits


@triton.jit
def _attend(
    acc, row_max, row_sum, spread, q, query, keys, start, end, head, mask, stats,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    LINEAR: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold key tiles [start, end) into the running maximum, sum and output of every query row."""
    unit = head.scores.unit
    for tile in tl.range(start, end, BLOCK_N):
        kv_idx = tile + tl.arange(0, BLOCK_N)
        at = tl.cast(tile, tl.int64)
        seen, rows, bias = kv_idx, kv_idx, kv_idx
        if MASKED:
            seen, rows, bias = visible_keys(query, keys, kv_idx, head, mask)
        k = load_tile(keys.k + at * keys.k_stride, rows, HEAD_DIM, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=acc.dtype)
        scores, slope = logits(scores, bias, query.idx[:, None], kv_idx[None, :], head, LINEAR)
        if MASKED:
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        pivot = new_max
        if MASKED:  # rows that have seen no key yet
            pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        exponents = tl.fma(scores, tl.broadcast_to(unit, scores.shape), -(pivot * unit)[:, None])
        weights = tl.exp2(exponents)
        rescale = tl.exp2((row_max - pivot) * unit)
        spread = fold_spread(
            stats, spread, weights, exponents, row_sum, row_max, pivot, rescale, unit
        )
        count_tile(stats, tile, query, row_max, new_max, head, MASKED, BLOCK_N)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        if head.dropout.seed is not None:
            keep = kept(query.dropout, tile, head.dropout, BLOCK_N, False)
            weights = tl.where(keep, weights, 0.0)
        v = load_tile(keys.v + at * keys.v_stride, rows, V_DIM, MASKED)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION, out_dtype=acc.dtype)
        row_max = new_max
    return acc, row_max, row_sum, spread


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
    operands, out, row_stats, stats, table, mask, dropout, score, score_scale: tl.float64,
    heads, rows, kv_rows,
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
    batch, row = sequence.q_batch, sequence.q_row
    pointers = tile_pointers(operands.q, batch, row, index, query.idx, BLOCK_D)
    q = load_tile(pointers, query.lo < query.hi, HEAD_DIM, True)
    accumulate: tl.constexpr = row_stats.saved.dtype.element_ty
    scale = tl.full((), score_scale, accumulate)
    if LINEAR:  # so that the largest product is the largest logit
        q = tl.where(score_scale < 0, -q, q)
        scale = tl.abs(scale)
    scores = head_scores(score, sequence, index, scale, LINEAR)
    head = Head(sequence, index, dropout, score, scores)

    seen, cuts = seen_keys(first, limits, BLOCK_M, BLOCK_N, EVERYWHERE)
    keys = key_side(operands, sequence, index // GROUP, seen, BLOCK_N, BLOCK_D, BLOCK_V)
    acc = tl.zeros([BLOCK_M, BLOCK_V], accumulate)
    row_max = tl.full([BLOCK_M], float("-inf"), accumulate)
    row_sum = tl.zeros([BLOCK_M], accumulate)
    spread = spread_of(stats, row_sum)
    PARTS: tl.constexpr = 1 if EVERYWHERE else 3
    for part in tl.static_range(PARTS):  # masked head, unmasked middle, masked tail
        acc, row_max, row_sum, spread = _attend(
            acc, row_max, row_sum, spread, q, query, keys, cuts[part], cuts[part + 1], head, mask,
            stats, HEAD_DIM, V_DIM, BLOCK_N, PRECISION, LINEAR, part != 1,
        )  # fmt: skip

    idx, block = sequence.q_row + query.idx, stats_block(sequence, index, heads)
    row_max = row_max * scores.unit
    store_row_statistics(stats, block, rows, idx, in_q, row_max, row_sum, spread)
    row_max, row_sum, factor = finish_rows(row_max, row_sum, sequence, index, score)
    _store_row_stats(row_stats, block, idx, rows, row_max, row_sum, in_q)
    if dropout.seed is not None:
        factor = factor * keep_scale(query.dropout.threshold.to(accumulate))
    pointers = tile_pointers(out, batch, row, index, query.idx, BLOCK_V)
    store_tile(pointers, acc * factor[:, None], in_q, V_DIM)
