"""What a forward pass did: rescales and tiles per sequence, largest logit and entropy per row.

A *rescale* is one (row, key tile) whose maximum strictly exceeds a finite running maximum, key
tiles ascending from multiples of ``block_n``. An *update* also counts the first finite tile of a
row. A sink joins after the last tile and counts as neither.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .spec import AttentionCall, Forward, TileConfig

RESCALES, UPDATES, KIND = range(3)  # rows of `tile_stats`
SKIPPED, PARTIAL, FULL = range(3)  # kinds of tiles: every pair of a full one is visible


class TilePlan(NamedTuple):
    """Where the tiles of every sequence lie in ``tile_stats`` (3, total), as (H, Tq, Tk) blocks."""

    shapes: list[tuple[int, int, int]]
    offsets: list[int]
    total: int


def plan_tiles(call: AttentionCall, heads: int, tiles: TileConfig) -> TilePlan:
    """Lay out the tile statistics of a call; synchronises where lengths live on a device."""
    pairs = zip(call.q_lengths.tolist(), call.kv_lengths.tolist(), strict=True)
    shapes = [(heads, -(-q // tiles.block_m), -(-kv // tiles.block_n)) for q, kv in pairs]
    ends = [0]
    for h, tq, tk in shapes:
        ends.append(ends[-1] + h * tq * tk)
    return TilePlan(shapes, ends[:-1], ends[-1])


class SequenceStats(NamedTuple):
    """The tiles of one sequence, (H, query tiles, key tiles)."""

    rescales: Tensor  # int32
    updates: Tensor  # int32, rescales and first finite tiles
    kinds: Tensor  # int32: SKIPPED, PARTIAL or FULL


class AttentionStats(NamedTuple):
    """Statistics of one forward pass.

    Args:
        sequences: one entry per sequence.
        max_logit: (B, H, S) or (H, T), the largest logit over visible keys; -inf where there is
            none.
        entropy: likewise, in nats, of the weights over visible keys before dropout and without
            the sink; 0 where there is no key.
        tiles: the tile sizes that were used.
    """

    sequences: tuple[SequenceStats, ...]
    max_logit: Tensor
    entropy: Tensor
    tiles: TileConfig

    @property
    def rescales(self) -> int:
        return sum(int(s.rescales.sum()) for s in self.sequences)

    @property
    def updates(self) -> int:
        return sum(int(s.updates.sum()) for s in self.sequences)

    @property
    def tiles_processed(self) -> int:
        return sum(int((s.kinds != SKIPPED).sum()) for s in self.sequences)

    @property
    def tiles_partial(self) -> int:
        return sum(int((s.kinds == PARTIAL).sum()) for s in self.sequences)

    @property
    def tiles_skipped(self) -> int:
        return sum(int((s.kinds == SKIPPED).sum()) for s in self.sequences)

    def __str__(self) -> str:
        total = self.tiles_processed + self.tiles_skipped
        return (
            f"{self.tiles_processed} of {total} tiles of {self.tiles.block_m}x"
            f"{self.tiles.block_n} processed ({self.tiles_partial} partly visible), "
            f"{self.rescales} rescales"
        )


def read_stats(
    call: AttentionCall, forward: Forward, heads: int, tiles: TileConfig, packed: bool
) -> AttentionStats:
    """The statistics that a backend collected, by sequence."""
    assert forward.row_stats is not None and forward.tile_stats is not None
    plan = plan_tiles(call, heads, tiles)
    sizes = [torch.Size(shape).numel() for shape in plan.shapes]
    blocks = zip(forward.tile_stats.split(sizes, 1), plan.shapes, strict=True)
    sequences = [SequenceStats(*block.unflatten(1, shape)) for block, shape in blocks]
    max_logit, entropy = forward.row_stats[:, 0] if packed else forward.row_stats
    return AttentionStats(tuple(sequences), max_logit, entropy, tiles)
