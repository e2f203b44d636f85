"""A picture as one SVG document, written by hand: no dependency, light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from ..stats import FULL, PARTIAL, SKIPPED
from .panels import HIDDEN, MAX_PANELS, Counts, Grid, Panel
from .text import closing

# Okabe and Ito's blue and vermilion, told apart by every kind of colour vision; the kinds differ in
# texture too: a full tile is one surface, the cells of a partial one are apart.
CLASSES = {FULL: "full", PARTIAL: "part", HIDDEN: "hidden", SKIPPED: "skipped"}
STYLE = """
.flashmod-mask text{font:12px system-ui,sans-serif;fill:#24292f}
.flashmod-mask .quiet{font-size:11px;fill:#57606a}
.flashmod-mask .head{font-weight:600}
.flashmod-mask .page{fill:#fff}.flashmod-mask .skipped{fill:#fff}
.flashmod-mask .full{fill:#0072b2}.flashmod-mask .part{fill:#d55e00}
.flashmod-mask .hidden{fill:#e4e7eb}
.flashmod-mask .cells{stroke:#fff;fill:none}
.flashmod-mask .tiles{stroke:#8c959f;fill:none}
@media(prefers-color-scheme:dark){
.flashmod-mask text{fill:#e6edf3}.flashmod-mask .quiet{fill:#a3acb6}
.flashmod-mask .page,.flashmod-mask .skipped{fill:#12161c}
.flashmod-mask .full{fill:#56b4e9}.flashmod-mask .part{fill:#e8772e}
.flashmod-mask .hidden{fill:#2b323b}
.flashmod-mask .cells{stroke:#12161c}.flashmod-mask .tiles{stroke:#6e7781}}
"""
LEGEND = (
    (FULL, "full tile"),
    (PARTIAL, "visible in a partial tile"),
    (HIDDEN, "hidden in a partial tile"),
    (SKIPPED, "skipped tile"),
)
PAGE, LINE, LEFT, PANEL = 1000, 16, 52, 330  # widths, in pixels


class _Block(NamedTuple):
    """A drawn panel and its size."""

    body: str
    width: float
    height: float


def picture_svg(panels: Sequence[Panel], total: Counts) -> str:
    """Legend, the first panels in rows, and the total."""
    x, y, row, width = 0.0, 40.0, 0.0, 640.0
    parts = [_legend()]
    for block in map(_panel, panels[:MAX_PANELS]):
        if x and x + block.width > PAGE:
            x, y, row = 0.0, y + row, 0.0
        parts.append(f'<g transform="translate({x:g} {y:g})">{block.body}</g>')
        x, row = x + block.width, max(row, block.height)
        width = max(width, x)
    y += row
    for line in closing(panels, total):
        y += LINE if line else 0
        parts.append(_text(16, y, line) if line else "")
    size = f'width="{width:g}" height="{y + 16:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="flashmod-mask" role="img" {size} '
        f'viewBox="0 0 {width:g} {y + 16:g}"><title>{escape(_title(panels))}</title>'
        f'<style>{STYLE}</style><rect class="page" width="100%" height="100%"/>'
        + "\n".join(parts)
        + "</svg>"
    )


def _title(panels: Sequence[Panel]) -> str:
    return "; ".join(", ".join(panel.caption) for panel in panels[:MAX_PANELS]) or "no sequences"


def _legend() -> str:
    parts, x = [], 16
    for kind, name in LEGEND:
        parts.append(f'<rect class="{CLASSES[kind]}" x="{x}" y="12" width="12" height="12"/>')
        parts.append(f'<path class="tiles" d="{_box(x, 12, 12, 12)}"/>{_text(x + 18, 22, name)}')
        x += 40 + 6 * len(name)
    return "".join(parts)


def _panel(panel: Panel) -> _Block:
    grid, caption = panel.grid(), panel.caption
    parts = [_text(16, LINE, caption[0], "head")]
    parts += [_text(16, LINE * (n + 2), line, "quiet") for n, line in enumerate(caption[1:])]
    width = max(PANEL, 32 + 6.3 * max(map(len, caption)))
    top = LINE * len(caption) + 40
    rows, columns = grid.marks.shape
    if not rows or not columns:
        return _Block("".join(parts), width, top)
    side = min(14.0, max(4.0, 256 / max(rows, columns)))
    squares = "".join(_squares(grid, side))
    parts.append(f'<g transform="translate({LEFT} {top})">{squares}</g>')
    return _Block("".join(parts), width, top + rows * side + 24)


def _squares(grid: Grid, side: float) -> Iterator[str]:
    """The grid with its axes; the origin is its upper left corner."""
    rows, columns = grid.marks.shape
    width, height = columns * side, rows * side
    for kind in (HIDDEN, PARTIAL):
        yield _surface(grid, kind, side)
    if grid.unit != (1, 1):
        yield _surface(grid, FULL, side)
    yield f'<path class="cells" stroke-width="{side / 10:g}" d="{_lines(1, 1, grid, side)}"/>'
    if grid.unit == (1, 1):  # over the lines: a full tile is one surface
        yield _surface(grid, FULL, side)
    borders = "" if grid.tile == (1, 1) else _lines(*grid.tile, grid, side)
    yield f'<path class="tiles" d="{_box(0, 0, width, height)}{borders}"/>'
    yield from _axes(grid, side)


def _axes(grid: Grid, side: float) -> Iterator[str]:
    yield _text(0, -22, "keys →", "quiet")
    queries = _text(0, 0, "← queries", "quiet", "end")
    yield f'<g transform="translate(-36 0) rotate(-90)">{queries}</g>'
    free = 0.0  # where the label before ends
    for at, position in grid.ticks(1):
        if at * side >= free:
            free = at * side + 8 + 7 * len(str(position))
            yield _text(at * side, -6, str(position), "quiet")
    free = 0.0
    for at, position in grid.ticks(0):
        if at * side >= free:
            free = at * side + 12
            yield _text(-6, at * side + 9, str(position), "quiet", "end")


def _surface(grid: Grid, kind: int, side: float) -> str:
    """All squares of one kind as one path, runs of a row joined."""
    path = []
    for at, row in enumerate(grid.marks.tolist()):
        column = 0
        for mark, run in groupby(row):
            length = len(list(run))
            if mark == kind:
                path.append(_box(column * side, at * side, length * side, side))
            column += length
    return f'<path class="{CLASSES[kind]}" d="{"".join(path)}"/>'


def _lines(row_step: int, column_step: int, grid: Grid, side: float) -> str:
    rows, columns = grid.marks.shape
    across = (f"M0 {at * side:g}h{columns * side:g}" for at in range(row_step, rows, row_step))
    down = (f"M{at * side:g} 0v{rows * side:g}" for at in range(column_step, columns, column_step))
    return "".join((*across, *down))


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:g} {y:g}h{width:g}v{height:g}h{-width:g}z"


def _text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    where = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text class="{style}" {where}>{escape(words)}</text>'
