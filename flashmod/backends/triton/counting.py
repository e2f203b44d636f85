"""What a forward pass did, for callers that ask; see :mod:`flashmod.stats`."""

import triton
import triton.language as tl

from ...stats import FULL, KIND, PARTIAL, RESCALES, UPDATES

LN_2 = tl.constexpr(0.6931471805599453)
_RESCALES, _UPDATES, _KIND = tl.constexpr(RESCALES), tl.constexpr(UPDATES), tl.constexpr(KIND)
_PARTIAL, _FULL = tl.constexpr(PARTIAL), tl.constexpr(FULL)


@triton.jit
def spread_of(stats, row_sum):
    """The running sum of ``weight * (logit - row_max)``, (M,), which gives the entropy."""
    spread = 0
    if stats.rows is not None:
        spread = tl.zeros_like(row_sum)
    return spread


@triton.jit
def fold_spread(stats, spread, weights, exponents, row_sum, row_max, pivot, rescale, unit):
    """Fold a tile into the running sum, before ``row_sum`` and ``row_max`` move on."""
    if stats.rows is not None:
        moved = tl.where(row_max == float("-inf"), 0.0, (row_max - pivot) * unit)
        spread = (spread + row_sum * moved) * rescale
        spread += tl.sum(tl.where(weights > 0, weights * exponents, 0.0), 1)
    return spread


@triton.jit
def count_tile(
    stats, tile, query, row_max, new_max, head, MASKED: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Store the counts of one tile of the forward pass."""
    BLOCK_M: tl.constexpr = query.idx.shape[0]
    if stats.tiles is not None:
        sequence, limits = head.sequence, head.sequence.limits
        updated = (new_max > row_max) & (query.lo < query.hi)
        rescaled = updated & (row_max > float("-inf"))
        across = tl.cdiv(sequence.kv_len, BLOCK_N)
        down = tl.cdiv(limits.q_len, BLOCK_M)
        at = head.index.to(tl.int64) * down + query.first // BLOCK_M
        at = tl.load(stats.offsets + sequence.n) + at * across + tile // BLOCK_N
        at, total = stats.tiles + at, tl.cast(stats.total, tl.int64)
        tl.store(at + _RESCALES * total, tl.sum(rescaled.to(tl.int32), 0))
        tl.store(at + _UPDATES * total, tl.sum(updated.to(tl.int32), 0))
        tl.store(at + _KIND * total, _PARTIAL if MASKED else _FULL)


@triton.jit
def store_row_statistics(stats, block, rows, idx, in_q, row_max, row_sum, spread):
    """Store the largest logit and the entropy of rows, in nats, without the sink.

    Args:
        row_max, row_sum: base 2; -inf and 0 for rows that see no key.
    """
    if stats.rows is not None:
        row_sum = tl.where(row_sum > 0, row_sum, 1.0)
        at = stats.rows + 2 * block * rows + idx
        tl.store(at, row_max * LN_2, mask=in_q)
        tl.store(at + rows, (tl.log2(row_sum) - spread / row_sum) * LN_2, mask=in_q)
