"""What the console shows: our own lines, and not the notices of the libraries underneath."""

import logging
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from flashmod.experiments.overrides import explain
from flashmod.training.schema import ConfigError

# What Lightning, W&B and torch say on every run of ours and nobody can act on.
UNHELPFUL = (
    r".*LeafSpec.*",
    r".*litlogger.*",
    r".*does not have many workers.*",
    r".*GPU available but not used.*",
    r".*anonymous.*",
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
    r".*is smaller than the logging interval.*",
    r".*The dirpath has changed from.*",
)
REPORT_SECONDS = 120
QUIET_LOGGERS = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "wandb")


class ConsoleFormatter(logging.Formatter):
    """One line a message; tracebacks stay in the log file of the run."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return level + record.getMessage()


def quiet_libraries() -> None:
    """Filter the notices of Lightning and W&B. For a command line of ours, never for a library."""
    os.environ.setdefault("WANDB_SILENT", "true")
    logging.raiseExceptions = False  # a full disk under a log file is told once, by the record
    for message in UNHELPFUL:
        warnings.filterwarnings("ignore", message=message)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def say(text: str) -> None:
    """Print a line beside the results, on stderr."""
    print(text, file=sys.stderr, flush=True)


def report_failure(program: str, error: Exception) -> int:
    """Tell ``error`` and return the exit code it stands for."""
    lines = error.problems if isinstance(error, ConfigError) else explain(error)
    if lines:
        count = "a problem" if len(lines) == 1 else f"{len(lines)} problems"
        say(f"{program}: {count} in the configuration, nothing was started")
        for line in lines:
            say(f"  {line}")
        return 2
    say(f"{program}: {type(error).__name__}: {error}")
    return 1


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """A table: drawn on a terminal, plain aligned text elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title or None, title_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    if title:
        print(title)
    for row in (columns, *rows) if any(columns) else rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  " + "  ".join(cells).rstrip())
    sys.stdout.flush()


def write_report(directory: Path) -> None:
    """Write the report page of ``directory`` and say where; a failure is told, not raised.

    In a process of its own: the chart compiler reserves much address space and, where that is
    limited, ends its process without an exception.
    """
    command = [sys.executable, "-m", "flashmod.experiments.report", str(directory)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=REPORT_SECONDS, check=False
        )
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        why = f"it was ended by a signal ({-done.returncode})" if done.returncode < 0 else why
    except subprocess.TimeoutExpired:
        done, why = None, f"it took longer than {REPORT_SECONDS} s"
    if done is None or done.returncode:
        say(f"warning: no report page: {why}. Try {report_command()} {near(directory)}")
        return
    page = Path(done.stdout.strip().splitlines()[-1])
    print(f"  report: {near(page)}    (again: {report_command()} {near(directory)})", flush=True)


def report_command() -> str:
    """``flashmod-report`` as it can be typed here: with its folder where PATH does not hold it."""
    beside = Path(sys.argv[0]).with_name("flashmod-report")
    lost = shutil.which(beside.name) is None and beside.is_file()
    return near(beside) if lost else beside.name


def show_summary(rows: Sequence[tuple[str, str]], directory: Path, *, report: bool) -> None:
    """Print how a run ended, where its files lie and how to look at them."""
    print_table(("", ""), [*rows, ("files", near(directory))], title="Run finished")
    if report:
        write_report(directory)


def near(path: Path) -> str:
    """``path`` as seen from the working directory, if it lies below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
