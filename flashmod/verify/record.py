"""What a run of the checks leaves: a JSON record, and a table for people."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..training.environment import cores, environment
from .context import Context, Runner
from .rows import Row

SCHEMA_VERSION = 1


def record(
    context: Context, rows: list[Row], *, status: str, seconds: float, command: list[str]
) -> dict[str, Any]:
    """Everything that was measured, and where.

    Args:
        status: ``passed``, ``missed`` or ``interrupted``.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "status": status,
        "command": command,
        "seed": context.seed,
        "quick": context.quick,
        "seconds": round(seconds, 1),
        "backends": {runner.name: where(runner) for runner in context.runners},
        "environment": {**environment(), "cores": cores()},
        "rows": [_entry(row) for row in rows],
    }


def where(runner: Runner) -> str:
    """How a backend runs here."""
    if runner.missing:
        return f"not run: {runner.missing}"
    if runner.name == "triton":
        return "interpreter" if runner.interpreted else "compiled, cuda"
    return str(runner.device)


def _entry(row: Row) -> dict[str, Any]:
    return {
        "check": row.check,
        "name": row.name,
        "target": str(row.target),
        "bound": row.target.bound,
        "sign": row.target.sign,
        "unit": row.target.unit.strip(),
        "measured": row.measured,
        "status": row.status,
        "seconds": round(row.seconds, 2),
        "detail": row.detail,
        "data": dict(row.data),
        "trace": row.trace or None,
    }


def write(path: Path, text: str) -> None:
    """Replace a file as a whole; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def to_json(content: dict[str, Any]) -> str:
    """JSON that every reader takes: numbers that are not finite become strings."""
    return json.dumps(_plain(content), indent=1, allow_nan=False) + "\n"


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def table(rows: list[Row]) -> Iterator[str]:
    """Aligned lines: check, target, measured, how it ended, seconds; why, of what is not well."""
    head = ("check", "target", "measured", "", "s")
    body = [
        (row.name, str(row.target), row.value, _VERDICTS[row.status], f"{row.seconds:.1f}")
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    details = ["", *(row.detail if row.status != "passed" else "" for row in rows)]
    for cells, detail in zip((head, *body), details, strict=True):
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        yield "  ".join(padded).rstrip()
        if detail:
            yield f"    {detail}"


_VERDICTS = {"passed": "ok", "missed": "MISSED", "crashed": "CRASHED", "not run": "not run"}


def summary(rows: list[Row], seconds: float) -> str:
    """How many rows ended how."""
    counts = {status: sum(row.status == status for row in rows) for status in _VERDICTS}
    run = len(rows) - counts["not run"]
    text = f"{counts['passed']} of {run} targets met in {seconds:.0f} s"
    bad = counts["missed"] + counts["crashed"]
    if bad:
        text += f"; {bad} MISSED"
    if counts["not run"]:
        text += f"; {counts['not run']} lines NOT RUN and so not verified"
    return text
