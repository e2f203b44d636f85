"""A picture for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..stats import FULL, PARTIAL, SKIPPED
from .panels import HIDDEN, MAX_PANELS, Counts, Grid, Panel

MARKS = {FULL: "█", PARTIAL: "▒", HIDDEN: "·", SKIPPED: " "}
LEGEND = "█ full tile   ▒ partial tile, its hidden pairs ·   blank: skipped tile"


def picture_text(panels: Sequence[Panel], total: Counts) -> str:
    """Captions and drawings of the first panels, the legend, and the total."""
    lines = [LEGEND]
    for panel in panels[:MAX_PANELS]:
        lines += ["", *panel.caption, *_drawing(panel.grid())]
    lines += closing(panels, total)
    return "\n".join(line.rstrip() for line in lines)


def closing(panels: Sequence[Panel], total: Counts) -> list[str]:
    """What stands below the last panel: the total, unless one panel says it all."""
    if len(panels) == 1:
        return []
    hidden = len(panels) - MAX_PANELS
    lines = [f"{hidden} more sequences are counted, not drawn"] if hidden > 0 else []
    return ["", *lines, f"total: {len(panels)} sequences", *total.caption("tiles")]


def _drawing(grid: Grid) -> Iterator[str]:
    rows, columns = grid.marks.shape
    if not rows or not columns:
        return
    wide = 2 if columns <= 32 else 1  # a character is about twice as high as wide
    labels = {at: str(position) for at, position in grid.ticks(0)}
    margin = max(map(len, labels.values())) + 1
    yield f"{'':{margin}} keys →, queries ↓"
    yield f"{'':{margin}} {_key_labels(grid, wide)}"
    for at, row in enumerate(grid.marks.tolist()):
        if at == 0 or (grid.tile[0] > 1 and at % grid.tile[0] == 0):
            yield f"{'':{margin}}{_border(grid, wide, '┌┬┐' if at == 0 else '├┼┤')}"
        cells = [MARKS[mark] * wide for mark in row]
        inside = "│".join("".join(cells[a:b]) for a, b in _columns(grid))
        yield f"{labels.get(at, ''):>{margin - 1}} │{inside}│"
    yield f"{'':{margin}}{_border(grid, wide, '└┴┘')}"


def _columns(grid: Grid) -> list[tuple[int, int]]:
    """The columns of squares between two vertical borders."""
    size, step = grid.marks.shape[1], grid.tile[1]
    step = step if step > 1 else size
    return [(a, min(a + step, size)) for a in range(0, size, step)]


def _border(grid: Grid, wide: int, corners: str) -> str:
    lines = ("─" * wide * (b - a) for a, b in _columns(grid))
    return corners[0] + corners[1].join(lines) + corners[2]


def _key_labels(grid: Grid, wide: int) -> str:
    line = ""
    for at, position in grid.ticks(1):
        borders = at // grid.tile[1] if grid.tile[1] > 1 else 0
        column = at * wide + borders
        if column == 0 or column > len(line):
            line = f"{line:{column}}{position}"
    return line
