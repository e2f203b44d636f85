"""Which pairs of a tile are visible, inside a kernel, in either orientation."""

import triton
import triton.language as tl

from .arguments import KeyTile, QueryTile
from .device_rules import (
    full_key_range,
    full_query_range,
    is_visible,
    key_interval,
    key_range,
    query_range,
    split_tiles,
)
from .dropping import dropout_rows


@triton.jit
def row_labels(labels, start, idx, in_rows):
    """The labels of rows, int32; unused without labels."""
    found = idx
    if labels is not None:
        found = tl.load(labels + start + idx, mask=in_rows, other=0).to(tl.int32)
    return found


@triton.jit
def query_tile(first, sequence, head, mask, dropout, BLOCK_M: tl.constexpr):
    """Positions ``first ..`` of a sequence, and what belongs to each."""
    q_idx = first + tl.arange(0, BLOCK_M)
    lo, hi = key_interval(q_idx, sequence.limits)
    rows = dropout_rows(q_idx, lo < hi, sequence, head, dropout, True)
    labels = row_labels(mask.q_labels, sequence.q_start, q_idx, lo < hi)
    return QueryTile(first, q_idx, lo, hi, rows, labels)


@triton.jit
def key_tile(first, sequence, mask, BLOCK_N: tl.constexpr):
    """Positions ``first ..`` of a sequence, with the interval of queries that see each."""
    kv_idx = first + tl.arange(0, BLOCK_N)
    start, end = query_range(kv_idx, kv_idx, sequence.limits)
    used = (kv_idx < sequence.limits.end_key) & (start < end)
    labels = row_labels(mask.kv_labels, sequence.kv_start, kv_idx, used)
    return KeyTile(first, kv_idx, start, tl.where(used, end, start), labels, kv_idx)


@triton.jit
def keys_of_head(keys, head, mask):
    """A key tile without the keys that an ``attn_mask`` hides from every query of a head."""
    end, bias = keys.end, keys.bias
    if mask.keys is not None:
        bias = _mask_values(mask.keys, head, mask, keys.idx, keys.start < end)
        end = tl.where(_shown(bias), end, keys.start)
    return KeyTile(keys.first, keys.idx, keys.start, end, keys.labels, bias)


@triton.jit
def _mask_values(pointers, head, mask, kv_idx, inside):
    """What an ``attn_mask`` holds, a bias widened to float32; 0 where not ``inside``."""
    strides = mask.strides
    pointers += head.sequence.n.to(tl.int64) * strides[0] + head.index.to(tl.int64) * strides[1]
    values = tl.load(pointers + kv_idx.to(tl.int64) * strides[3], mask=inside, other=0)
    if values.dtype.is_floating() and values.dtype != tl.float64:
        values = values.to(tl.float32)
    return values


@triton.jit
def _pair_values(head, mask, q_idx, kv_idx, inside):
    rows = mask.pairs + q_idx.to(tl.int64) * mask.strides[2]
    return _mask_values(rows, head, mask, kv_idx, inside)


@triton.jit
def _shown(values):
    """Which entries of an ``attn_mask`` leave a pair visible."""
    if values.dtype.is_floating():
        return values != float("-inf")
    else:
        return values != 0


@triton.jit
def _predicate(seen, q_idx, kv_idx, q_labels, kv_labels, head, mask):
    """The pairs of ``seen`` that the mask function shows."""
    sequence = head.sequence.id
    if mask.fn is not None:
        args = mask.fn_args
        if mask.q_labels is not None:
            shown = mask.fn(sequence, head.index, q_idx, kv_idx, q_labels, kv_labels, *args)
        else:
            shown = mask.fn(sequence, head.index, q_idx, kv_idx, *args)
        seen = seen & shown
    return seen


@triton.jit
def seen_keys(
    first, limits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVERYWHERE: tl.constexpr
):
    """Keys that queries ``first ..`` see, and their masked head, unmasked middle, masked tail."""
    last = tl.minimum(first + BLOCK_M, limits.q_len) - 1
    start, end = key_range(first, last, limits)
    full_start, full_end = end, end
    if not EVERYWHERE:
        full_start, full_end = full_key_range(first, last, limits)
    return (start, end), split_tiles(start, end, full_start, full_end, BLOCK_N)


@triton.jit
def seeing_queries(
    first, limits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVERYWHERE: tl.constexpr
):
    """Queries that see keys ``first ..``, and their masked head, unmasked middle, masked tail."""
    last = first + BLOCK_N - 1
    start, end = query_range(
        tl.maximum(first, limits.first_key), tl.minimum(last, limits.end_key - 1), limits
    )
    full_start, full_end = end, end
    if not EVERYWHERE:
        full_start, full_end = full_query_range(first, last, limits)
    return (start, end), split_tiles(start, end, full_start, full_end, BLOCK_M)


@triton.jit
def visible_keys(query, keys, kv_idx, head, mask):
    """Visible pairs (M, N), the keys (N,) that some query sees, and what ``attn_mask`` holds.

    No other key may be loaded.
    """
    rows = is_visible(kv_idx, keys.first, keys.end)
    seen = is_visible(kv_idx[None, :], query.lo[:, None], query.hi[:, None])
    bias = kv_idx
    labels = row_labels(mask.kv_labels, head.sequence.kv_start, kv_idx, rows)
    if mask.keys is not None:
        values = _mask_values(mask.keys, head, mask, kv_idx, rows)
        rows = rows & _shown(values)
        seen = seen & rows[None, :]
        bias = values[None, :]
    if mask.pairs is not None:
        bias = _pair_values(head, mask, query.idx[:, None], kv_idx[None, :], seen)
        seen = seen & _shown(bias)
    seen = _predicate(
        seen,
        query.idx[:, None],
        kv_idx[None, :],
        query.labels[:, None],
        labels[None, :],
        head,
        mask,
    )
    if mask.fn is not None or mask.pairs is not None:
        rows = rows & (tl.max(seen.to(tl.int32), 0) > 0)
    return seen, rows, bias


@triton.jit
def visible_queries(keys, queries, q_idx, head, mask):
    """Visible pairs (N, M), the queries (M,) that see some key, and what ``attn_mask`` holds.

    No other query may be loaded.
    """
    rows = is_visible(q_idx, queries.first, queries.end)
    seen = is_visible(q_idx[None, :], keys.start[:, None], keys.end[:, None])
    bias = keys.bias[:, None]
    labels = row_labels(mask.q_labels, head.sequence.q_start, q_idx, rows)
    if mask.pairs is not None:
        bias = _pair_values(head, mask, q_idx[None, :], keys.idx[:, None], seen)
        seen = seen & _shown(bias)
    seen = _predicate(
        seen, q_idx[None, :], keys.idx[:, None], labels[None, :], keys.labels[:, None], head, mask
    )
    if mask.fn is not None or mask.pairs is not None or mask.keys is not None:
        rows = rows & (tl.max(seen.to(tl.int32), 0) > 0)
    return seen, rows, bias
