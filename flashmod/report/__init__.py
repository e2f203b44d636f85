"""Result records of runs and sweeps -> one self-contained HTML page."""

import os
import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flashmod.report import engine, page, text
from flashmod.report.findings import findings
from flashmod.report.records import NoRecordsError, read
from flashmod.report.sections import memory_section
from flashmod.report.series import Variants

__all__ = ["NoRecordsError", "as_text", "figure", "write"]


def write(
    dirs: Iterable[str | os.PathLike[str]], output: str | os.PathLike[str] | None = None
) -> Path:
    """Write the report of all records below ``dirs`` and return its path.

    Args:
        dirs: folders of runs or sweeps, or ``result.json`` files.
        output: the page; ``report.html`` in the first folder by default. Its folder is made.

    Raises:
        NoRecordsError: a folder does not exist or holds no record.
        ImportError: altair or vl-convert-python is missing; names the extra ``report``.
    """
    folders = [Path(folder) for folder in dirs]
    records = read(folders)
    if output is None:
        first = folders[0]
        output = (first if first.is_dir() else first.parent) / "report.html"
    target = Path(output)
    source = ", ".join(str(folder) for folder in folders)
    content = page.render(records, source, _made_by())
    return _replace(target, content)


def figure(dirs: Iterable[str | os.PathLike[str]], output: str | os.PathLike[str]) -> Path:
    """Write the chart of attention memory against length alone, as SVG, and return its path.

    Raises:
        NoRecordsError: no folder, no record, or no configuration that ran at several lengths.
        ImportError: altair or vl-convert-python is missing; names the extra ``report``.
    """
    folders = [Path(folder) for folder in dirs]
    runs = read(folders).measured
    section = memory_section(runs, Variants(runs))
    if section is None or "memory" not in section.specs:
        raise NoRecordsError(
            f"{', '.join(map(str, folders))}: the figure needs attention memory at two lengths or "
            "more, such as flashmod-train sweep=lengths leaves"
        )
    return _replace(Path(output), engine.svg(section.specs["memory"]))


def _replace(target: Path, content: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    partial.write_text(content, encoding="utf-8")
    partial.replace(target)
    return target


def as_text(dirs: Iterable[str | os.PathLike[str]]) -> str:
    """The findings and the table of runs for a terminal; needs neither altair nor a browser.

    Raises:
        NoRecordsError: a folder does not exist or holds no record.
    """
    records = read(dirs)
    return text.render(records, [f"{f.topic}: {f.text}" for f in findings(records)])


def _made_by() -> str:
    program = Path(sys.argv[0]).name
    program = "flashmod-report" if program == "report.py" else program
    command = shlex.join([program, *sys.argv[1:]])
    try:
        own = version("flashmod")
    except PackageNotFoundError:
        own = "not installed"
    return f"{command} (flashmod {own}, altair {engine.altair().__version__})"
