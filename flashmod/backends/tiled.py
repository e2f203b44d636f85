"""Attention tile by tile in torch: linear memory on any device, in every dtype.

Online softmax over key tiles, and a backward pass that recomputes each tile from the saved row
maximum and log-sum (Dao et al. 2022). Grouped heads are folded into rows, so K and V are never
repeated: tiles are (H_kv, G, M, N), their matrix products (H_kv, G*M, N).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import AttentionCall, spans
from .sequence_tiles import DEFAULT_TILES, QueryTile, SequenceTiles, accumulate_dtype

__all__ = ["DEFAULT_TILES", "backward", "forward", "unsupported_reasons"]


def unsupported_reasons(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> list[str]:
    """Empty: the torch tiles run every call."""
    return []


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, S, H, D_v), lse (B, H, S), and row maximum and log-sum (2, B, H, S)."""
    batch, rows, heads, _ = q.shape
    out = q.new_zeros(batch, rows, heads, v.shape[-1])
    stats = torch.zeros(2, batch, heads, rows, dtype=accumulate_dtype(q), device=q.device)
    stats[0] = float("-inf")
    for span in spans(call, q, k):
        sequence = SequenceTiles(q, k, v, call, span)
        for m in sequence.query_tiles():
            acc, row_max, row_sum = _online_softmax(sequence, m)
            safe_sum = row_sum.masked_fill(row_sum == 0, 1.0)
            out[m.rows] = sequence.unfold(acc / safe_sum[..., None])
            stats[0][m.stat_rows] = row_max.flatten(0, 1)
            stats[1][m.stat_rows] = safe_sum.log().flatten(0, 1)
    return out, stats[0] + stats[1], stats


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, contiguous, in the dtypes of q, k, v."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for span in spans(call, q, k):
        sequence = SequenceTiles(q, k, v, call, span)
        dk_n, dv_n = torch.zeros_like(sequence.k), torch.zeros_like(sequence.v)
        for m in sequence.query_tiles():
            row_max, row_log = (part[m.stat_rows].view(m.q.shape[:-1]) for part in stats)
            dead = row_max == float("-inf")  # no key was seen: what lies in such a row is not read
            m = m._replace(q=m.q.masked_fill(dead[..., None], 0.0))
            grad = sequence.fold(grad_out[m.rows]).masked_fill(dead[..., None], 0.0)
            delta = (grad * sequence.fold(out[m.rows])).sum(-1)
            if grad_lse is not None:
                lse_rows = grad_lse[m.stat_rows].to(delta.dtype).view_as(delta)
                delta = delta - lse_rows.masked_fill(dead, 0.0)
            # Tiles are recomputed before normalisation: the row sum divides these rows instead.
            norm = row_log.neg().exp_()
            rows = _GradientRows(grad.mul_(norm[..., None]), delta.mul_(norm), _pivot(row_max))
            dq[m.rows] = sequence.unfold(_tile_gradients(sequence, m, rows, dk_n, dv_n))
        dk[span.kv_rows] = dk_n.transpose(0, 1).to(k.dtype)
        dv[span.kv_rows] = dv_n.transpose(0, 1).to(v.dtype)
    return dq, dk, dv


def _online_softmax(sequence: SequenceTiles, m: QueryTile) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised output (H_kv, G, M, D_v), row maximum and row sum (H_kv, G, M) of a tile."""
    shape = (sequence.kv_heads, sequence.group, m.size)
    acc = sequence.q.new_zeros(*shape, sequence.v.shape[-1], dtype=sequence.dtype)
    row_max = acc.new_full(shape, float("-inf"))
    row_sum = acc.new_zeros(shape)
    for n in sequence.key_tiles(m):
        scores, _, v = sequence.scores(m, n)
        new_max = torch.maximum(row_max, scores.amax(-1))
        pivot = _pivot(new_max)
        probs = scores.sub_(pivot[..., None]).exp_()
        rescale = (row_max - pivot).exp_()
        row_sum = row_sum * rescale + probs.sum(-1)
        probs = sequence.dropped(probs, m, n)
        acc.mul_(rescale[..., None]).flatten(1, 2).baddbmm_(probs.flatten(1, 2), v)
        row_max = new_max
    return acc, row_max, row_sum


class _GradientRows(NamedTuple):
    grad: Tensor  # (H_kv, G, M, D_v), gradient of the output over the row sum
    delta: Tensor  # (H_kv, G, M), over the row sum
    pivot: Tensor  # (H_kv, G, M), row maximum


def _tile_gradients(
    sequence: SequenceTiles, m: QueryTile, rows: _GradientRows, dk: Tensor, dv: Tensor
) -> Tensor:
    """dq (H_kv, G, M, D) of one query tile; adds its share to dk and dv (H_kv, S_kv, D)."""
    dq = torch.zeros_like(m.q)
    dq_rows, q_rows, grad_rows = (x.flatten(1, 2) for x in (dq, m.q, rows.grad))
    for n in sequence.key_tiles(m):
        scores, k, v = sequence.scores(m, n)
        probs = scores.sub_(rows.pivot[..., None]).exp_()
        dropped = sequence.dropped(probs, m, n)
        dv[:, n.keys].baddbmm_(dropped.flatten(1, 2).mT, grad_rows)
        grad_probs = sequence.dropped((grad_rows @ v.mT).view_as(probs), m, n)
        ds = grad_probs.sub_(rows.delta[..., None]).mul_(probs)
        if n.masked:  # a hidden key has weight exactly 0: select, grad_probs may not be finite
            ds = torch.where(probs > 0, ds, 0.0)
        dq_rows.baddbmm_(ds.flatten(1, 2), k)
        dk[:, n.keys].baddbmm_(ds.flatten(1, 2).mT, q_rows)  # m.q carries the softmax scale
    return dq.mul_(sequence.call.scale)


def _pivot(row_max: Tensor) -> Tensor:
    """What to subtract before the exponential: the row maximum, 0 for rows with no key yet."""
    return row_max.masked_fill(row_max == float("-inf"), 0.0)
