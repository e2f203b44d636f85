"""Numbers in words, and the table of runs for a terminal."""

from collections.abc import Sequence

from flashmod.report.records import Records, Run

ERRORS = ("grad_error/out", "grad_error/dq", "grad_error/dk", "grad_error/dv")


def mib(value: float) -> str:
    return f"{quantity(value)} MiB"


def quantity(value: float) -> str:
    """Three useful digits without an exponent, for sizes and factors."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"


def factor(ratio: float) -> str:
    """``12x``, ``2.2x``, ``0.45x``."""
    return f"{ratio:,.0f}x" if ratio >= 10 else f"{quantity(ratio)}x"


def scientific(value: float) -> str:
    """``3.1e-7``: two digits, no padded exponent; ``1e-5`` and ``0`` where that is exact."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def listed(counts: Sequence[int]) -> str:
    """``64, 128 and 1,024``."""
    texts = [f"{count:,}" for count in counts]
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def worst_error(run: Run) -> float | None:
    """The largest recorded gradient error of a run."""
    found = [run.summary[name] for name in ERRORS if name in run.summary]
    return max(found) if found else None


def columns(run: Run) -> dict[str, str]:
    """The cells of one run, by column title; a missing value is empty."""

    def cell(metric: str, show: object = quantity) -> str:
        value = run.summary.get(metric)
        return "" if value is None or not callable(show) else str(show(value))

    dense = cell("memory/dense_attention_peak_mib")
    guess = "memory/dense_attention_peak_mib" in run.predicted
    worst = worst_error(run)
    return {
        "name": run.name,
        "status": run.status,
        "attention": run.attention,
        "length": f"{run.seq_len:,}" if run.seq_len else "",
        "tiles": run.tiles if run.tiles != "None" else "",
        "bits/byte": cell("val/bits_per_byte", "{:.3f}".format),
        "MiB": cell("memory/attention_peak_mib"),
        "dense MiB": f"{dense}*" if dense and guess else dense,
        "error": "" if worst is None else scientific(worst),
        "tokens/s": cell("throughput/tokens_per_s", "{:,.0f}".format),
    }


def render(records: Records, sentences: Sequence[str]) -> str:
    """The findings and the runs as plain text, one run a line."""
    lines = [*sentences, ""]
    rows = [columns(run) for run in records.runs]
    if rows:
        widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
        table = [{key: key for key in widths}, *rows]
        lines += ["  ".join(row[k].ljust(widths[k]) for k in widths).rstrip() for row in table]
    if any("*" in row["dense MiB"] for row in rows):
        lines.append("* predicted from the closed form, not measured")
    for run in records.runs:
        if run.error_message:
            lines.append(f"{run.name}: {run.error_type}: {run.error_message.splitlines()[0]}")
    lines += [f"unreadable: {bad.path}: {bad.reason}" for bad in records.unreadable]
    return "\n".join(lines)
