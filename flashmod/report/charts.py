"""Vega-Lite charts of metrics against sequence length, built with Altair."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from flashmod.report.engine import Spec, altair
from flashmod.report.series import TWIN, Point
from flashmod.report.text import scientific

COLOURS = {"flash": "#2f7ed8", "sdpa": "#1f9d76", "dense": "#e4572e", TWIN: "#f0a35e"}
EXTRA_COLOURS = ("#8e63ce", "#c2478e", "#8a9a2b", "#17a2b8", "#b08968", "#6c7a89")
DASHES = {TWIN: [5, 4]}


def by_length(points: Sequence[Point], unit: str, log: bool) -> Spec:
    """One line per series over the length; predicted points hollow, repeats with a range bar.

    A logarithmic axis cannot show values that are not positive: those are left out.
    """
    alt = altair()
    shown = [point for point in points if point.value > 0 or not log]
    series = list(dict.fromkeys(point.series for point in shown))
    scale = alt.Scale(domain=series, range=_colours(shown))
    pick = alt.selection_point(fields=["series"], bind="legend")
    kind = alt.Scale(type="log", nice=False, padding=12) if log else alt.Scale(zero=True)
    y = {"scale": kind, "axis": alt.Axis(title=unit, format=",~r", tickCount=7)}
    base = alt.Chart(alt.Data(values=[_row(point, unit) for point in shown])).encode(
        x=length_axis(shown),
        color=alt.Color("series:N", scale=scale, legend=legend(series)),
        opacity=alt.condition(pick, alt.value(1.0), alt.value(0.12)),
        tooltip=[alt.Tooltip(f"{name}:N") for name in ("series", "length", "value", "runs")],
    )
    dash = alt.Scale(domain=series, range=[_dash(shown, name) for name in series])
    line = base.mark_line(strokeWidth=2).encode(
        y=alt.Y("y:Q", **y),
        strokeDash=alt.StrokeDash("series:N", scale=dash, legend=None),
        detail="series:N",
    )
    spread = base.mark_rule(strokeWidth=1.5).encode(y=alt.Y("low:Q", **y), y2="high:Q")
    marks = (
        base.mark_point(size=64, strokeWidth=2)
        .encode(
            y=alt.Y("y:Q", **y),
            fill=alt.Fill("series:N", scale=scale, legend=None),
            fillOpacity=alt.condition("datum.predicted", alt.value(0), alt.value(1)),
        )
        .add_params(pick)
    )
    return finish(alt.layer(line, spread, marks), height=320)


def errors(points: Sequence[Point], domain: tuple[float, float], target: float | None) -> Spec:
    """Gradient errors of one series: a line each for out, dq, dk, dv, and the target line."""
    alt = altair()
    rows = [_row(point, "") | {"quantity": point.metric.split("/")[1]} for point in points]
    names = ["out", "dq", "dk", "dv"]
    y = alt.Y(
        "y:Q",
        scale=alt.Scale(type="log", domain=list(domain), nice=False),
        axis=alt.Axis(title="largest relative error", format="~e", values=_decades(*domain)),
    )
    colour = alt.Color(
        "quantity:N",
        legend=legend(names),
        scale=alt.Scale(domain=names, range=["#6c7a89", "#2f7ed8", "#e4572e", "#1f9d76"]),
    )
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=length_axis(points),
        y=y,
        color=colour,
        tooltip=[alt.Tooltip(f"{name}:N") for name in ("quantity", "length", "value", "runs")],
    )
    layers = [base.mark_line(strokeWidth=2), base.mark_point(size=50, filled=True, opacity=1)]
    if target is not None:
        layers += rule(target, f"target {scientific(target)} (fp32)", y)
    return finish(alt.layer(*layers), height=260)


def rule(value: float, text: str, y: Any) -> list[Any]:
    """A dashed horizontal line with its label above it, at the right edge."""
    alt = altair()
    base = alt.Chart(alt.Data(values=[{"y": value, "text": text}])).encode(y=y)
    label = base.mark_text(align="right", dy=-7, dx=-4).encode(text="text:N", x=alt.value("width"))
    return [base.mark_rule(strokeDash=[6, 4]), label]


def length_axis(points: Sequence[Point]) -> Any:
    """Logarithmic, with a tick at every length that was run."""
    alt = altair()
    lengths = sorted({point.seq_len for point in points})
    axis = alt.Axis(
        title="sequence length, tokens", values=lengths, format=",d", labelOverlap="greedy"
    )
    return alt.X("x:Q", scale=alt.Scale(type="log", base=2, nice=False, padding=16), axis=axis)


def legend(labels: Sequence[str]) -> Any:
    """Above the plot; long labels one under the other so that a phone shows them whole."""
    columns = 1 if max(map(len, labels), default=0) > 18 else 4
    return altair().Legend(orient="top", title=None, columns=columns, labelLimit=0)


def finish(chart: Any, height: int) -> Spec:
    spec: Spec = chart.properties(width="container", height=height).to_dict()
    spec.pop("$schema", None)
    spec.pop("config", None)
    return spec


def _decades(low: float, high: float) -> list[float]:
    """The powers of ten within a range."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    return [float(f"1e{n}") for n in range(first, last + 1)]


def _row(point: Point, unit: str) -> dict[str, Any]:
    how = " (predicted)" if point.predicted else ""
    spread = f", {point.low:,.4g} to {point.high:,.4g}" if point.runs > 1 else ""
    return {
        "x": point.seq_len,
        "y": point.value,
        "low": point.low,
        "high": point.high,
        "series": point.series,
        "predicted": point.predicted,
        "length": f"{point.seq_len:,}",
        "value": f"{point.value:,.4g} {unit}{how}",
        "runs": f"{point.runs}{spread}",
    }


def _colours(points: Sequence[Point]) -> list[str]:
    """The kind's own colour for its first series, further colours for the next ones."""
    kinds = {point.series: point.kind for point in points}
    free = itertools.cycle(EXTRA_COLOURS)
    result: list[str] = []
    for kind in kinds.values():
        own = COLOURS.get(kind)
        result.append(own if own and own not in result else next(free))
    return result


def _dash(points: Sequence[Point], name: str) -> list[int]:
    kind = next(point.kind for point in points if point.series == name)
    return DASHES.get(kind, [1, 0])
