"""Dense attention: the specification that every backend must match, in float64 if asked.

It materialises (H, S, S_kv) for one sequence at a time and is differentiated by autograd.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .masks import mask_fn_on_tensors
from .spec import (
    AttentionCall,
    Limits,
    SequenceTerms,
    Span,
    batch_terms,
    on_tensors,
    sequence_limits,
    sequence_terms,
    spans,
)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Attention of a whole call.

    Args:
        q: (B, S, H, D). k: (B, S_kv, H_kv, D). v: (B, S_kv, H_kv, D_v).
    Returns:
        out (B, S, H, D_v) in q's dtype, and lse (B, H, S), float64 for float64 input, else float32.
    """
    batch, rows, heads, _ = q.shape
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(batch, rows, heads, v.shape[-1])
    lse = torch.full((batch, heads, rows), float("-inf"), dtype=accumulate, device=q.device)
    for span in spans(call, q, k):
        q_idx = torch.arange(span.limits.q_len, device=q.device)
        b, at = span.q_rows
        out_n, lse_n = attend_rows(q[b, at], k[span.kv_rows], v[span.kv_rows], call, span, q_idx)
        where = torch.arange(at.start, at.stop, device=q.device)
        batch_row = torch.full_like(where, b)
        out = out.index_put((batch_row, where), out_n)
        lse = lse.transpose(1, 2).index_put((batch_row, where), lse_n.T).transpose(1, 2)
    return out, lse


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, span: Span, q_idx: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of some query rows of one sequence to all its keys.

    Args:
        q: (R, H, D), the rows at positions ``q_idx`` (R,).
        k, v: (S_kv, H_kv, D) and (S_kv, H_kv, D_v).
    Returns:
        out (R, H, D_v) in q's dtype, and lse (H, R).
    """
    weights, lse, seen = row_weights(q, k, call, span, q_idx)
    values = _select_seen(_heads_first(v, q.shape[1], weights.dtype), seen)
    return (weights @ values).transpose(0, 1).to(q.dtype), lse


def row_weights(
    q: Tensor, k: Tensor, call: AttentionCall, span: Span | _BatchRows, q_idx: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (H, R, S_kv) after dropout, lse (H, R), and which pairs are visible (H, R, S_kv).

    Shapes as in :func:`attend_rows`, or with a batch axis before them all.
    """
    heads, kv_len = q.shape[-2], k.shape[-3]
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    terms = _terms(call, span, q_idx)
    seen = visible(call, span, heads, q_idx, kv_len)
    keys = _select_seen(_heads_first(k, heads, accumulate), seen)
    scores = q.transpose(-3, -2).to(accumulate) @ keys.mT * call.scale
    scores = logits(scores, call, span, q_idx).masked_fill(~seen, float("-inf"))
    dead = ~seen.any(-1)
    no_key = scores.new_full(dead.shape, float("-inf"))
    sink = no_key if terms.sink is None else terms.sink.to(accumulate).expand_as(no_key)
    row_max = sink.detach()
    if kv_len:
        row_max = torch.maximum(row_max, scores.detach().amax(-1))
    row_max = row_max.masked_fill(row_max == float("-inf"), 0.0)
    weights = (scores - row_max[..., None]).exp()
    row_sum = weights.sum(-1) + (sink - row_max).exp()
    empty = row_sum == 0
    row_sum = row_sum.masked_fill(empty, 1.0)
    lse = (row_max + row_sum.log()).masked_fill(empty, float("-inf"))
    weights = weights / row_sum[..., None]
    if call.dropout_seed is not None:
        keep = kept(call, span, heads, q_idx, kv_len)
        threshold = call.dropout_threshold if terms.thresholds is None else terms.thresholds
        if isinstance(threshold, Tensor):
            threshold = threshold.to(accumulate)
        weights = torch.where(keep, weights * on_tensors.keep_scale(threshold), 0.0)
    return weights, lse, seen


def logits(scores: Tensor, call: AttentionCall, span: Span | _BatchRows, q_idx: Tensor) -> Tensor:
    """Scaled products (H, R, S_kv) with soft cap, ALiBi and bias, in this order."""
    if call.softcap:
        scores = on_tensors.soft_cap(scores, call.softcap)
    return add_terms(scores, _terms(call, span, q_idx), span.limits, q_idx)


def add_terms(scores: Tensor, terms: SequenceTerms, limits: Limits, q_idx: Tensor) -> Tensor:
    """Capped scores (..., H, R, S_kv) with ALiBi and bias, in their dtype."""
    if terms.slopes is not None:
        _, kv_idx = _coordinates(1, scores.shape[-1], q_idx)
        slopes = terms.slopes.to(scores.dtype)
        scores = scores - on_tensors.alibi(q_idx.int()[:, None], kv_idx, slopes, limits)
    if terms.attn_mask is not None and terms.attn_mask.dtype != torch.bool:
        scores = scores + terms.attn_mask.to(scores.dtype)
    return scores


def visible(
    call: AttentionCall, span: Span | _BatchRows, heads: int, q_idx: Tensor, kv_len: int
) -> Tensor:
    """(H, R, S_kv) bool: which keys each query row sees."""
    head, kv_idx = _coordinates(heads, kv_len, q_idx)
    terms = _terms(call, span, q_idx)
    lo, hi = on_tensors.key_interval(q_idx[:, None], span.limits)
    seen = on_tensors.is_visible(kv_idx, lo, hi)
    if terms.attn_mask is not None:
        mask = terms.attn_mask.detach()
        seen = seen & (mask if mask.dtype == torch.bool else mask != float("-inf"))
    if call.mask_fn:
        predicate = mask_fn_on_tensors(call.mask_fn)
        positions = (head, q_idx.int()[:, None], kv_idx)
        sequence = call.sequence_ids[span.n]
        seen = seen & predicate(sequence, *positions, *terms.labels, *call.mask_args)
    return seen.expand(*seen.shape[:-3], heads, q_idx.shape[0], kv_len)


def kept(
    call: AttentionCall, span: Span | _BatchRows, heads: int, q_idx: Tensor, kv_len: int
) -> Tensor:
    """(H, R, S_kv) bool: which weights dropout keeps."""
    terms = _terms(call, span, q_idx)
    threshold = call.dropout_threshold if terms.thresholds is None else terms.thresholds
    assert call.dropout_seed is not None
    sequence = call.sequence_ids[span.n]
    return dropout_draws(call.dropout_seed, sequence, heads, q_idx, kv_len) >= threshold


def dropout_draws(seed: Tensor, sequence: Tensor, heads: int, q_idx: Tensor, kv_len: int) -> Tensor:
    """(H, R, S_kv) int32: the 16 random bits of every weight, dropped below the threshold.

    Args:
        seed: 0-d int64.
        sequence: int32 sequence ids, broadcastable to the result, batch axes before it.
    """
    head, kv_idx = _coordinates(heads, kv_len, q_idx)
    seed_lo, seed_hi = seed.reshape(1).view(torch.int32).unbind()
    head_key = on_tensors.dropout_head_key(seed_lo, seed_hi, sequence, head)
    row_key = on_tensors.dropout_row_key(head_key, q_idx.int()[:, None])
    pair_key = on_tensors.dropout_pair_key(on_tensors.dropout_pair(kv_idx))
    word = on_tensors.dropout_word(*row_key, pair_key)
    return on_tensors.dropout_bits(word, kv_idx)


def _terms(call: AttentionCall, span: Span | _BatchRows, q_idx: Tensor) -> SequenceTerms:
    terms = sequence_terms(call, span) if isinstance(span, Span) else batch_terms(call)
    return terms.at_rows(q_idx)


def _coordinates(heads: int, kv_len: int, q_idx: Tensor) -> tuple[Tensor, Tensor]:
    head = torch.arange(heads, device=q_idx.device, dtype=torch.int32)[:, None, None]
    return head, torch.arange(kv_len, device=q_idx.device, dtype=torch.int32)


def _heads_first(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """(S_kv, H_kv, D) -> (H, S_kv, D), each key head repeated for the query heads that share it."""
    group = heads // max(x.shape[-2], 1)
    return x.transpose(-3, -2).repeat_interleave(group, -3).to(dtype)


def _select_seen(x: Tensor, seen: Tensor) -> Tensor:
    """Zero the keys that no row sees, so that what lies in their memory cannot reach a result."""
    return torch.where(seen.any(-2)[..., None], x, 0.0)


class _BatchRows(NamedTuple):
    """All sequences at once, one per batch row: a Span whose fields broadcast as (B, 1, 1, 1).

    ``n`` indexes per-sequence tensors so that they broadcast likewise.
    """

    limits: Limits
    n: tuple[Any, ...] = (slice(None), None, None, None)


def call_weights(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """(B, H, S, S_kv) weights after dropout of a call whose sequences are its batch rows.

    Lengths are not read on the host, so it compiles.
    """
    rows = _BatchRows(batch_limits(call))
    q_idx = torch.arange(q.shape[1], device=q.device)
    return row_weights(q, k, call, rows, q_idx)[0].to(q.dtype)


def batch_limits(call: AttentionCall) -> Limits:
    """The limits of every sequence at once, (N, 1, 1, 1)."""
    every = (slice(None), None, None, None)
    return sequence_limits(
        call.q_lengths[every],
        call.kv_lengths[every],
        call.align,
        [column[every] for column in call.limits.unbind(1)],
    )
