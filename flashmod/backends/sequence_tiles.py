"""One sequence cut into tiles of queries and keys: logits, visibility and dropout of each tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks import mask_fn_on_tensors
from ..spec import AttentionCall, Span, TileConfig, on_ints, on_tensors, sequence_terms
from ..stats import FULL, PARTIAL

DEFAULT_TILES = TileConfig(block_m=128, block_n=256)


class QueryTile(NamedTuple):
    """Some queries of a sequence, all heads, with their key intervals."""

    first: int
    size: int
    rows: tuple[int, slice]  # of q, out and their gradients
    stat_rows: tuple[int, slice, slice]  # of row statistics (B, H, S)
    q: Tensor  # (H_kv, G, M, D), scaled
    lo: Tensor  # (M, 1), the key interval of every row
    hi: Tensor

    @property
    def queries(self) -> slice:
        return slice(self.first, self.first + self.size)


class KeyTile(NamedTuple):
    """Keys ``[first, end)`` of a sequence; ``masked`` when not every query sees them all."""

    first: int
    end: int
    masked: bool
    kind: int  # as in flashmod.stats: a tile cut short by the end of the keys is partial

    @property
    def keys(self) -> slice:
        return slice(self.first, self.end)


class TileScores(NamedTuple):
    """The logits of a tile, -inf where hidden, and the keys and values that they belong to."""

    logits: Tensor  # (H_kv, G, M, N)
    k: Tensor  # (H_kv, N, D)
    v: Tensor  # (H_kv, N, D_v)
    cap_slope: Tensor | None = None  # derivative of the soft cap


class SequenceTiles:
    """One sequence of a call: its keys and values in the accumulation dtype, and its tiles."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, span: Span):
        self.call, self.span, self.q = call, span, q
        self.dtype = accumulate_dtype(q)
        self.kv_heads, self.group = k.shape[2], q.shape[2] // k.shape[2] if k.shape[2] else 1
        self.tiles = call.tile_config() or DEFAULT_TILES
        self.k, self.v = (
            x[span.kv_rows].transpose(0, 1).to(self.dtype).contiguous() for x in (k, v)
        )  # (H_kv, S_kv, D), contiguous so that no result depends on a caller's strides
        self.predicate = mask_fn_on_tensors(call.mask_fn) if call.mask_fn else None
        self.sequence_id = call.sequence_ids[span.n]
        self.head = torch.arange(q.shape[2], device=q.device, dtype=torch.int32).view(
            self.kv_heads, self.group, 1, 1
        )
        terms = sequence_terms(call, span)
        self.mask, self.slopes, sink = map(
            self.fold_heads, (terms.attn_mask, terms.slopes, terms.sink)
        )
        self.sink = None if sink is None else sink.to(self.dtype)
        self.labels, self.thresholds = terms.labels, terms.thresholds
        self.keep_scale: Any = on_ints.keep_scale(float(call.dropout_threshold))
        if self.thresholds is not None:
            self.keep_scale = on_tensors.keep_scale(self.thresholds.to(self.dtype))
        if call.dropout_seed is not None:
            seed = call.dropout_seed.reshape(1).view(torch.int32).unbind()
            self.dropout_key = on_tensors.dropout_head_key(*seed, self.sequence_id, self.head)

    def query_tiles(self) -> Iterator[QueryTile]:
        q_len = self.span.limits.q_len if self.group else 0  # no query head, no tile
        for first in range(0, q_len, self.tiles.block_m):
            size = min(self.tiles.block_m, q_len - first)
            start = self.span.q_start + first
            rows = (self.span.q_batch, slice(start, start + size))
            q_idx = torch.arange(first, first + size, device=self.q.device)
            lo, hi = on_tensors.key_interval(q_idx, self.span.limits)
            q = torch.where((lo < hi)[:, None, None], self.q[rows], 0.0)
            stat_rows = (rows[0], slice(None), rows[1])
            yield QueryTile(
                first,
                size,
                rows,
                stat_rows,
                self.fold(q) * self.call.scale,
                lo[:, None],
                hi[:, None],
            )

    def key_tiles(self, m: QueryTile) -> Iterator[KeyTile]:
        """Key tiles that some row sees, cut at multiples of ``block_n`` and the visible range."""
        last, block = m.first + m.size - 1, self.tiles.block_n
        start, end = on_ints.key_range(m.first, last, self.span.limits)
        if start == end:
            return
        full = on_ints.full_key_range(m.first, last, self.span.limits)
        _, full_start, full_end, _ = on_ints.split_tiles(start, end, *full, block)
        for first in range(start // block * block, end, block):
            tile = max(first, start), min(first + block, end)
            masked = self.call.everywhere or not (full[0] <= tile[0] and tile[1] <= full[1])
            whole = full_start <= first < full_end and not self.call.everywhere
            yield KeyTile(*tile, masked, FULL if whole else PARTIAL)

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

    def fold_heads(self, x: Tensor | None) -> Tensor | None:
        """(H|1, ...) -> (H_kv|1, G|1, ...)."""
        if x is None:
            return None
        one = x.shape[0] == 1
        return x.unflatten(0, (1, 1) if one else (self.kv_heads, self.group))

    def scores(self, m: QueryTile, n: KeyTile, slope: bool = False) -> TileScores:
        """Logits of a tile and what they belong to; with ``slope`` that of the soft cap too."""
        k, v = self.k[:, n.keys], self.v[:, n.keys]
        if not n.masked:
            return self._modified((m.q.flatten(1, 2) @ k.mT), m, n, k, v, slope)
        seen = self.visible(m, n)
        if self.call.everywhere:  # the memory of a key that is hidden from all must not matter
            some = seen.any(-2) if seen.dim() == 2 else seen.any(-2).any(-2)
            k, v = (torch.where(some[..., None], x, 0.0) for x in (k, v))
        tile = self._modified(m.q.flatten(1, 2) @ k.mT, m, n, k, v, slope)
        return tile._replace(logits=tile.logits.masked_fill_(~seen, float("-inf")))

    def _modified(
        self, scores: Tensor, m: QueryTile, n: KeyTile, k: Tensor, v: Tensor, slope: bool
    ) -> TileScores:
        """Soft cap, ALiBi and bias, in this order."""
        scores, cap_slope = scores.unflatten(1, (self.group, -1)), None
        if self.call.softcap:
            scores = on_tensors.soft_cap(scores, self.call.softcap)
            if slope:
                cap_slope = on_tensors.soft_cap_slope(scores, self.call.softcap)
        if self.slopes is not None:
            positions = self._query_idx(m), self._key_idx(n)
            scores = scores - on_tensors.alibi(*positions, self.slopes, self.span.limits)
        if self.mask is not None and self.mask.dtype != torch.bool:
            scores = scores + self.mask_tile(self.mask, m, n).to(self.dtype)
        return TileScores(scores, k, v, cap_slope)

    def mask_tile(self, mask: Tensor, m: QueryTile, n: KeyTile) -> Tensor:
        """The part (..., M|1, N|1) of an attention mask (..., Q|1, K|1)."""
        rows = m.queries if mask.shape[-2] > 1 else slice(None)
        return mask[..., rows, n.keys if mask.shape[-1] > 1 else slice(None)]

    def visible(self, m: QueryTile, n: KeyTile) -> Tensor:
        """(M, N) bool, or (H_kv|1, G|1, M, N) under a mask function or an attention mask."""
        kv_idx = self._key_idx(n)
        seen = on_tensors.is_visible(kv_idx, m.lo, m.hi)
        if self.mask is not None:
            tile = self.mask_tile(self.mask, m, n)
            seen = seen & (tile if tile.dtype == torch.bool else tile != float("-inf"))
        if self.predicate is not None:
            labels = self.labels and (self.labels[0][m.queries], self.labels[1][n.keys])
            seen = seen & self.predicate(
                self.sequence_id, self.head, self._query_idx(m), kv_idx, *labels,
                *self.call.mask_args,
            )  # fmt: skip
        return seen

    def dropped(self, x: Tensor, m: QueryTile, n: KeyTile) -> Tensor:
        """Drop and rescale entries of a tile (H_kv, G, M, N): the same ones whatever the tiling."""
        if self.call.dropout_seed is None:
            return x
        row_key = on_tensors.dropout_row_key(self.dropout_key, self._query_idx(m))
        first = n.first // 16 * 16  # one hash for the key columns j and j ^ 8
        pairs = torch.arange(first // 2, -(-n.end // 16) * 8, device=x.device, dtype=torch.int32)
        words = on_tensors.dropout_word(*row_key, on_tensors.dropout_pair_key(pairs)).unflatten(
            -1, (-1, 8)
        )
        halves = [on_tensors.dropout_bits(words, kv_idx) for kv_idx in (0, 8)]
        bits = torch.stack(halves, -2).flatten(-3)[..., n.first - first : n.end - first]
        if self.thresholds is None:
            return torch.where(bits >= self.call.dropout_threshold, x * self.keep_scale, 0.0)
        keep = bits >= self.thresholds[m.queries]
        return torch.where(keep, x * self.keep_scale[m.queries], 0.0)

    def _query_idx(self, m: QueryTile) -> Tensor:
        """(M, 1) int32, so that what a mask function computes wraps as in the kernels."""
        rows = m.queries
        return torch.arange(rows.start, rows.stop, device=self.q.device, dtype=torch.int32)[:, None]

    def _key_idx(self, n: KeyTile) -> Tensor:
        return torch.arange(n.first, n.end, device=self.q.device, dtype=torch.int32)


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """What sums are kept in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
