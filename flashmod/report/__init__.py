"""Result records of runs and sweeps -> one self-contained HTML page."""

import os
import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flashmod.report import charts, page, text
from flashmod.report.findings import findings
from flashmod.report.records import NoRecordsError, read

__all__ = ["NoRecordsError", "as_text", "write"]


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
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    try:
        own = version("flashmod")
    except PackageNotFoundError:
        own = "not installed"
    return f"{command} (flashmod {own}, altair {charts.altair().__version__})"
