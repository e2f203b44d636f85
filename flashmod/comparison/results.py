"""What :func:`flashmod.compare` found, as a table and as a record."""

from __future__ import annotations

import math
import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..integrations.torch_nn import SwapReport
from ..training.records import RunRecord
from .batch import Padding

SHOWN = 12  # gradients in the table; the worst come first
_TITLES = ("", "unswapped", "swapped", "")


class Sides(NamedTuple):
    """A number of the unswapped model and of the swapped one; None where it was not measured."""

    before: float | None
    after: float | None


class Setting(NamedTuple):
    """What was compared, and how."""

    model: str
    parameters: int
    training: bool
    backward: bool
    dtype: str
    device: str
    seed: int
    repeats: int

    def __str__(self) -> str:
        mode = "train" if self.training else "eval"
        what = "forward and backward" if self.backward else "forward only"
        size = f"{self.parameters:,} parameters"
        return f"{self.model}, {size}, {mode} mode, {what}, {self.dtype} on {self.device}"


@dataclass(frozen=True)
class Comparison:
    """A model before and after the swap, on one batch; ``str()`` is the table.

    Attributes:
        setting: what was compared, and how.
        swap: the report of the swap.
        routed: calls of ``F.scaled_dot_product_attention`` in a step that ran as flash attention.
        truth: what errors are relative to: ``float64`` or, where that was not possible,
            ``unswapped``; a note says why.
        outputs, parameters: error of each output, and of each parameter's gradient.
        memory: peak of a step, in MiB, beyond what was allocated before it.
        seconds: median time of a step.
        attention: metrics of one attention call on each side, by the names of
            :mod:`flashmod.measure`; empty where none was seen.
        predicted: names in ``attention`` that come from a closed form.
        padding: what the batch says of its padding.
        notes: what a reader must know beside the numbers.
    """

    setting: Setting
    swap: SwapReport
    routed: int
    truth: str
    outputs: dict[str, Sides]
    parameters: dict[str, Sides]
    memory: Sides
    seconds: Sides
    attention: tuple[dict[str, float], dict[str, float]]
    predicted: frozenset[str] = frozenset()
    padding: Padding | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def output_error(self) -> Sides:
        """The largest error of an output."""
        return _worst(self.outputs)

    @property
    def gradient_error(self) -> Sides:
        """The largest error of a parameter's gradient."""
        return _worst(self.parameters)

    @property
    def median_error(self) -> Sides:
        """The median over the parameters of their gradients' errors."""
        columns = zip(*self.parameters.values(), strict=True) if self.parameters else ((), ())
        known = ([e for e in column if e is not None] for column in columns)
        return Sides(*(statistics.median(errors) if errors else None for errors in known))

    def __str__(self) -> str:
        lines = [f"flashmod.compare: {self.setting}", self._swapped(), "", *_aligned(self._rows())]
        if self.padding is not None:
            p = self.padding
            share = f"{p.share:.0%} of {p.positions:,} positions"
            lines += ["", f"padding: {share} ({p.how})"]
        if self.parameters:
            lines += ["", *_aligned(self._gradients())]
            left = len(self.parameters) - SHOWN
            lines += [f"  and {left} more with smaller errors: .parameters"] if left > 0 else []
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Write ``result.json`` into ``directory``, and the unswapped side into ``unswapped/``.

        ``flashmod-report DIRECTORY`` shows both.

        Raises:
            OSError: it cannot be written.
        """
        sides = (("unswapped", Path(directory) / "unswapped"), ("flash", Path(directory)))
        for number, (kind, folder) in enumerate(sides):
            record = RunRecord(
                folder,
                name=f"{self.setting.model}, {'swapped' if number else kind}",
                command=list(sys.argv),
                overrides=[],
                config=self._config(kind),
                seed=self.setting.seed,
                task="compare",
            )
            record.content["predicted"] = sorted(self.predicted) if number else []
            record.content["comparison"] = self._details() if number else {}
            record.update(summary=self._summary(number))
            record.finish("ok")
        return record.path

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [_TITLES, _error_row("output error", self.output_error, self.truth)]
        if self.parameters:
            rows.append(_error_row("gradient error, largest", self.gradient_error, self.truth))
            rows.append(_error_row("gradient error, median", self.median_error, self.truth))
        rows.append(_row("peak memory of a step", self.memory, _mib))
        rows.append(_row(f"median step (of {self.setting.repeats})", self.seconds, _duration))
        for key, title in (("attention", "attention alone"), ("dense_attention", "  if dense")):
            name = f"memory/{key}_peak_mib"
            row = _row(title, Sides(*(found.get(name) for found in self.attention)), _mib)
            rows += [row] if row[1] + row[2] != "--" else []
        return rows

    def _gradients(self) -> list[tuple[str, ...]]:
        order = sorted(self.parameters, key=lambda n: -_key(self.parameters[n].after))
        rows = [(n, *map(_scientific, self.parameters[n])) for n in order[:SHOWN]]
        return [("gradient of", "unswapped", "swapped"), *rows]

    def _swapped(self) -> str:
        if self.swap.swapped or not self.routed:
            return str(self.swap)
        return f"{self.routed} calls of F.scaled_dot_product_attention a step routed to flash"

    def _config(self, kind: str) -> dict[str, Any]:
        short = {"float32": "32", "float64": "64", "float16": "16", "bfloat16": "bf16"}
        precision = f"{short.get(self.setting.dtype, self.setting.dtype)}-true"
        return {
            "attention": {"kind": kind},
            "model": {"name": self.setting.model, "parameters": self.setting.parameters},
            "trainer": {"precision": precision, "accelerator": self.setting.device.split(":")[0]},
            "data": {"name": "one batch"},
        }

    def _summary(self, side: int) -> dict[str, float]:
        own = {
            "memory/step_peak_mib": self.memory[side],
            "compare/step_s": self.seconds[side],
            "compare/output_error": self.output_error[side],
            "compare/gradient_error": self.gradient_error[side],
            "compare/gradient_error_median": self.median_error[side],
            "compare/padding_share": self.padding.share if self.padding else None,
        }
        shared = {k: v for k, v in self.attention[1].items() if k.startswith("data/")}
        seconds, tokens = self.seconds[side], shared.get("data/tokens")
        if seconds and tokens:
            own["throughput/tokens_per_s"] = tokens / seconds
        found = {**own, **shared, **self.attention[side]}
        return {name: value for name, value in found.items() if value is not None}

    def _details(self) -> dict[str, Any]:
        return {
            "truth": self.truth,
            "swapped": [layer.name for layer in self.swap.swapped],
            "skipped": [layer.name for layer in self.swap.skipped],
            "routed": self.routed,
            "outputs": {name: sides._asdict() for name, sides in self.outputs.items()},
            "parameters": {name: sides._asdict() for name, sides in self.parameters.items()},
            "padding": self.padding and self.padding.how,
            "notes": self.notes,
        }


def _worst(errors: dict[str, Sides]) -> Sides:
    columns = zip(*errors.values(), strict=True) if errors else ((), ())
    return Sides(*(max(filter(_known, column), key=_key, default=None) for column in columns))


def _known(value: float | None) -> bool:
    return value is not None


def _key(value: float | None) -> float:
    """NaN is the worst of all."""
    return -1.0 if value is None else math.inf if math.isnan(value) else value


def _row(title: str, sides: Sides, show: Any) -> tuple[str, ...]:
    before, after = sides
    ratio = f"{after / before:.2f}x" if before and after is not None else ""
    return title, show(before), show(after), ratio


def _error_row(title: str, sides: Sides, truth: str) -> tuple[str, ...]:
    return title, _scientific(sides.before), _scientific(sides.after), f"against {truth}"


def _scientific(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def _mib(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} MiB" if value < 1000 else f"{value:,.0f} MiB"


def _duration(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *rest = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
