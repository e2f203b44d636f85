"""What a reader can decide, in sentences whose numbers all come from the records."""

from collections import Counter
from collections.abc import Sequence
from textwrap import shorten
from typing import NamedTuple

from flashmod.report.compare import growths, pairs
from flashmod.report.records import Records, Run
from flashmod.report.series import Point, Variants, memory_points, points
from flashmod.report.text import ERRORS, factor, listed, mib, scientific, worst_error
from flashmod.report.values import finite

FP32_TARGET = 1e-5
MAX_DEVICES = MAX_DATA_SETS = 3
FEW_STEPS = 50
SWEEP_HINT = "flashmod-train sweep=lengths measures it"


class Finding(NamedTuple):
    """``tone`` is good, bad, plain or missing (not enough data)."""

    tone: str
    topic: str
    text: str


def findings(records: Records) -> list[Finding]:
    """Memory, growth, gradient error, speed, training result, then the state of the runs."""
    runs = records.measured
    variants = Variants(runs)
    memory = memory_points(runs, variants)
    devices = sorted({run.device for run in runs})[:MAX_DEVICES]
    speeds = [_speed([r for r in runs if r.device == device], variants) for device in devices]
    found = [_memory(memory), _growth(memory), *_errors(runs), *speeds, *_quality(runs)]
    return [*(found if runs else []), _states(records)]


def is_fp32(precision: str) -> bool:
    return "32" in precision


def _memory(memory: Sequence[Point]) -> Finding:
    measured, predicted = pairs(memory), pairs(memory, predicted=True)
    if measured and predicted and predicted[-1][0].seq_len <= measured[-1][0].seq_len:
        predicted = []
    shown = [found[-1] for found in (measured, predicted) if found]
    if not shown:
        return Finding(
            "missing",
            "Memory",
            "Not enough data: no length has both a flash and a "
            "dense figure, so the two cannot be compared.",
        )
    flash, dense = shown[0]
    tone = "good" if dense.value > flash.value else "bad"
    shorter = listed([a.seq_len for a, b in measured[:-1] if a.value > b.value])
    but = f" At {shorter} tokens flash needs more." if shorter else ""
    texts = [_memory_text(*pair) for pair in shown]
    return Finding(tone, "Memory", f"{' '.join(texts)}{but}{_where(flash)}")


def _memory_text(flash: Point, dense: Point) -> str:
    how = "predicted from the closed form, not measured" if dense.predicted else "measured"
    low, high = sorted((flash.value, dense.value))
    side = "less" if dense.value >= flash.value else "more"
    change = f": {factor(high / low)} {side}" if low > 0 else ""
    return (
        f"At {flash.seq_len:,} tokens flash attention peaks at {mib(flash.value)} where dense "
        f"needs {mib(dense.value)} ({how}){change}."
    )


def _growth(memory: Sequence[Point]) -> Finding:
    rates = growths(memory)
    if not rates:
        return Finding(
            "missing",
            "Growth",
            "Not enough data: one length only, so how memory grows "
            f"with the length cannot be told; {SWEEP_HINT}.",
        )
    parts = [
        f"{rate.per_doubling:.1f}x for {rate.kind}{' (predicted)' if rate.predicted else ''}"
        for rate in rates
    ]
    first, last = rates[0].first, rates[0].last
    return Finding(
        "plain",
        "Growth",
        f"Per doubling of the length (from {first.seq_len:,} to {last.seq_len:,} tokens) the "
        f"memory of attention grows {' and '.join(parts)}. Linear is 2x, quadratic "
        f"4x.{_where(first)}",
    )


def _errors(runs: Sequence[Run]) -> list[Finding]:
    flash = [run for run in runs if run.attention == "flash" and worst_error(run) is not None]
    if not flash:
        return [
            Finding(
                "missing",
                "Gradients",
                "Not enough data: no finished flash run recorded its gradient error.",
            )
        ]
    found = []
    for precision in sorted({run.precision for run in flash}):
        group = [run for run in flash if run.precision == precision]
        worst = max(group, key=lambda run: worst_error(run) or 0.0)
        value = worst_error(worst) or 0.0
        name = max(ERRORS, key=lambda metric: worst.summary.get(metric, -1.0)).split("/")[1]
        coverage = min(run.summary.get("grad_error/coverage", 1.0) for run in group)
        checked = "" if coverage >= 1 else f" At least {coverage:.0%} of the rows were checked."
        tone, verdict = "plain", f" in precision {precision}"
        if is_fp32(precision):
            tone = "good" if value < FP32_TARGET else "bad"
            side = "under" if tone == "good" else "NOT under"
            verdict = f" in fp32, {side} the target of {scientific(FP32_TARGET)}"
        length = f" at {worst.seq_len:,} tokens" if worst.seq_len else ""
        found.append(
            Finding(
                tone,
                "Gradients",
                f"The largest error of flash against dense float64 is {scientific(value)} ({name}"
                f"{length}){verdict}.{checked}",
            )
        )
    return found


def _speed(runs: Sequence[Run], variants: Variants) -> Finding:
    speed = points(runs, "throughput/tokens_per_s", variants)
    device = runs[0].device
    both = pairs(speed, ("dense",))
    if both:
        flash, dense = both[-1]
        change = f": {factor(flash.value / dense.value)} the speed" if dense.value else ""
        shorter = listed([a.seq_len for a, b in both[:-1] if a.value < b.value])
        but = f" At {shorter} tokens dense is faster." if shorter else ""
        once = " (one run each)" if flash.runs == dense.runs == 1 else ""
        return Finding(
            "plain",
            "Speed",
            f"At {flash.seq_len:,} tokens training runs at {flash.value:,.0f} tokens/s with flash "
            f"and {dense.value:,.0f} with dense{change}{once}, on {device}."
            f"{but}{_where(flash, known=device)}",
        )
    flash_only = [point for point in speed if point.kind == "flash"]
    if not flash_only:
        return Finding(
            "missing", "Speed", "Not enough data: no finished flash run recorded its throughput."
        )
    longest = max(flash_only, key=lambda point: point.seq_len)
    return Finding(
        "plain",
        "Speed",
        f"Flash trains at {longest.value:,.0f} tokens/s at {longest.seq_len:,} tokens, on {device};"
        " no dense run of the same set-up is here to compare with.",
    )


def _quality(runs: Sequence[Run]) -> list[Finding]:
    """The best validation result on each data set; a few steps are not blamed for a bad one."""
    by_data: dict[str, list[Run]] = {}
    for run in runs:
        if "val/bits_per_byte" in run.summary:
            by_data.setdefault(str(run.data.get("name") or "the data"), []).append(run)
    found = []
    for name, group in sorted(by_data.items())[:MAX_DATA_SETS]:
        best = min(group, key=lambda run: run.summary["val/bits_per_byte"])
        bits, entropy = best.summary["val/bits_per_byte"], unigram_entropy(best)
        steps = finite(best.config.get("trainer.max_steps"))
        tone, side = "plain", "; the unigram entropy was not recorded, so no baseline"
        if entropy is not None:
            below = bits < entropy
            tone = "good" if below else "plain" if steps and steps < FEW_STEPS else "bad"
            side = f", {'below' if below else 'NOT below'} the unigram entropy, {entropy:.2f}"
        after = f" after {steps:,.0f} steps" if steps and steps > 0 else ""
        many = f" (best of {len(group)} runs)" if len(group) > 1 else ""
        text = f"Validation on {name} reaches {bits:.2f} bits per byte{after}{many}{side}."
        found.append(Finding(tone, "Learning", text))
    return found


def unigram_entropy(run: Run) -> float | None:
    """Bits per byte of the byte frequencies alone, from the metrics or the data's record."""
    return finite(run.summary.get("data/unigram_entropy", run.data.get("unigram_entropy")))


def _states(records: Records) -> Finding:
    counts = Counter(run.status for run in records.runs)
    parts = [f"{count} {status}" for status, count in sorted(counts.items()) if status != "ok"]
    if records.unreadable:
        parts.append(f"{len(records.unreadable)} unreadable")
    total = len(records.runs) + len(records.unreadable)
    if not parts:
        return Finding("plain", "Runs", f"All {total} finished." if total > 1 else "It finished.")
    return Finding(
        "bad" if records.unreadable or counts["failed"] else "plain",
        "Runs",
        f"{counts['ok']} of {total} finished; {', '.join(parts)} (left out of all figures here, "
        f"listed below).{_first_failure(records.runs)}",
    )


def _first_failure(runs: Sequence[Run]) -> str:
    failed = [run for run in runs if run.status == "failed" and run.error_message]
    if not failed:
        return ""
    first = failed[0]
    message = shorten(f"{first.error_type}: {first.error_message}", 200, placeholder=" ...")
    return f" First failure, in {first.name}: {message}"


def _where(point: Point, known: str = "") -> str:
    """What tells the point's set-up from others, less what the sentence already says."""
    parts = [part for part in (point.tiles, point.workload.replace(known, "").strip(", ")) if part]
    return f" Set-up: {', '.join(parts)}." if parts else ""
