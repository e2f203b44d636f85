"""What a check gives: rows with a target and what was measured."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, "=": operator.eq, ">=": operator.ge, ">": operator.gt,
}  # fmt: skip


class Target(NamedTuple):
    """A bound and on which side of it a measurement must lie."""

    sign: str  # one of < <= = >= >
    bound: float
    unit: str = ""

    def met(self, value: float) -> bool:
        """Whether ``value`` meets it; a NaN never does."""
        return _SIGNS[self.sign](value, self.bound)

    def __str__(self) -> str:
        return f"{self.sign} {number(self.bound)}{self.unit}"


class Row(NamedTuple):
    """One line of the table.

    Args:
        name: what was checked, in words.
        measured: None when it could not be run.
        detail: where the worst value arose, or why the row was not run.
        data: numbers behind it, for the record and the picture.
        trace: the traceback of a check that crashed.
    """

    name: str
    target: Target
    measured: float | None
    detail: str = ""
    data: Mapping[str, Any] = MappingProxyType({})
    check: str = ""
    seconds: float = 0.0
    trace: str = ""

    @property
    def status(self) -> str:
        """``passed``, ``missed``, ``crashed`` or ``not run``."""
        if self.trace:
            return "crashed"
        if self.measured is None:
            return "not run"
        return "passed" if self.target.met(self.measured) else "missed"

    @property
    def bad(self) -> bool:
        return self.status in ("missed", "crashed")

    @property
    def value(self) -> str:
        """``measured`` for the table."""
        return "-" if self.measured is None else f"{number(self.measured)}{self.target.unit}"


def number(x: float) -> str:
    """Short and plain: ``3``, ``0.52``, ``68.4``, ``2.1e-13``."""
    if abs(x) < 1e6 and x == int(x):
        return str(int(x))
    if x and not 1e-2 <= abs(x) < 1e5:
        return f"{x:.1e}".replace("e-0", "e-").replace("e+0", "e").replace(".0e", "e")
    return f"{x:.3g}" if abs(x) < 1000 else f"{x:.0f}"


def worst(values: dict[Any, float]) -> tuple[Any, float]:
    """The entry with the largest value; a NaN is larger than anything."""
    return max(values.items(), key=lambda item: item[1] if item[1] == item[1] else float("inf"))
