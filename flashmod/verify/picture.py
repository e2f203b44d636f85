"""Histograms of the float64 errors and growth of memory, one SVG for light and dark pages."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

_COLOURS = {"torch tiles": "#2f7ed8", "Triton": "#1f9d76", "dense": "#e4572e"}
_STYLE = """
text { font: 13px system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif; fill: #4b5563; }
.title { font-size: 15px; fill: #1c2128; } .grid { stroke: #dde2e8; } .axis { stroke: #5a6472; }
.ground { fill: #ffffff; } .target { stroke: #5a6472; stroke-dasharray: 6 4; }
@media (prefers-color-scheme: dark) {
  text { fill: #9aa5b4; } .title { fill: #e4e8ee; } .grid { stroke: #323945; }
  .axis { stroke: #9aa5b4; } .ground { fill: #14171c; } .target { stroke: #9aa5b4; } }
"""
_WIDTH, _HEIGHT = 440, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 22, 62, 54


class _Axis(NamedTuple):
    """Maps numbers to pixels, by their logarithm to ``base`` where that is not 0."""

    low: float
    high: float
    start: float
    end: float
    base: int = 0

    def at(self, value: float) -> float:
        x, low, high = value, self.low, self.high
        if self.base:
            x, low, high = (math.log(number, self.base) for number in (value, low, high))
        return self.start + (x - low) / (high - low) * (self.end - self.start)


def draw(rows: list[dict[str, Any]]) -> str:
    """The picture of a record's rows; empty where neither errors nor peaks are among them."""
    data = [row["data"] for row in rows]
    histograms = [x for x in data if "errors" in x]
    growth = [x for x in data if "lengths" in x]
    panels = []
    if histograms:
        panels.append(list(_histogram(histograms)))
    if growth:
        panels.append(list(_growth(growth[0])))
    if not panels:
        return ""
    width = _WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" '
        f'width="{width}" height="{_HEIGHT}" role="img">',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{width}" height="{_HEIGHT}"/>',
    ]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate({number * _WIDTH} 0)">', *panel, "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _histogram(histograms: list[dict[str, Any]]) -> Iterator[str]:
    """How many shapes had an error of which power of ten; a bar per backend."""
    counts = {x["backend"]: Counter(map(_decade, x["errors"])) for x in histograms}
    shown = [decade for own in counts.values() for decade in own]
    first, last = min([*shown, -17]), max([*shown, -9])
    most = max(count for own in counts.values() for count in own.values())
    top = _round_up(most)
    x = _Axis(first, last + 1, _LEFT, _WIDTH - _RIGHT)
    y = _Axis(0, top, _HEIGHT - _BOTTOM, _TOP)
    yield _text(_LEFT, 24, "Number of shapes by largest fp64 error", "title")
    sizes = {x["backend"]: len(x["errors"]) for x in histograms}
    yield from _legend({f"{name}, {size}": _COLOURS[name] for name, size in sizes.items()})
    for value in (0, top / 2, top):
        yield _line(
            _LEFT, y.at(value), _WIDTH - _RIGHT, y.at(value), "axis" if not value else "grid"
        )
        yield _text(_LEFT - 8, y.at(value) + 4, f"{value:g}", anchor="end")
    for decade in range(first, last + 2):
        if (decade - first) % 2 == (-9 - first) % 2:
            yield _text(x.at(decade), y.at(0) + 18, f"1e{decade}", anchor="middle")
    slot = (x.at(1) - x.at(0)) * 0.8 / len(counts)
    for number, (name, own) in enumerate(counts.items()):
        for decade, count in sorted(own.items()):
            left = x.at(decade + 0.1) + number * slot
            yield (
                f'<rect x="{left:.1f}" y="{y.at(count):.1f}" width="{slot:.1f}" '
                f'height="{y.at(0) - y.at(count):.1f}" fill="{_COLOURS[name]}">'
                f"<title>{html.escape(name)}: {count} from 1e{decade}</title></rect>"
            )
    if first <= -9 <= last + 1:
        yield _line(x.at(-9), _TOP, x.at(-9), y.at(0), "target")
        yield _text(x.at(-9) - 6, _TOP + 12, "target", anchor="end")
    yield _text((_LEFT + _WIDTH) / 2, _HEIGHT - 10, "error of out, dq, dk or dv", anchor="middle")


def _decade(error: float | str) -> int:
    """The power of ten below an error; errors of 0 stand with the smallest."""
    value = float(error)
    if not math.isfinite(value):
        return 1
    return max(-18, math.floor(math.log10(value))) if value else -18


def _growth(data: dict[str, Any]) -> Iterator[str]:
    """Peaks against the length, both logarithmic."""
    lengths: list[int] = data["lengths"]
    series = {"torch tiles": data["flash"], "dense": data["dense"]}
    values = [float(peak) for peaks in series.values() for peak in peaks]
    low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values)))
    x = _Axis(lengths[0], lengths[-1], _LEFT + 14, _WIDTH - _RIGHT - 20, 2)
    y = _Axis(low, high, _HEIGHT - _BOTTOM, _TOP, 10)
    yield _text(_LEFT, 24, "Peak memory, forward and backward, MB", "title")
    yield from _legend({name: _COLOURS[name] for name in series})
    for exponent in range(round(math.log10(low)), round(math.log10(high)) + 1):
        height = y.at(10.0**exponent)
        yield _line(_LEFT, height, _WIDTH - _RIGHT, height, "grid")
        yield _text(_LEFT - 8, height + 4, f"{10.0**exponent:g}", anchor="end")
    for length in lengths:
        yield _text(x.at(length), _HEIGHT - _BOTTOM + 18, str(length), anchor="middle")
    for name, peaks in series.items():
        points = [(x.at(n), y.at(float(peak))) for n, peak in zip(lengths, peaks, strict=True)]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        yield f'<polyline points="{line}" fill="none" stroke="{_COLOURS[name]}" stroke-width="2"/>'
        for a, b in points:
            yield f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{_COLOURS[name]}"/>'
        yield _text(
            points[-1][0] + 4, points[-1][1] - 9, f"{float(peaks[-1]):.3g}", anchor="middle"
        )
    yield _text(
        (_LEFT + _WIDTH) / 2,
        _HEIGHT - 10,
        "tokens, one head, d = 64, causal, fp64",
        anchor="middle",
    )


def _legend(names: dict[str, str]) -> Iterator[str]:
    left = float(_LEFT)
    for name, colour in names.items():
        yield f'<rect x="{left:.0f}" y="36" width="12" height="12" fill="{colour}"/>'
        yield _text(left + 18, 47, name)
        left += 36 + 8 * len(name)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named} text-anchor="{anchor}">{html.escape(text)}</text>'


def _round_up(count: int) -> int:
    step = 10 if count > 10 else 2
    return max(step, -(-count // step) * step)
