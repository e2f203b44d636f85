"""The chart sections: lines over the length where there are lengths, else bars and numbers."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from flashmod.report import blocks, charts
from flashmod.report.blocks import esc
from flashmod.report.findings import FP32_TARGET, is_fp32
from flashmod.report.records import Run
from flashmod.report.series import Point, Variants, memory_points, points

QUANTITIES = ("out", "dq", "dk", "dv")
MAX_ERROR_CHARTS = 6
REPEATS = " Repeats of one configuration are their median, with a bar from lowest to highest."


class Section(NamedTuple):
    """A heading, its HTML, and the Vega-Lite charts to draw in it by element id."""

    title: str
    body: str
    specs: dict[str, charts.Spec]


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
    series: dict[str, dict[str, list[Point]]] = defaultdict(dict)
    for name in QUANTITIES:
        for point in points(runs, f"grad_error/{name}", variants):
            series[point.series].setdefault(name, []).append(point)
    if not series:
        return None
    note = "Largest difference from dense float64 on the live batch, relative to its scale."
    lengths = {p.seq_len for by in series.values() for ps in by.values() for p in ps}
    precisions = _precisions(runs, variants)
    if len(lengths) < 2:
        rows = [
            (name, precisions.get(name, ""), {q: max(p.value for p in ps) for q, ps in by.items()})
            for name, by in series.items()
        ]
        note += f" At {min(lengths):,} tokens. The target in fp32 is under 1e-5."
        return Section("Gradient error", f"{_note(note)}{blocks.error_table(rows)}", {})
    return _error_charts(series, precisions, sorted(lengths), note)


def _error_charts(
    series: dict[str, dict[str, list[Point]]], precisions: dict[str, str],
    lengths: Sequence[int], note: str,
) -> Section:
    values = [p.value for by in series.values() for ps in by.values() for p in ps if p.value > 0]
    targets = [FP32_TARGET] if any(is_fp32(text) for text in precisions.values()) else []
    domain = (min([*values, *targets]) / 3, max([*values, *targets]) * 4)
    specs, figures = {}, []
    for number, (name, by) in enumerate(list(series.items())[:MAX_ERROR_CHARTS]):
        target = FP32_TARGET if is_fp32(precisions.get(name, "")) else None
        key = f"error{number}"
        specs[key] = charts.errors(_error_rows(by), lengths, domain, target)
        figures.append(f'<figure><h3>{esc(name)}</h3><div class="chart" id="{key}"></div></figure>')
    if len(series) > MAX_ERROR_CHARTS:
        note += f" Shown: {MAX_ERROR_CHARTS} of {len(series)} set-ups; the table has all."
    body = f'{_note(note)}<div class="grid">{"".join(figures)}</div>'
    return Section("Gradient error", body, specs)


def _error_rows(by: dict[str, list[Point]]) -> list[dict[str, Any]]:
    return [
        {"x": p.seq_len, "y": p.value, "quantity": name, "length": f"{p.seq_len:,}",
         "value": f"{p.value:.2e}", "runs": p.runs}
        for name, found in by.items() for p in found if p.value > 0
    ]


def _by_length(
    key: str, title: str, note: str, found: Sequence[Point], unit: str, log: bool
) -> Section | None:
    if not found:
        return None
    lengths = {point.seq_len for point in found}
    if len(lengths) < 2:
        note += f" At {min(lengths):,} tokens."
        return Section(title, _note(note) + blocks.bars(found, unit), {})
    if any(point.runs > 1 for point in found):
        note += REPEATS
    note += " Click a name to single it out."
    spec = charts.by_length(found, unit, unit, log)
    return Section(title, f'{_note(note)}<div class="chart" id="{key}"></div>', {key: spec})


def _precisions(runs: Sequence[Run], variants: Variants) -> dict[str, str]:
    return {
        point.series: run.precision
        for run in runs for point in points([run], "grad_error/out", variants)
    }


def _note(text: str) -> str:
    return f'<p class="soft">{esc(text)}</p>'
