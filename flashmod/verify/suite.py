"""Run the checks one after the other; what one of them breaks, the others do not notice."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from .context import Context
from .rows import Row, Target

NAMES = (
    "precision", "accuracy", "extremes", "empty_rows", "rescales", "memory", "ragged", "dropout",
)  # fmt: skip
_WHOLE = Target("=", 0.0, " errors")


class Suite:
    """The chosen checks and the rows that they have given so far.

    Args:
        names: of :data:`NAMES`, all by default.
        started: called with the name of each check before it runs.
        given: called with each row.
    """

    def __init__(
        self,
        context: Context,
        names: tuple[str, ...] = NAMES,
        started: Callable[[str], None] = lambda name: None,
        given: Callable[[Row], None] = lambda row: None,
    ) -> None:
        self.context, self.names = context, names
        self.rows: list[Row] = []
        self._started, self._given = started, given

    def run(self) -> None:
        """Run every check; an exception inside one becomes a row of its own."""
        for name in self.names:
            self._started(name)
            for row in _timed(name, self.context):
                self.rows.append(row)
                self._given(row)


def _timed(name: str, context: Context) -> Iterator[Row]:
    start = time.perf_counter()
    try:
        for row in _module(name).run(context):
            now = time.perf_counter()
            yield row._replace(check=name, seconds=now - start)
            start = time.perf_counter()
    except Exception as error:
        first = str(error).strip().splitlines()
        detail = f"{type(error).__name__}: {first[0] if first else ''}"
        seconds, trace = time.perf_counter() - start, traceback.format_exc()
        yield Row(
            f"{name} ran to its end", _WHOLE, 1.0, detail, check=name, seconds=seconds, trace=trace
        )


def descriptions() -> dict[str, str]:
    """What every check is about, in a line."""
    return {name: str(_module(name).__doc__).strip().splitlines()[0] for name in NAMES}


def _module(name: str) -> Any:
    return import_module(f"{__package__}.{name}")
