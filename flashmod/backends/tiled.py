"""Attention tile by tile in torch: linear memory on any device, in every dtype.

Online softmax over key tiles, and a backward pass that recomputes each tile from the saved row
maximum and log-sum (Dao et al. 2022). Grouped heads are folded into rows, so K and V are never
repeated: tiles are (H_kv, G, M, N), their matrix products (H_kv, G*M, N).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import AttentionCall, Forward, Gradients, TileConfig, spans
from .sequence_tiles import DEFAULT_TILES, QueryTile, SequenceTiles, accumulate_dtype
from .tile_stats import Collector

__all__ = ["DEFAULT_TILES", "backward", "forward", "forward_tiles", "unsupported_reasons"]


def unsupported_reasons(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> list[str]:
    """Empty: the torch tiles run every call."""
    return []


def forward_tiles(q: Tensor, v: Tensor, call: AttentionCall) -> TileConfig:
    """The tile sizes of the forward pass."""
    return call.tile_config() or DEFAULT_TILES


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Forward:
    """Output, lse, and as ``saved`` the row maximum over keys and lse minus that, (B, H, 2, S)."""
    batch, rows, heads, _ = q.shape
    out = q.new_zeros(batch, rows, heads, v.shape[-1])
    saved = torch.zeros(batch, heads, 2, rows, dtype=accumulate_dtype(q), device=q.device)
    saved[:, :, 0] = float("-inf")
    lse = saved[:, :, 0].clone()
    collector = Collector(q, call, forward_tiles(q, v, call)) if call.collect_stats else None
    for span in spans(call, q, k):
        sequence = SequenceTiles(q, k, v, call, span)
        for m in sequence.query_tiles():
            softmax = _online_softmax(sequence, m, collector)
            if collector is not None:
                collector.rows(m, softmax.row_max, softmax.row_sum)
            norm, log_sum, lse_rows = _normaliser(softmax, sequence.sink)
            out[m.rows] = sequence.unfold(softmax.acc * norm[..., None])
            saved[:, :, 0][m.stat_rows] = softmax.row_max.flatten(0, 1)
            saved[:, :, 1][m.stat_rows] = log_sum.flatten(0, 1)
            lse[m.stat_rows] = lse_rows.flatten(0, 1)
    stats = () if collector is None else collector.results
    return Forward(out, lse, saved, *stats)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    saved: Tensor,
    call: AttentionCall,
    mask_grad: bool,
) -> Gradients:
    """The gradients of all operands, contiguous, in their dtypes."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dmask = dsink = None
    if mask_grad and call.attn_mask is not None:
        dmask = saved.new_zeros(call.attn_mask.shape)
    if call.sink is not None:
        dsink = saved.new_zeros(q.shape[0], q.shape[2])
    for span in spans(call, q, k):
        sequence = SequenceTiles(q, k, v, call, span)
        own_mask = dmask if dmask is None else dmask[span.n if dmask.shape[0] > 1 else 0]
        grads = _KeyGradients(
            torch.zeros_like(sequence.k),
            torch.zeros_like(sequence.v),
            sequence.fold_heads(own_mask),
        )
        for m in sequence.query_tiles():
            row_max, log_sum = (part[m.stat_rows].view(m.q.shape[:-1]) for part in saved.unbind(2))
            dead = row_max == float("-inf")  # no key was seen: what lies in such a row is not read
            m = m._replace(q=m.q.masked_fill(dead[..., None], 0.0))
            grad = sequence.fold(grad_out[m.rows]).masked_fill(dead[..., None], 0.0)
            delta = (grad * sequence.fold(out[m.rows])).sum(-1)
            if grad_lse is not None:
                delta = delta - grad_lse[m.stat_rows].to(delta.dtype).view_as(delta)
            if dsink is not None and sequence.sink is not None:
                share = _sink_share(sequence.sink, row_max, log_sum)
                dsink[span.q_batch] -= (share * delta).sum(-1).flatten()
            # Tiles are recomputed before normalisation: the row sum divides these rows instead.
            norm = log_sum.neg().exp_().masked_fill(dead, 0.0)
            rows = _GradientRows(grad.mul_(norm[..., None]), delta.mul_(norm), _pivot(row_max))
            dq[m.rows] = sequence.unfold(_tile_gradients(sequence, m, rows, grads))
        dk[span.kv_rows] = grads.k.transpose(0, 1).to(k.dtype)
        dv[span.kv_rows] = grads.v.transpose(0, 1).to(v.dtype)
    if dmask is not None and call.attn_mask is not None:
        dmask = dmask.to(call.attn_mask.dtype)
    return Gradients(dq, dk, dv, dmask, dsink)


class _Softmax(NamedTuple):
    acc: Tensor  # (H_kv, G, M, D_v), output before normalisation
    row_max: Tensor  # (H_kv, G, M)
    row_sum: Tensor  # (H_kv, G, M)


def _online_softmax(sequence: SequenceTiles, m: QueryTile, collector: Collector | None) -> _Softmax:
    shape = (sequence.kv_heads, sequence.group, m.size)
    acc = sequence.q.new_zeros(*shape, sequence.v.shape[-1], dtype=sequence.dtype)
    row_max = acc.new_full(shape, float("-inf"))
    row_sum = acc.new_zeros(shape)
    for n in sequence.key_tiles(m):
        scores, _, v, _ = sequence.scores(m, n)
        new_max = torch.maximum(row_max, scores.amax(-1))
        pivot = _pivot(new_max)
        shifted = scores.sub_(pivot[..., None])
        if collector is not None:
            collector.tile(sequence, m, n, row_max, new_max, row_sum, shifted)
        probs = shifted.exp_()
        rescale = (row_max - pivot).exp_()
        row_sum = row_sum * rescale + probs.sum(-1)
        probs = sequence.dropped(probs, m, n)
        acc.mul_(rescale[..., None]).flatten(1, 2).baddbmm_(probs.flatten(1, 2), v)
        row_max = new_max
    return _Softmax(acc, row_max, row_sum)


def _normaliser(softmax: _Softmax, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """One over the denominator, its logarithm relative to the row maximum, and lse."""
    _, row_max, row_sum = softmax
    dead = row_max == float("-inf")
    log_sum = row_sum.masked_fill(dead, 1.0).log()
    if sink is None:
        return row_sum.masked_fill(dead, 1.0).reciprocal(), log_sum, row_max + log_sum
    log_sum = torch.logaddexp(log_sum, sink - _pivot(row_max)).masked_fill(dead, 0.0)
    lse = torch.where(dead, sink, row_max + log_sum)
    return log_sum.neg().exp(), log_sum, lse


def _sink_share(sink: Tensor, row_max: Tensor, log_sum: Tensor) -> Tensor:
    """The weight (H_kv, G, M) that went to the sink: all of it where no key was seen.

    A sink of -inf is none.
    """
    dead = row_max == float("-inf")
    share = (sink - _pivot(row_max) - log_sum).exp()
    return torch.where(dead, (sink > float("-inf")).to(share.dtype), share)


class _GradientRows(NamedTuple):
    grad: Tensor  # (H_kv, G, M, D_v), gradient of the output over the row sum
    delta: Tensor  # (H_kv, G, M), over the row sum
    pivot: Tensor  # (H_kv, G, M), row maximum


class _KeyGradients(NamedTuple):
    """Sums over the query tiles of a sequence, in the accumulation dtype."""

    k: Tensor  # (H_kv, S_kv, D)
    v: Tensor  # (H_kv, S_kv, D_v)
    mask: Tensor | None  # (H_kv|1, G|1, Q|1, K|1)


def _tile_gradients(
    sequence: SequenceTiles, m: QueryTile, rows: _GradientRows, grads: _KeyGradients
) -> Tensor:
    """dq (H_kv, G, M, D) of one query tile; adds its share to the gradients of the keys."""
    dq = torch.zeros_like(m.q)
    dq_rows, q_rows, grad_rows = (x.flatten(1, 2) for x in (dq, m.q, rows.grad))
    for n in sequence.key_tiles(m):
        scores, k, v, cap_slope = sequence.scores(m, n, slope=True)
        probs = scores.sub_(rows.pivot[..., None]).exp_()
        dropped = sequence.dropped(probs, m, n)
        grads.v[:, n.keys].baddbmm_(dropped.flatten(1, 2).mT, grad_rows)
        grad_probs = sequence.dropped((grad_rows @ v.mT).view_as(probs), m, n)
        ds = grad_probs.sub_(rows.delta[..., None]).mul_(probs)
        if n.masked:  # a hidden key has weight exactly 0: select, grad_probs may not be finite
            ds = torch.where(probs > 0, ds, 0.0)
        if grads.mask is not None:
            tile = sequence.mask_tile(grads.mask, m, n)
            tile += ds.sum_to_size(tile.shape)
        if cap_slope is not None:
            ds = ds * cap_slope
        dq_rows.baddbmm_(ds.flatten(1, 2), k)
        grads.k[:, n.keys].baddbmm_(ds.flatten(1, 2).mT, q_rows)  # m.q carries the softmax scale
    return dq.mul_(sequence.call.scale)


def _pivot(row_max: Tensor) -> Tensor:
    """What to subtract before the exponential: the row maximum, 0 for rows with no key yet."""
    return row_max.masked_fill(row_max == float("-inf"), 0.0)
