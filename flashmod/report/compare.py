"""Pick the points that can fairly be set side by side."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from flashmod.report.series import TWIN, Point

DENSE = (TWIN, "dense")


class Growth(NamedTuple):
    """The factor per doubling of the length, between two lengths of one series."""

    kind: str
    first: Point
    last: Point

    @property
    def per_doubling(self) -> float:
        doublings = math.log2(self.last.seq_len / self.first.seq_len)
        return float((self.last.value / self.first.value) ** (1 / doublings))

    @property
    def predicted(self) -> bool:
        return self.first.predicted or self.last.predicted


def longest_pair(
    found: Sequence[Point], rivals: Sequence[str] = DENSE
) -> tuple[Point, Point] | None:
    """Flash and its rival in the same workload, at the longest length that has both."""
    for rival in rivals:
        pairs = [
            (a, b) for a in found for b in found
            if a.kind == "flash" and b.kind == rival
            and (a.workload, a.seq_len) == (b.workload, b.seq_len)
        ]
        if pairs:
            return max(pairs, key=lambda pair: (pair[0].seq_len, not pair[1].predicted))
    return None


def growths(found: Sequence[Point]) -> list[Growth]:
    """Over the two longest lengths of flash, and of dense in the same workload."""
    lines = [line for line in _lines(found, "flash") if len(line) > 1]
    if not lines:
        return []
    flash = max(lines, key=max)
    first, last = sorted(flash)[-2:]
    result = [Growth("flash", flash[first], flash[last])]
    for kind in DENSE:
        for line in _lines(found, kind):
            same = all(n in line and line[n].workload == flash[n].workload for n in (first, last))
            if same and len(result) < 2:
                result.append(Growth("dense", line[first], line[last]))
    return [growth for growth in result if growth.first.value > 0]


def _lines(found: Sequence[Point], kind: str) -> list[dict[int, Point]]:
    """One ``{length: point}`` per series; a measured point goes before a predicted one."""
    names = dict.fromkeys(point.series for point in found if point.kind == kind)
    ordered = sorted(found, key=lambda point: not point.predicted)
    return [{p.seq_len: p for p in ordered if p.series == name} for name in names]
