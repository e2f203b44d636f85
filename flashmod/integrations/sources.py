"""Scan files and folders of Python source, notebooks included."""

from __future__ import annotations

import ast
import json
import os
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .scan import Finding, scan_source

SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


class Place(NamedTuple):
    """A finding and where it lies: ``file.py:12``, ``notebook.ipynb:cell 3:2``."""

    where: str
    finding: Finding


class Scanned(NamedTuple):
    """What a scan found, how many files it read, and what it could not read and why."""

    places: list[Place]
    files: int
    unread: list[str]

    def __str__(self) -> str:
        lines: list[str] = []
        doors: dict[str, int] = {}
        traps: dict[str, int] = {}
        width = max((len(place.where) for place in self.places), default=0)
        for where, finding in self.places:
            number = doors.setdefault(finding.door, len(doors) + 1)
            letters = [_letters(traps.setdefault(t, len(traps))) for t in finding.traps]
            marks = f"[{', '.join([str(number), *letters])}]"
            lines.append(f"{where:{width}}  {finding.call}  {marks}")
        if doors:
            lines += ["", "doors"] + [f"  [{number}] {door}" for door, number in doors.items()]
        if traps:
            lines += ["", "traps"] + [f"  [{_letters(i)}] {trap}" for trap, i in traps.items()]
        lines += [f"not read: {reason}" for reason in self.unread]
        count = len(self.places)
        lines.append(
            f"{count} place{'s' * (count != 1)} in {self.files} file{'s' * (self.files != 1)}"
        )
        return "\n".join(lines)


class _Text(NamedTuple):
    """Python source made of a file; ``cells`` gives each line its cell and line there."""

    source: str
    cells: list[tuple[int, int]] | None = None
    unread: tuple[str, ...] = ()


def scan_paths(paths: Iterable[str | os.PathLike[str]]) -> Scanned:
    """Scan ``.py`` and ``.ipynb`` files, and those below folders. Nothing is imported or run.

    Raises:
        FileNotFoundError: a path does not exist.
    """
    result = Scanned([], 0, [])
    for path in dict.fromkeys(file for given in paths for file in _files(Path(given))):
        result = result._replace(files=result.files + 1)
        try:
            text = _notebook(path) if path.suffix == ".ipynb" else _Text(_decoded(path))
            findings = scan_source(text.source)
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            result.unread.append(f"{path}: {error}")
            continue
        result.unread.extend(f"{path}:{reason}" for reason in text.unread)
        for finding in findings:
            at = str(finding.line)
            if text.cells is not None:
                cell, line = text.cells[finding.line - 1]
                at = f"cell {cell}:{line}"
            result.places.append(Place(f"{path}:{at}", finding))
    return result


def _files(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.is_file():
        yield path
        return
    for root, folders, files in os.walk(path):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and f[0] != ".")
        yield from (Path(root, f) for f in sorted(files) if f.endswith((".py", ".ipynb")))


def _decoded(path: Path) -> str:
    with tokenize.open(path) as file:  # by the file's own coding line
        return file.read()


def _notebook(path: Path) -> _Text:
    """The code cells one after the other; a cell that is not Python is left out and told."""
    content = json.loads(path.read_text(encoding="utf-8"))
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        raise ValueError("not a notebook of format 4: it has no list of cells")
    lines: list[str] = []
    at: list[tuple[int, int]] = []
    unread: list[str] = []
    for number, cell in enumerate(cells, 1):
        if cell.get("cell_type") != "code":
            continue
        text = _without_magics("".join(cell.get("source", [])))
        try:
            ast.parse(text)
        except SyntaxError as error:
            unread.append(f"cell {number}: {error}")
            continue
        lines += text.split("\n")
        at += [(number, line) for line in range(1, text.count("\n") + 2)]
    return _Text("\n".join(lines), at, tuple(unread))


def _without_magics(text: str) -> str:
    """``%magic`` and ``!command`` lines become ``pass``; a cell of another language is empty."""
    if text.lstrip().startswith("%%") and not text.lstrip().startswith(("%%time", "%%capture")):
        return ""
    return "\n".join(_python(line) for line in text.split("\n"))


def _python(line: str) -> str:
    stripped = line.lstrip()
    magic = stripped.startswith(("%", "!", "?")) or stripped.endswith("?")
    return f"{line[: len(line) - len(stripped)]}pass" if magic else line


def _letters(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else f"t{index}"
