"""The chart sections: lines over the length where there are lengths, else bars and numbers."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from flashmod.report import blocks, charts, engine
from flashmod.report.blocks import esc
from flashmod.report.findings import FP32_TARGET, is_fp32
from flashmod.report.records import Run
from flashmod.report.series import Point, Variants, memory_points, points, split
from flashmod.report.text import ERRORS, scientific

MAX_ERROR_CHARTS = 6
REPEATS = " Repeats of one configuration are their median, with a bar from lowest to highest."


class Section(NamedTuple):
    """A heading, its HTML, and the Vega-Lite charts to draw in it by element id."""

    title: str
    body: str
    specs: dict[str, engine.Spec]


def memory_section(runs: Sequence[Run], variants: Variants) -> Section | None:
    """Peak memory of attention alone, flash against dense."""
    found = memory_points(runs, variants)
    note = (
        "Peak of attention alone, forward and backward, beyond its inputs. The dense twin is the "
        "same batch padded, with softmax(QK\u1d40)V in memory."
    )
    if any(point.predicted for point in found):
        note += " Filled: measured. Hollow: predicted from the closed form."
    return _by_length("memory", "Attention memory", note, found, "MiB", log=True)


def speed_section(runs: Sequence[Run], variants: Variants) -> Section | None:
    """Real tokens per second while training."""
    devices = sorted({run.device for run in runs})
    where = f"On {devices[0]}. " if len(devices) == 1 else ""
    found = points(runs, "throughput/tokens_per_s", variants)
    note = f"{where}Real tokens only (no padding), measuring steps left out. Higher is better."
    return _by_length("speed", "Training throughput", note, found, "tokens/s", log=False)


def error_section(runs: Sequence[Run], variants: Variants) -> Section | None:
    """Errors of out, dq, dk and dv against dense float64, one small chart per series."""
    found = [point for metric in ERRORS for point in points(runs, metric, variants)]
    if not found:
        return None
    lines, alone, shared = split(found)
    note = (
        "Largest difference from dense float64 on the live batch, relative to its scale. "
        f"The target in fp32 is under {scientific(FP32_TARGET)}."
    )
    charted, specs = _error_charts(lines)
    table = blocks.error_table(_error_rows(alone)) if alone else ""
    if lines and alone:
        table = f"<h3>At one length only</h3>{table}"
    return Section("Gradient error", f"{_note(note, shared)}{charted}{table}", specs)


def _error_charts(found: Sequence[Point]) -> tuple[str, dict[str, engine.Spec]]:
    """A grid of charts on one scale; an empty text without points."""
    series = list(dict.fromkeys(point.series for point in found))
    values = [point.value for point in found if point.value > 0]
    if any(is_fp32(point.precision) for point in found):
        values.append(FP32_TARGET)
    specs, figures = {}, []
    for number, name in enumerate(series[:MAX_ERROR_CHARTS]):
        own = [point for point in found if point.series == name and point.value > 0]
        domain = (min(values) / 3, max(values) * 4)
        target = FP32_TARGET if any(is_fp32(point.precision) for point in own) else None
        specs[f"error{number}"] = charts.errors(own, domain, target)
        chart = f'<div class="chart" id="error{number}"></div>'
        figures.append(f"<figure><h3>{esc(name)}</h3>{chart}</figure>")
    more = len(series) - len(figures)
    rest = f'<p class="soft">{more} more in the table of runs.</p>' if more > 0 else ""
    return f'<div class="grid">{"".join(figures)}</div>{rest}' if figures else "", specs


def _error_rows(found: Sequence[Point]) -> list[tuple[str, str, dict[str, float]]]:
    rows: dict[tuple[str, int, str], dict[str, float]] = defaultdict(dict)
    for point in found:
        name = point.metric.split("/")[1]
        rows[point.series, point.seq_len, point.precision][name] = point.value
    return [
        (f"{series}, {length:,} tokens", precision, errors)
        for (series, length, precision), errors in rows.items()
    ]


def _by_length(
    key: str, title: str, note: str, found: Sequence[Point], unit: str, log: bool
) -> Section | None:
    if not found:
        return None
    lines, alone, shared = split(found)
    specs: dict[str, engine.Spec] = {}
    body = ""
    if lines:
        if any(point.runs > 1 for point in lines):
            note += REPEATS
        specs[key] = charts.by_length(lines, unit, log)
        body = f'<div class="chart" id="{key}"></div>'
    for length in sorted({point.seq_len for point in alone}):
        here = [point for point in alone if point.seq_len == length]
        body += f"<h3>At {length:,} tokens</h3>{blocks.bars(here, unit)}"
    return Section(title, f"{_note(note, shared)}{body}", specs)


def _note(text: str, shared: str) -> str:
    return f'<p class="soft">{esc(f"{text} Charted: {shared}." if shared else text)}</p>'
