"""What the torch tiles count while they run, for ``return_stats``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import AttentionCall, TileConfig
from ..stats import KIND, RESCALES, UPDATES, plan_tiles
from .sequence_tiles import KeyTile, QueryTile, SequenceTiles, accumulate_dtype


class Collector:
    """Counts of every tile and numbers of every row of one forward pass."""

    def __init__(self, q: Tensor, call: AttentionCall, tiles: TileConfig) -> None:
        self.tiles, self.plan = tiles, plan_tiles(call, q.shape[2], tiles)
        self.counts = torch.zeros(3, self.plan.total, dtype=torch.int32, device=q.device)
        batch, rows, heads, _ = q.shape
        self.per_row = torch.zeros(
            2, batch, heads, rows, dtype=accumulate_dtype(q), device=q.device
        )
        self.per_row[0] = float("-inf")
        self.moment: Tensor | None = None  # of a query tile: sum of weight * (logit - maximum)

    @property
    def results(self) -> tuple[Tensor, Tensor]:
        """Row statistics and tile statistics, as :class:`flashmod.spec.Forward` has them."""
        return self.per_row, self.counts

    def tile(
        self,
        sequence: SequenceTiles,
        m: QueryTile,
        n: KeyTile,
        old_max: Tensor,
        new_max: Tensor,
        row_sum: Tensor,
        shifted: Tensor,
    ) -> None:
        """Count one tile.

        Args:
            old_max, new_max: (H_kv, G, M), the running maximum before and after it.
            row_sum: (H_kv, G, M), the running sum before it.
            shifted: (H_kv, G, M, N), logits minus the new maximum.
        """
        block = self._tile_counts(sequence, m, n)
        grew = new_max > old_max
        block[UPDATES] = grew.sum(-1).flatten()
        block[RESCALES] = (grew & (old_max != float("-inf"))).sum(-1).flatten()
        block[KIND] = n.kind
        seen = shifted != float("-inf")
        added = torch.where(seen, shifted * shifted.exp(), 0.0).sum(-1)
        if self.moment is None:
            self.moment = added
            return
        # The earlier terms, about the new maximum; where there were none, their sum is 0.
        moved = torch.where(row_sum > 0, old_max - new_max, 0.0)
        self.moment = moved.exp() * (self.moment + moved * row_sum) + added

    def rows(self, m: QueryTile, row_max: Tensor, row_sum: Tensor) -> None:
        """Store the largest logit and the entropy of a query tile's rows, (H_kv, G, M) each."""
        self.per_row[0][m.stat_rows] = row_max.flatten(0, 1)
        if self.moment is not None:
            dead = row_sum == 0
            total = row_sum.masked_fill(dead, 1.0)
            entropy = (total.log() - self.moment / total).masked_fill(dead, 0.0)
            self.per_row[1][m.stat_rows] = entropy.clamp(min=0.0).flatten(0, 1)
        self.moment = None

    def _tile_counts(self, sequence: SequenceTiles, m: QueryTile, n: KeyTile) -> Tensor:
        """(3, H), a view of the counts of one tile of every head."""
        shape, at = self.plan.shapes[sequence.span.n], self.plan.offsets[sequence.span.n]
        own = self.counts[:, at : at + torch.Size(shape).numel()].view(3, *shape)
        return own[:, :, m.first // self.tiles.block_m, n.first // self.tiles.block_n]
