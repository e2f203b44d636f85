"""Assemble the page: findings, charts, runs, environment."""

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from flashmod.report import blocks, engine
from flashmod.report.assets import SCRIPT, STYLE
from flashmod.report.blocks import esc
from flashmod.report.curves import training_curves
from flashmod.report.findings import findings
from flashmod.report.records import Records, Run
from flashmod.report.sections import Section, error_section, memory_section, speed_section
from flashmod.report.series import Variants

# No request can leave the page: everything it needs is in the file.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
)
MAX_COMMANDS = 12


def render(records: Records, source: str, made_by: str) -> str:
    """The whole page as HTML.

    Args:
        records: what was read.
        source: where the records lie, shown under the heading.
        made_by: the command that made the page, shown at its end.

    Raises:
        ImportError: altair or vl-convert-python is missing.
    """
    runs = records.measured
    variants = Variants(runs)
    sections = [
        memory_section(runs, variants),
        error_section(runs, variants),
        speed_section(runs, variants),
        _training(records.runs),
    ]
    shown = [section for section in sections if section is not None]
    specs = {key: spec for section in shown for key, spec in section.specs.items()}
    body = "".join(f"<section><h2>{esc(s.title)}</h2>{s.body}</section>" for s in shown)
    script = f"<script>{engine.bundle()}</script>" if specs else ""
    title = _title(records)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{esc(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{esc(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{esc(title)}</h1><div class="soft">{esc(_subtitle(records.runs, source))}</div>'
        f"{blocks.finding_list(findings(records))}"
        "<noscript><p>The charts need JavaScript; the table has the same figures.</p></noscript>"
        f"{body}{_runs(records)}{_environment(records.runs, made_by)}</main>"
        f'<script type="application/json" id="specs">{_json(specs)}</script>'
        f"{script}<script>{SCRIPT}</script></body></html>\n"
    )


def _title(records: Records) -> str:
    runs = records.runs
    return f"flashmod: {runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}"


def _subtitle(runs: Sequence[Run], source: str) -> str:
    """The device first, then the code, the folders and the time."""
    devices = sorted({run.device for run in runs})
    commits = sorted({run.commit for run in runs if run.commit})
    parts = [
        " and ".join(devices[:3]) + (" and others" if len(devices) > 3 else ""),
        f"commit {commits[0]}" if len(commits) == 1 else f"{len(commits)} commits",
        source,
        f"made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    ]
    return " \u00b7 ".join(part for part in parts if part and part != "0 commits")


def _training(runs: Sequence[Run]) -> Section | None:
    curves = training_curves(runs)
    if curves is None:
        return None
    limit = ""
    if curves.available > curves.shown:
        limit = f" Shown: {curves.shown} of {curves.available} runs, those with the most steps."
    note = (
        "Thin: training. Thick, with points: validation. Dashed: what knowing only how often "
        f"each byte occurs would reach; a model that has learnt anything is below it.{limit}"
    )
    body = f'<p class="soft">{esc(note)}</p><div class="chart" id="training"></div>'
    return Section("Training", body, {"training": curves.spec})


def _runs(records: Records) -> str:
    table = blocks.run_table(records)
    return f"<section><h2>Runs</h2>{table}{blocks.unreadable_list(records.unreadable)}</section>"


def _environment(runs: Sequence[Run], made_by: str) -> str:
    groups = Counter(json.dumps(run.environment, default=str) for run in runs)
    parts = []
    for text, count in groups.items():
        head = f"<h3>{count} of {len(runs)} runs</h3>" if len(groups) > 1 else ""
        parts.append(head + blocks.key_values(_environment_rows(json.loads(text))))
    commands = list(dict.fromkeys(run.command for run in runs if run.command))
    listed = "".join(f"<li><code>{esc(c)}</code></li>" for c in commands[:MAX_COMMANDS])
    more = len(commands) - MAX_COMMANDS
    if more > 0:
        listed += f"<li>and {more} more; each stands in its result.json</li>"
    made = blocks.key_values([("This page", made_by)])
    trained = f'<h3>Commands</h3><ul class="list">{listed}</ul>' if listed else ""
    return f"<section><h2>How it was made</h2>{''.join(parts)}{trained}{made}</section>"


def _environment_rows(environment: dict[str, Any]) -> list[tuple[str, Any]]:
    names = {"gpu": "GPU", "cpu": "CPU", "os": "system"}
    rows = [(names.get(k, k), v) for k, v in environment.items() if k != "versions"]
    versions = environment.get("versions")
    if isinstance(versions, dict):
        rows.append(("versions", ", ".join(f"{k} {v}" for k, v in versions.items() if v)))
    return rows


def _json(value: Any) -> str:
    """JSON that no text inside can end: ``</script>`` and ``<!--`` lose their bracket."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
