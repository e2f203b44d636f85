"""Training curves: bits per byte over steps, from ``metrics.csv``."""

import csv
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from flashmod.report.charts import COLOURS, EXTRA_COLOURS, finish, legend, rule
from flashmod.report.engine import Spec, altair
from flashmod.report.findings import unigram_entropy
from flashmod.report.records import Run

logger = logging.getLogger(__name__)

MAX_RUNS = 6
MIN_POINTS = 10
MAX_POINTS = 400
SPLITS = {"train": "train/bits_per_byte", "validation": "val/bits_per_byte"}
PALETTE = (COLOURS["flash"], COLOURS["dense"], COLOURS["sdpa"], *EXTRA_COLOURS)


class Curves(NamedTuple):
    """The chart, and how many of the runs with curves it shows."""

    spec: Spec
    shown: int
    available: int


def training_curves(runs: Sequence[Run]) -> Curves | None:
    """Curves of the runs with the most steps, or None where no run has a few points."""
    found = [(run, rows) for run in runs if len(rows := _read(run)) >= MIN_POINTS]
    if not found:
        return None
    found.sort(key=lambda pair: -_last_step(pair[1]))
    enough = [pair for pair in found if _last_step(pair[1]) >= _last_step(found[0][1]) / 5]
    shown = sorted(enough[:MAX_RUNS], key=lambda pair: pair[0].started)
    labels = run_labels([run for run, _ in shown])
    rows = [row | {"run": labels[n]} for n, (_, own) in enumerate(shown) for row in own]
    entropies = {round(e, 3) for run, _ in shown if (e := unigram_entropy(run)) is not None}
    return Curves(_chart(rows, labels, sorted(entropies)), len(shown), len(found))


def run_labels(runs: Sequence[Run]) -> list[str]:
    """The names of runs, with the folder added to names that occur twice."""
    counts = Counter(run.name for run in runs)
    return [
        run.name if counts[run.name] == 1 else f"{run.name} [{run.path.parent.name}]"
        for run in runs
    ]


def _chart(rows: list[dict[str, Any]], labels: list[str], entropies: list[float]) -> Spec:
    alt = altair()
    key = "run" if len(labels) > 1 else "split"
    names = labels if len(labels) > 1 else list(SPLITS)
    y = alt.Y("y:Q", scale=alt.Scale(zero=False), axis=alt.Axis(title="bits per byte"))
    scale = alt.Scale(domain=names, range=list(PALETTE[: len(names)]))
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("step:Q", axis=alt.Axis(title="training step", tickMinStep=1, tickCount=8)),
        y=y,
        color=alt.Color(f"{key}:N", scale=scale, legend=legend(names)),
        detail="run:N",
        tooltip=["run:N", "split:N", "step:Q", alt.Tooltip("y:Q", title="bits/byte", format=".3f")],
    )
    train = base.transform_filter("datum.split == 'train'")
    val = base.transform_filter("datum.split == 'validation'")
    ends = dict.fromkeys(f"{entropy:.2f}" for entropy in (entropies[:1] + entropies[-1:]))
    text = f"unigram entropy {' to '.join(ends)}"
    layers = [
        train.mark_line(strokeWidth=1.3, opacity=0.75),
        val.mark_line(strokeWidth=2.5),
        val.mark_point(size=45, filled=True, opacity=1),
    ]
    for entropy in entropies:
        layers += rule(entropy, text if entropy == entropies[-1] else "", y)
    return finish(alt.layer(*layers), height=320)


def _read(run: Run) -> list[dict[str, Any]]:
    """Rows of step, split and value; a broken file or cell is skipped."""
    if run.metrics_path is None:
        return []
    found: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    try:
        with run.metrics_path.open(encoding="utf-8", errors="replace", newline="") as file:
            for number, line in enumerate(csv.DictReader(file)):
                step = _number(line.get("step"))
                for split, metric in SPLITS.items():
                    value = _number(line.get(metric))
                    if value is not None:
                        at = number if step is None else step
                        found[split].append({"step": at, "split": split, "y": value})
    except (OSError, csv.Error) as error:
        logger.warning("Cannot read %s: %s", run.metrics_path, error)
    return [row for rows in found.values() for row in _thin(rows)]


def _last_step(rows: list[dict[str, Any]]) -> float:
    return max(float(row["step"]) for row in rows)


def _thin(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most ``MAX_POINTS`` rows, each the mean of its neighbours so that no spike is hidden."""
    size = -(-len(rows) // MAX_POINTS)
    groups = (rows[n : n + size] for n in range(0, len(rows), max(size, 1)))
    return [group[-1] | {"y": sum(row["y"] for row in group) / len(group)} for group in groups]


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except (TypeError, ValueError):
        return None
    return value if abs(value) < float("inf") else None
