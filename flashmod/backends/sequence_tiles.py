"""One sequence cut into tiles of queries and keys: logits, visibility and dropout of each tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import mask_fn_on_tensors
from ..spec import AttentionCall, Span, TileConfig, on_ints, on_tensors

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


class KeyTile(NamedTuple):
    """Keys ``[first, end)`` of a sequence; ``masked`` when not every query sees them all."""

    first: int
    end: int
    masked: bool

    @property
    def keys(self) -> slice:
        return slice(self.first, self.end)


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
        self.key_mask = None if call.key_mask is None else call.key_mask[span.kv_rows]
        self.sequence_id = call.sequence_ids[span.n]
        self.head = torch.arange(q.shape[2], device=q.device, dtype=torch.int32).view(
            self.kv_heads, self.group, 1, 1
        )
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
        everywhere = self.predicate is not None or self.key_mask is not None
        for first in range(start // block * block, end, block):
            tile = max(first, start), min(first + block, end)
            yield KeyTile(*tile, everywhere or not (full[0] <= tile[0] and tile[1] <= full[1]))

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

    def scores(self, m: QueryTile, n: KeyTile) -> tuple[Tensor, Tensor, Tensor]:
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

    def visible(self, m: QueryTile, n: KeyTile) -> Tensor:
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

    def dropped(self, x: Tensor, m: QueryTile, n: KeyTile) -> Tensor:
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


def _query_indices(m: QueryTile, device: torch.device) -> Tensor:
    """(M, 1) int32, so that what a mask function computes wraps as in the kernels."""
    return torch.arange(m.first, m.first + m.size, device=device, dtype=torch.int32)[:, None]


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """What sums are kept in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
