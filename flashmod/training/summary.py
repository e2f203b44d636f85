"""A finished run in a few lines, from its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = tuple[str, str]


def summary_rows(record: Mapping[str, Any]) -> list[Row]:
    """Label and text of each line, the device first; what was not measured is left out.

    Args:
        record: the content of ``result.json``.
    """
    summary = {k: v for k, v in record["summary"].items() if v is not None}
    predicted = set(record["predicted"])
    rows = [
        ("device", _device(record)),
        ("bits per byte", _bits(summary)),
        ("tokens/s", _number(summary, "throughput/tokens_per_s", "{:,.0f}")),
        (f"padding {_padding(record)}", _number(summary, "throughput/padding_saved", "{:.0%}")),
        ("attention peak", _peaks(record, summary, predicted, "attention_peak_mib")),
        ("step peak", _peaks(record, summary, predicted, "step_peak_mib")),
        ("error", _errors(summary)),
    ]
    return [(label, text) for label, text in rows if text]


def _padding(record: Mapping[str, Any]) -> str:
    """Flash attention leaves padding out; the baselines pad the batch and compute it."""
    kind = record["config"].get("attention", {}).get("kind", "flash")
    return "saved" if kind == "flash" else "computed"


def _device(record: Mapping[str, Any]) -> str:
    seen = record["environment"]
    accelerator = record["config"].get("trainer", {}).get("accelerator")
    if seen["gpu"] and accelerator != "cpu":
        return f"{seen['gpu']} (driver {seen['driver']})"
    threads = seen["threads"]
    return f"CPU: {seen['cpu']}, {threads} thread{'s' * (threads != 1)}"


def _bits(summary: Mapping[str, float]) -> str:
    name, bits = "validation", summary.get("val/bits_per_byte")
    if bits is None:
        name, bits = "training", summary.get("train/bits_per_byte")
    entropy = summary.get("data/unigram_entropy")
    if bits is None or entropy is None:
        return ""
    return f"{bits:.3f} {name}, beside {entropy:.3f} unigram entropy of the same data"


def _number(summary: Mapping[str, float], name: str, form: str) -> str:
    return form.format(summary[name]) if name in summary else ""


def _peaks(
    record: Mapping[str, Any], summary: Mapping[str, float], predicted: set[str], what: str
) -> str:
    """Both peaks of a measurement, the run's own attention first; dense is its own twin."""
    kind = record["config"].get("attention", {}).get("kind", "flash")
    parts = []
    found = {kind: f"memory/{what}"}
    found.setdefault("dense", f"memory/dense_{what}")
    for label, name in found.items():
        if name in summary:
            mark = " (predicted)" if name in predicted else ""
            parts.append(f"{summary[name]:,.2f} MiB {label}{mark}")
    return ", ".join(parts)


def _errors(summary: Mapping[str, float]) -> str:
    names = [n for n in ("out", "dq", "dk", "dv") if f"grad_error/{n}" in summary]
    if not names:
        return ""
    values = ", ".join(f"{name} {summary[f'grad_error/{name}']:.1e}" for name in names)
    coverage = summary.get("grad_error/coverage", 1.0)
    rows = "" if coverage >= 1.0 else f", on {coverage:.1%} of the query rows"
    return f"{values} against dense float64{rows}"
