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


def pairs(
    found: Sequence[Point], rivals: Sequence[str] = DENSE, predicted: bool = False
) -> list[tuple[Point, Point]]:
    """Flash and its rival at every length of one workload that has both, the longest last.

    The workload and tiles are those of the longest such length; ``predicted`` picks among
    predicted or among measured figures of the rival.
    """
    for rival in rivals:
        both = [
            (a, b)
            for a in found
            for b in found
            if a.kind == "flash"
            and b.kind == rival
            and b.predicted == predicted
            and (a.workload, a.seq_len) == (b.workload, b.seq_len)
        ]
        if both:
            longest = max(both, key=lambda pair: pair[0].seq_len)[0]
            same = [pair for pair in both if pair[0].series == longest.series]
            return sorted(same, key=lambda pair: pair[0].seq_len)
    return []


def growths(found: Sequence[Point]) -> list[Growth]:
    """Flash and dense in one workload over the longest two lengths that both were measured at.

    Without two such lengths: over the longest two of flash, where dense may be predicted.
    """
    measured = [point for point in found if not point.predicted]
    return _growths(measured, both=True) or _growths(found, both=False)


def _growths(found: Sequence[Point], both: bool) -> list[Growth]:
    candidates = []
    for flash in _lines(found, "flash"):
        for dense in [line for kind in DENSE for line in _lines(found, kind)]:
            shared = sorted(n for n in flash if n in dense and _same(flash[n], dense[n]))[-2:]
            if len(shared) == 2:
                candidates.append((shared, flash, dense))
        if len(flash) > 1 and not both:
            candidates.append((sorted(flash)[-2:], flash, {}))
    if not candidates:
        return []
    (first, last), flash, dense = max(candidates, key=lambda c: (c[0][::-1], len(c[2])))
    result = [Growth("flash", flash[first], flash[last])]
    if dense:
        result.append(Growth("dense", dense[first], dense[last]))
    return result


def _same(a: Point, b: Point) -> bool:
    return a.workload == b.workload and a.value > 0 and b.value > 0


def _lines(found: Sequence[Point], kind: str) -> list[dict[int, Point]]:
    """One ``{length: point}`` per series; a measured point goes before a predicted one."""
    names = dict.fromkeys(point.series for point in found if point.kind == kind)
    ordered = sorted(found, key=lambda point: not point.predicted)
    return [{p.seq_len: p for p in ordered if p.series == name} for name in names]
