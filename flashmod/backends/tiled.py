"""Attention tile by tile in torch: linear memory on any device, in every dtype.

Online softmax over key tiles, and a backward pass that recomputes each tile from the saved row
maximum and log-sum (Dao et al. 2022). Grouped heads are folded into rows, so K and V are never
repeated: tiles are (H_kv, G, M, N), their matrix products (H_kv, G*M, N).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import mask_fn_on_tensors
from ..spec import AttentionCall, Span, TileConfig, on_ints, on_tensors, spans

DEFAULT_TILES = TileConfig(block_m=128, block_n=256)


def unsupported_reasons(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> list[str]:
    """Empty: the torch tiles run every call."""
    return []


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, S, H, D_v), lse (B, H, S), and row maximum and log-sum (2, B, H, S)."""
    batch, rows, heads, _ = q.shape
    out = q.new_zeros(batch, rows, heads, v.shape[-1])
    stats = torch.zeros(2, batch, heads, rows, dtype=_accumulate(q), device=q.device)
    stats[0] = float("-inf")
    for span in spans(call, q, k):
        sequence = _Sequence(q, k, v, call, span)
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
        sequence = _Sequence(q, k, v, call, span)
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


def _online_softmax(sequence: _Sequence, m: _QueryTile) -> tuple[Tensor, Tensor, Tensor]:
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
    sequence: _Sequence, m: _QueryTile, rows: _GradientRows, dk: Tensor, dv: Tensor
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


class _QueryTile(NamedTuple):
    first: int
    size: int
    rows: tuple[int, slice]  # of q, out and their gradients
    stat_rows: tuple[int, slice, slice]  # of row statistics (B, H, S)
    q: Tensor  # (H_kv, G, M, D), scaled
    lo: Tensor  # (M, 1), the key interval of every row
    hi: Tensor


class _KeyTile(NamedTuple):
    first: int
    end: int
    masked: bool

    @property
    def keys(self) -> slice:
        return slice(self.first, self.end)


class _Sequence:
    """One sequence of a call: its keys and values in the accumulation dtype, and its tiles."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, span: Span):
        self.call, self.span, self.q = call, span, q
        self.dtype = _accumulate(q)
        self.kv_heads, self.group = k.shape[2], q.shape[2] // k.shape[2] if k.shape[2] else 1
        self.tiles = call.tile_config() or DEFAULT_TILES
        self.k, self.v = (
            x[span.kv_rows].transpose(0, 1).to(self.dtype).contiguous() for x in (k, v)
        )  # (H_kv, S_kv, D), contiguous so that no result depends on a caller's strides
        self.predicate = mask_fn_on_tensors(call.mask_fn) if call.mask_fn else None
        self.key_mask = None if call.key_mask is None else call.key_mask[span.kv_rows]
        self.sequence_id = call.sequence_ids[span.n]
        self.head = torch.arange(q.shape[2], device=q.device, dtype=torch.int32).view(
            self.kv_heads, self.group, 1, 1
        )
        if call.dropout_seed is not None:
            seed = call.dropout_seed.reshape(1).view(torch.int32).unbind()
            self.dropout_key = on_tensors.dropout_head_key(*seed, self.sequence_id, self.head)

    def query_tiles(self) -> Iterator[_QueryTile]:
        q_len = self.span.limits.q_len if self.group else 0  # no query head, no tile
        for first in range(0, q_len, self.tiles.block_m):
            size = min(self.tiles.block_m, q_len - first)
            start = self.span.q_start + first
            rows = (self.span.q_batch, slice(start, start + size))
            q_idx = torch.arange(first, first + size, device=self.q.device)
            lo, hi = on_tensors.key_interval(q_idx, self.span.limits)
            q = torch.where((lo < hi)[:, None, None], self.q[rows], 0.0)
            stat_rows = (rows[0], slice(None), rows[1])
            yield _QueryTile(
                first,
                size,
                rows,
                stat_rows,
                self.fold(q) * self.call.scale,
                lo[:, None],
                hi[:, None],
            )

    def key_tiles(self, m: _QueryTile) -> Iterator[_KeyTile]:
        """Key tiles that some row sees, cut at multiples of ``block_n`` and the visible range."""
        last, block = m.first + m.size - 1, self.tiles.block_n
        start, end = on_ints.key_range(m.first, last, self.span.limits)
        if start == end:
            return
        full = on_ints.full_key_range(m.first, last, self.span.limits)
        everywhere = self.predicate is not None or self.key_mask is not None
        for first in range(start // block * block, end, block):
            tile = max(first, start), min(first + block, end)
            yield _KeyTile(*tile, everywhere or not (full[0] <= tile[0] and tile[1] <= full[1]))

    def fold(self, x: Tensor) -> Tensor:
        """(M, H, D) -> (H_kv, G, M, D) in the accumulation dtype."""
        return (
            x.to(self.dtype)
            .unflatten(1, (self.kv_heads, self.group))
            .permute(1, 2, 0, 3)
            .contiguous()
        )

    def unfold(self, x: Tensor) -> Tensor:
        """(H_kv, G, M, D) -> (M, H, D) in q's dtype."""
        return x.permute(2, 0, 1, 3).flatten(1, 2).to(self.q.dtype)

    def scores(self, m: _QueryTile, n: _KeyTile) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled logits (H_kv, G, M, N), -inf where hidden, and the tile's keys and values."""
        k, v = self.k[:, n.keys], self.v[:, n.keys]
        if not n.masked:
            return (m.q.flatten(1, 2) @ k.mT).unflatten(1, (self.group, -1)), k, v
        seen = self.visible(m, n)
        if self.predicate is not None or self.key_mask is not None:
            # The memory of a key that is hidden from all must not matter.
            some = seen.any(-2) if seen.dim() == 2 else seen.any(-2).any(-2)
            k, v = (torch.where(some[..., None], x, 0.0) for x in (k, v))
        scores = (m.q.flatten(1, 2) @ k.mT).unflatten(1, (self.group, -1))
        return scores.masked_fill_(~seen, float("-inf")), k, v

    def visible(self, m: _QueryTile, n: _KeyTile) -> Tensor:
        """(M, N) bool, or (H_kv, G, M, N) under a mask function."""
        kv_idx = torch.arange(n.first, n.end, device=self.q.device, dtype=torch.int32)
        seen = on_tensors.is_visible(kv_idx, m.lo, m.hi)
        if self.key_mask is not None:
            seen = seen & self.key_mask[n.keys]
        if self.predicate is not None:
            seen = seen & self.predicate(
                self.sequence_id, self.head, _query_indices(m, kv_idx.device), kv_idx,
                *self.call.mask_args,
            )  # fmt: skip
        return seen

    def dropped(self, x: Tensor, m: _QueryTile, n: _KeyTile) -> Tensor:
        """Drop and rescale entries of a tile (H_kv, G, M, N): the same ones whatever the tiling."""
        if self.call.dropout_seed is None:
            return x
        row_key = on_tensors.dropout_row_key(self.dropout_key, _query_indices(m, x.device))
        first = n.first // 16 * 16  # one hash for the key columns j and j ^ 8
        pairs = torch.arange(first // 2, -(-n.end // 16) * 8, device=x.device, dtype=torch.int32)
        words = on_tensors.dropout_word(*row_key, on_tensors.dropout_pair_key(pairs)).unflatten(
            -1, (-1, 8)
        )
        halves = [on_tensors.dropout_bits(words, kv_idx) for kv_idx in (0, 8)]
        bits = torch.stack(halves, -2).flatten(-3)[..., n.first - first : n.end - first]
        return torch.where(bits >= self.call.dropout_threshold, x * self.call.keep_scale, 0.0)


def _query_indices(m: _QueryTile, device: torch.device) -> Tensor:
    """(M, 1) int32, so that what a mask function computes wraps as in the kernels."""
    return torch.arange(m.first, m.first + m.size, device=device, dtype=torch.int32)[:, None]


def _accumulate(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
