"""What a picture shows of every sequence: visible cells, kinds of tiles, counts.

Nothing here decides who sees whom: cells come from the reference, tiles from the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import visible
from ..spec import AttentionCall, Span, TileConfig, on_tensors, spans
from ..stats import FULL, PARTIAL, SKIPPED

HIDDEN = 3  # beside the kinds of tiles: a cell of a partial tile that is not visible
MAX_SIDE = 64  # squares along a side of a drawing
MAX_PANELS = 8  # sequences drawn; the rest is counted
_CELLS_AT_ONCE = 1 << 22


class Counts(NamedTuple):
    """Tiles by kind, and query-key pairs."""

    full: int
    partial: int
    skipped: int
    visible: int
    pairs: int

    @property
    def computed(self) -> int:
        return self.full + self.partial

    @property
    def tiles(self) -> int:
        return self.computed + self.skipped

    @staticmethod
    def sum(counts: Iterable[Counts]) -> Counts:
        return Counts(*map(sum, zip(Counts(0, 0, 0, 0, 0), *counts, strict=True)))

    def caption(self, tiles: str) -> list[str]:
        """Three lines; ``tiles`` says of which size."""
        return [
            f"{tiles}: {_share(self.computed, self.tiles)} computed",
            f"{self.full} full, {self.partial} partial, {self.skipped} skipped",
            f"pairs: {_share(self.visible, self.pairs)} visible",
        ]


def _share(part: int, whole: int) -> str:
    percent = f" ({part / whole:.1%})" if whole else ""
    return f"{part} of {whole}{percent}"


class Grid(NamedTuple):
    """The squares of a drawing: one pair each, or some tiles each."""

    marks: Tensor  # (rows, columns) int8: SKIPPED, PARTIAL, FULL or HIDDEN
    unit: tuple[int, int]  # queries and keys per square
    tile: tuple[int, int]  # rows and columns of squares between two tile borders
    note: str  # what a square is, "" for one pair

    def ticks(self, axis: int) -> list[tuple[int, int]]:
        """Square and position at which tiles start, at most six of them."""
        size, step = self.marks.shape[axis], self.tile[axis]
        step *= max(1, -(-size // (6 * step)))
        return [(at, at * self.unit[axis]) for at in range(0, size, step)]


class Panel(NamedTuple):
    """One sequence under a mask.

    Args:
        sequence: its number.
        sequence_id, head: what mask functions see.
        kinds: (query tiles, key tiles) int8: SKIPPED, PARTIAL or FULL.
        cells: (S, S_kv) bool, None where either side is longer than 64.
    """

    sequence: int
    sequence_id: int
    head: int
    q_len: int
    kv_len: int
    tiles: TileConfig
    kinds: Tensor
    cells: Tensor | None
    counts: Counts

    @property
    def caption(self) -> list[str]:
        name = f"sequence {self.sequence}"
        if self.sequence_id != self.sequence:
            name += f" (id {self.sequence_id})"
        if self.head:
            name += f", head {self.head}"
        tiles = f"tiles of {self.tiles.block_m}x{self.tiles.block_n}"
        lines = [f"{name}: {self.q_len} queries x {self.kv_len} keys", *self.counts.caption(tiles)]
        note = self.grid().note
        return [*lines, note] if note else lines

    def grid(self) -> Grid:
        """What to draw: every pair if both sides are short, else tiles."""
        block = self.tiles.block_m, self.tiles.block_n
        if self.cells is not None:
            marks = self.kinds.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            marks = marks[: self.q_len, : self.kv_len]
            marks = torch.where((marks == SKIPPED) | self.cells, marks, HIDDEN)
            return Grid(marks, (1, 1), block, "")
        group = -(-max(self.kinds.shape) // MAX_SIDE)
        note = "drawn by tiles"
        if group > 1:
            note = f"drawn by {group}x{group} tiles, partial where they differ"
        unit = block[0] * group, block[1] * group
        return Grid(_pooled(self.kinds, group), unit, (1, 1), note)


def build_panels(call: AttentionCall, q: Tensor, k: Tensor, head: int) -> Iterator[Panel]:
    """Every sequence of a call; cells only of those that are drawn."""
    tiles = call.tile_config()
    assert tiles is not None
    for span in spans(call, q, k):
        q_len, kv_len = span.limits.q_len, span.kv_len
        kinds = tile_kinds(call, span, tiles)
        cells = None
        if max(q_len, kv_len) <= MAX_SIDE:
            cells = _seen(call, span, head, torch.arange(q_len))
        full, partial, skipped = (int((kinds == of).sum()) for of in (FULL, PARTIAL, SKIPPED))
        visible_pairs = _visible_pairs(call, span, head)
        counts = Counts(full, partial, skipped, visible_pairs, q_len * kv_len)
        ident = int(call.sequence_ids[span.n])
        yield Panel(span.n, ident, head, q_len, kv_len, tiles, kinds, cells, counts)


def tile_kinds(call: AttentionCall, span: Span, tiles: TileConfig) -> Tensor:
    """(query tiles, key tiles) int8, as every backend cuts them."""
    limits = span.limits
    first = torch.arange(0, limits.q_len, tiles.block_m)
    last = (first + tiles.block_m).clamp(max=limits.q_len) - 1
    start, full_start, full_end, end = (
        edge[:, None]
        for edge in on_tensors.split_tiles(
            *on_tensors.key_range(first, last, limits),
            *on_tensors.full_key_range(first, last, limits),
            tiles.block_n,
        )
    )
    key = torch.arange(0, span.kv_len, tiles.block_n)
    kinds = on_tensors.is_visible(key, start, end).to(torch.int8) * PARTIAL
    if call.everywhere:
        return kinds
    return kinds.masked_fill_(on_tensors.is_visible(key, full_start, full_end), FULL)


def _seen(call: AttentionCall, span: Span, head: int, q_idx: Tensor) -> Tensor:
    """(R, S_kv) bool of one head."""
    return visible(call, span, head + 1, q_idx, span.kv_len)[head]


def _visible_pairs(call: AttentionCall, span: Span, head: int) -> int:
    q_idx = torch.arange(span.limits.q_len)
    if not call.everywhere:  # closed form: a long sequence has too many pairs to look at
        lo, hi = on_tensors.key_interval(q_idx, span.limits)
        return int((hi - lo).clamp(min=0).sum())
    rows = max(1, _CELLS_AT_ONCE // max(1, (head + 1) * span.kv_len))
    return sum(int(_seen(call, span, head, some).sum()) for some in q_idx.split(rows))


def _pooled(kinds: Tensor, group: int) -> Tensor:
    """Kinds of ``group`` x ``group`` tiles: partial where they differ."""
    rows, columns = kinds.shape
    pad = (0, -columns % group, 0, -rows % group)
    low, high = (
        F.pad(kinds, pad, value=value).unflatten(1, (-1, group)).unflatten(0, (-1, group))
        for value in (FULL, SKIPPED)
    )
    low, high = low.amin((1, 3)), high.amax((1, 3))
    return torch.where(low == high, low, PARTIAL)
