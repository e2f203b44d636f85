"""The rules of attention as device functions: which pairs are visible, which weights are kept."""

import triton
import triton.language as tl

from ...spec import bind
from .arguments import KeyTile, QueryTile


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def _minimum(a, b):
    return tl.minimum(a, b)


@triton.jit
def _where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def _floor_modulo(a, b):
    """``a % b`` with the sign of ``b``, as in Python and torch; Triton's has that of ``a``."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def _floor_divide(a, b):
    """``a // b`` rounded down, as in Python and torch; Triton rounds towards zero."""
    if (a + b).dtype.is_floating():
        return tl.floor(a / b)
    else:
        quotient = a // b
        rest = a - quotient * b
        return tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)


# The interpreter asks that `tl` be visible from every device function.
DEVICE_NAMES = {
    "maximum": _maximum,
    "minimum": _minimum,
    "where": _where,
    "floor_modulo": _floor_modulo,
    "floor_divide": _floor_divide,
    "tl": tl,
}
_rules = bind(DEVICE_NAMES, compiled=triton.jit)
diagonal_shift = _rules.diagonal_shift
key_interval = _rules.key_interval
is_visible = _rules.is_visible
key_range = _rules.key_range
full_key_range = _rules.full_key_range
query_range = _rules.query_range
full_query_range = _rules.full_query_range
split_tiles = _rules.split_tiles
dropout_head_key = _rules.dropout_head_key
dropout_row_key = _rules.dropout_row_key
dropout_pair = _rules.dropout_pair
dropout_pair_key = _rules.dropout_pair_key
dropout_word = _rules.dropout_word
dropout_bits = _rules.dropout_bits


@triton.jit
def row_keys(q_idx, sequence, head, dropout):
    """The dropout keys of query rows, a pair of int32 each; unused without dropout."""
    keys = (q_idx, q_idx)
    if dropout.seed is not None:
        low, high = tl.load(dropout.seed), tl.load(dropout.seed + 1)
        keys = dropout_row_key(dropout_head_key(low, high, sequence.id, head), q_idx)
    return keys


@triton.jit
def query_tile(first, sequence, head, dropout, BLOCK_M: tl.constexpr):
    """Positions ``first ..`` of a sequence, with their key intervals and dropout keys."""
    q_idx = first + tl.arange(0, BLOCK_M)
    lo, hi = key_interval(q_idx, sequence.limits)
    return QueryTile(q_idx, lo, hi, row_keys(q_idx, sequence, head, dropout))


@triton.jit
def _unhidden(rows, kv_idx, sequence, mask):
    """Take the keys that the key mask hides from ``rows``, a subset of the sequence's keys."""
    if mask.keys is not None:
        batch = mask.keys + sequence.kv_batch.to(tl.int64) * mask.key_strides[0]
        at = (sequence.kv_row + kv_idx).to(tl.int64) * mask.key_strides[1]
        rows = rows & (tl.load(batch + at, mask=rows, other=0) != 0)
    return rows


@triton.jit
def key_tile(first, sequence, mask, BLOCK_N: tl.constexpr):
    """Positions ``first ..`` of a sequence, with the interval of queries that see each."""
    kv_idx = first + tl.arange(0, BLOCK_N)
    start, end = query_range(kv_idx, kv_idx, sequence.limits)
    used = _unhidden((kv_idx < sequence.limits.end_key) & (start < end), kv_idx, sequence, mask)
    return KeyTile(first, kv_idx, start, tl.where(used, end, start))


@triton.jit
def seen_keys(first, limits, mask, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys that queries ``first ..`` see, and their masked head, unmasked middle, masked tail."""
    last = tl.minimum(first + BLOCK_M, limits.q_len) - 1
    start, end = key_range(first, last, limits)
    full_start, full_end = end, end
    if mask.fn is None and mask.keys is None:
        full_start, full_end = full_key_range(first, last, limits)
    return (start, end), split_tiles(start, end, full_start, full_end, BLOCK_N)


@triton.jit
def seeing_queries(first, limits, mask, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Queries that see keys ``first ..``, and their masked head, unmasked middle, masked tail."""
    last = first + BLOCK_N - 1
    start, end = query_range(
        tl.maximum(first, limits.first_key), tl.minimum(last, limits.end_key - 1), limits
    )
    full_start, full_end = end, end
    if mask.fn is None and mask.keys is None:
        full_start, full_end = full_query_range(first, last, limits)
    return (start, end), split_tiles(start, end, full_start, full_end, BLOCK_M)


@triton.jit
def visible_keys(query, keys, kv_idx, sequence, head, mask):
    """Visible pairs (M, N), and the keys (N,) that some query sees: no other may be loaded."""
    rows = _unhidden(is_visible(kv_idx, keys.first, keys.end), kv_idx, sequence, mask)
    seen = is_visible(kv_idx[None, :], query.lo[:, None], query.hi[:, None])
    if mask.keys is not None:
        seen = seen & rows[None, :]
    if mask.fn is not None:
        args = mask.fn_args
        seen = seen & mask.fn(sequence.id, head, query.idx[:, None], kv_idx[None, :], *args)
        rows = rows & (tl.max(seen.to(tl.int32), 0) > 0)
    return seen, rows


@triton.jit
def visible_queries(keys, queries, q_idx, sequence, head, mask):
    """Visible pairs (N, M), and the queries (M,) that see some key: no other may be loaded."""
    rows = is_visible(q_idx, queries.first, queries.end)
    seen = is_visible(q_idx[None, :], keys.start[:, None], keys.end[:, None])
    if mask.fn is not None:
        args = mask.fn_args
        seen = seen & mask.fn(sequence.id, head, q_idx[None, :], keys.idx[:, None], *args)
    if mask.fn is not None or mask.keys is not None:
        rows = rows & (tl.max(seen.to(tl.int32), 0) > 0)
    return seen, rows


@triton.jit
def kept(row_keys, kv_start, dropout, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Which weights of a tile dropout keeps: (M, N), or (N, M) if TRANSPOSED.

    One hash serves columns j and j ^ 8; ``kv_start`` is a multiple of 16, so both lie in the tile.
    """
    BLOCK_M: tl.constexpr = row_keys[0].shape[0]
    pairs = dropout_pair_key(dropout_pair(kv_start) + tl.arange(0, BLOCK_N // 2))
    if TRANSPOSED:
        word = dropout_word(row_keys[0][None, :], row_keys[1][None, :], pairs[:, None])
        word = tl.reshape(word, [BLOCK_N // 16, 8, BLOCK_M])
        bits = tl.join(dropout_bits(word, 0), dropout_bits(word, 8))
        bits = tl.reshape(tl.permute(bits, (0, 3, 1, 2)), [BLOCK_N, BLOCK_M])
    else:
        word = dropout_word(row_keys[0][:, None], row_keys[1][:, None], pairs[None, :])
        word = tl.reshape(word, [BLOCK_M, BLOCK_N // 16, 8])
        bits = tl.join(dropout_bits(word, 0), dropout_bits(word, 8))
        bits = tl.reshape(tl.permute(bits, (0, 1, 3, 2)), [BLOCK_M, BLOCK_N])
    return bits >= dropout.threshold


@triton.jit
def keep_scale(dropout, DTYPE: tl.constexpr):
    """One over the exact probability that a weight is kept; 0 when none is."""
    steps = tl.full((), 65536 - dropout.threshold, DTYPE)
    return tl.where(steps > 0, 65536.0 / tl.maximum(steps, 1.0), 0.0)
