"""Small pieces of HTML. Every text that reaches the page is escaped here."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

from flashmod.report.findings import FP32_TARGET, Finding, is_fp32
from flashmod.report.records import Records, Run, Unreadable
from flashmod.report.series import Point
from flashmod.report.text import columns, quantity, scientific

NUMERIC = {"length", "bits/byte", "MiB", "dense MiB", "step MiB", "error", "tokens/s"}
HEADINGS = {
    "length": "length, tokens",
    "bits/byte": "validation bits/byte",
    "MiB": "attention MiB",
    "dense MiB": "dense MiB",
    "step MiB": "whole step MiB",
    "error": "worst gradient error",
}


def esc(text: Any) -> str:
    return html.escape(str(text), quote=True)


def finding_list(found: Sequence[Finding]) -> str:
    rows = (
        f'<li class="{esc(f.tone)}"><strong>{esc(f.topic)}</strong><span>{esc(f.text)}</span></li>'
        for f in found
    )
    return f'<ul class="findings">{"".join(rows)}</ul>'


def bars(points: Sequence[Point], unit: str) -> str:
    """One bar per point, predicted ones hollow: for a single length, where lines say nothing."""
    top = max(point.value for point in points) or 1.0
    if len(points) == 1:
        return f"<p>{esc(points[0].series)}: <strong>{_amount(points[0], unit)}</strong></p>"
    rows = []
    for point in points:
        style = f"width:{max(100 * point.value / top, 0.5):.1f}%"
        hollow = " hollow" if point.predicted else ""
        rows.append(
            f'<div class="bar"><span class="label">{esc(point.series)}</span>'
            f'<span class="track"><i class="{esc(point.kind.replace(" ", "-"))}{hollow}" '
            f'style="{style}"></i></span>'
            f'<span class="value">{_amount(point, unit)}</span></div>'
        )
    return "".join(rows)


def _amount(point: Point, unit: str) -> str:
    low, high = quantity(point.low), quantity(point.high)
    spread = f", {low} to {high}" if low != high else ""
    repeats = f" ({point.runs} runs{spread})" if point.runs > 1 else ""
    how = " (predicted)" if point.predicted else ""
    return esc(f"{quantity(point.value)} {unit}{how}{repeats}")


def error_table(rows: Sequence[tuple[str, str, dict[str, float]]]) -> str:
    """Errors of out, dq, dk, dv by series, for a single length; above the target in fp32 red."""
    names = ("out", "dq", "dk", "dv")
    lines = []
    for series, precision, errors in rows:
        cells = []
        for name in names:
            value = errors.get(name)
            bad = value is not None and is_fp32(precision) and value >= FP32_TARGET
            text = "" if value is None else scientific(value)
            cells.append(f'<td class="number{" over" if bad else ""}">{text}</td>')
        lines.append(f"<tr><td>{esc(series)}</td><td>{esc(precision)}</td>{''.join(cells)}</tr>")
    heads = "".join(f'<th class="number">{name}</th>' for name in names)
    return (
        f'<div class="scroll"><table><thead><tr><th>attention</th><th>precision</th>{heads}</tr>'
        f"</thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def run_table(records: Records) -> str:
    """The sortable table of all runs, under a note.

    Columns without any value are left out; a device or commit common to all is in the note.
    """
    if not records.runs:
        return ""
    rows = [(run, _cells(run)) for run in records.runs]
    values = {key: {cells[key][0] for _, cells in rows} for key in rows[0][1]}
    common = [k for k in ("device", "commit") if len(values[k]) == 1 and values[k] != {""}]
    keys = [key for key, found in values.items() if found != {""} and key not in common]
    note = "Click a heading to sort. Gradient error: the largest of out, dq, dk, dv."
    if any("*" in text for text in values["dense MiB"]):
        note += " *: predicted from the closed form, not measured."
    for key in common:
        note += f" {key.capitalize()} of all: {rows[0][1][key][0]}."
    heads = "".join(
        f'<th{_number_class(key)}><button type="button">{esc(HEADINGS.get(key, key))}</button></th>'
        for key in keys
    )
    body = "".join(_run_row(run, cells, keys) for run, cells in rows)
    return (
        f'<p class="soft">{esc(note)}</p><div class="scroll"><table class="sortable">'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def unreadable_list(unreadable: Iterable[Unreadable]) -> str:
    items = [f"<li><code>{esc(u.path)}</code>: {esc(u.reason)}</li>" for u in unreadable]
    if not items:
        return ""
    return f'<h3>Unreadable records</h3><ul class="list">{"".join(items)}</ul>'


def key_values(rows: Iterable[tuple[str, Any]]) -> str:
    cells = (f"<dt>{esc(key)}</dt><dd>{esc(value)}</dd>" for key, value in rows if value)
    return f"<dl>{''.join(cells)}</dl>"


def _cells(run: Run) -> dict[str, tuple[str, Any]]:
    """Text and sort value of each cell."""
    cells: dict[str, tuple[str, Any]] = {key: (text, text) for key, text in columns(run).items()}
    raw = {
        "length": run.seq_len,
        "error": cells["error"][0],
        "bits/byte": run.summary.get("val/bits_per_byte"),
        "MiB": run.summary.get("memory/attention_peak_mib"),
        "dense MiB": run.summary.get("memory/dense_attention_peak_mib"),
        "tokens/s": run.summary.get("throughput/tokens_per_s"),
    }
    cells.update({key: (cells[key][0], value) for key, value in raw.items()})
    step = run.summary.get("memory/step_peak_mib")
    cells["step MiB"] = ("" if step is None else quantity(step), step)
    cells["device"] = (run.device, run.device)
    cells["commit"] = (run.commit, run.commit)
    cells["started"] = (run.started[:16].replace("T", " "), run.started)
    return cells


def _run_row(run: Run, cells: dict[str, tuple[str, Any]], keys: Sequence[str]) -> str:
    line = []
    for key in keys:
        text, value = cells[key]
        inner = esc(text)
        if key == "name":
            inner = inner.replace(",", ",<wbr>")
        if key == "device":
            inner = f'<span class="short" title="{inner}">{inner}</span>'
        if key == "status":
            inner = f'<span class="badge {_css_word(run.status)}">{inner}</span>'
        if key == "name" and run.error_message:
            inner += _error(run)
        sort = "" if value is None else esc(value)
        line.append(f'<td{_number_class(key)} data-sort="{sort}">{inner}</td>')
    return f"<tr>{''.join(line)}</tr>"


def _error(run: Run) -> str:
    head = f"{run.error_type}: {run.error_message}" if run.error_type else run.error_message
    if not run.traceback:
        return f'<div class="error">{esc(head)}</div>'
    return (
        f'<details class="error"><summary>{esc(head)}</summary><pre>{esc(run.traceback)}</pre>'
        "</details>"
    )


def _number_class(key: str) -> str:
    return ' class="number"' if key in NUMERIC else ""


def _css_word(status: str) -> str:
    return status if status in ("ok", "running", "failed", "interrupted") else "other"
