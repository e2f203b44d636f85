"""The jobs of a sweep: skip what is done, show what fails, go on, sum up at the end."""

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from flashmod.experiments import console
from flashmod.experiments.interrupts import Interrupted
from flashmod.training.environment import cores
from flashmod.training.records import read_record

logger = logging.getLogger(__name__)

JOURNAL = "jobs.jsonl"
JOBS_FAILED = 3
DEFAULT_THREADS = torch.get_num_threads()  # before any job changes it
# Parts of the configuration that change no number of a run.
INCIDENTAL = ("logger", "report", "name")


@dataclass
class Entry:
    """One line of a sweep's journal; the last line of a job tells how it stands."""

    job: int
    overrides: list[str]
    status: str
    directory: str
    error: str = ""


class SweepCallback(Callback):
    """Tells :func:`finish`, in the process that launches the jobs, where the sweep is."""

    directory: Path | None = None
    report = True

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if int(os.environ.get("LOCAL_RANK", "0")) > 0:
            return  # a rank that Lightning started walks through the sweep of rank 0
        SweepCallback.directory = Path(config.hydra.sweep.dir)
        SweepCallback.report = bool(config.get("report", True))
        SweepCallback.directory.mkdir(parents=True, exist_ok=True)
        (SweepCallback.directory / JOURNAL).unlink(missing_ok=True)


def run_one(train: Callable[[Path], Any], values: Mapping[str, Any], overrides: list[str]) -> None:
    """Run ``train(directory)`` as one job of the current sweep, unless its result is there.

    An error ends this job only: it is shown at once, its traceback goes to the log file of the
    job, and :func:`finish` counts it.
    """
    place = HydraConfig.get()
    sweep, number = Path(place.sweep.dir), int(place.job.num)
    done = find_done(sweep, values)
    if done is not None:
        logger.info(
            "job %d (%s): skipped, %s holds its result",
            number,
            _join(overrides),
            console.near(done),
        )
        _note(sweep, Entry(number, overrides, "skipped", str(done)))
        return
    entry = Entry(number, overrides, "running", str(free_directory(Path(place.runtime.output_dir))))
    _note(sweep, entry)
    logger.info("job %d (%s): %s", number, _join(overrides), console.near(Path(entry.directory)))
    try:
        train(Path(entry.directory))
        entry.status = "ok"
    except Interrupted as stop:
        entry.status, entry.error = "interrupted", str(stop)
        raise
    except Exception as error:
        first = str(error).strip().splitlines()
        entry.status = "failed"
        entry.error = f"{type(error).__name__}: {first[0] if first else ''}"
        logger.exception("job %d (%s) failed: %s", number, _join(overrides), error)
    finally:
        _note(sweep, entry)


def find_done(sweep: Path, values: Mapping[str, Any]) -> Path | None:
    """The folder of ``sweep`` whose record is ``ok`` and has the same configuration.

    Folder numbers depend on the order of the jobs and say nothing.
    """
    wanted = _deciding(json.loads(json.dumps(values)))
    for path in sorted(sweep.glob("*/result.json")):
        record = read_record(path.parent)
        if record and record["status"] == "ok" and _deciding(record["config"]) == wanted:
            return path.parent
    return None


def free_directory(wanted: Path) -> Path:
    """``wanted``, or a sibling when a good result of another configuration lies there."""
    directory, count = wanted, 1
    while (record := read_record(directory)) and record["status"] == "ok":
        count += 1
        directory = wanted.with_name(f"{wanted.name}_{count}")
    return directory


def finish(*, interrupted: bool = False) -> int:
    """Print the table of the sweep that has just run, write its page, and return its exit code.

    0 without a sweep or when every job is ok, else :data:`JOBS_FAILED`.
    """
    sweep, SweepCallback.directory = SweepCallback.directory, None
    if sweep is None:
        return 0
    entries = read_journal(sweep)
    bad = [e for e in entries if e.status not in ("ok", "skipped")]
    common = set.intersection(*(set(e.overrides) for e in entries)) if len(entries) > 1 else set()
    rows = [
        (str(e.job), _join([o for o in e.overrides if o not in common]), e.status, e.error)
        for e in entries
    ]
    console.print_table(("job", "overrides", "status", "error"), rows, title=f"Sweep in {sweep}")
    print(f"  {len(entries) - len(bad)} of {len(entries)} jobs are well")
    if SweepCallback.report and entries and not interrupted:
        console.write_report(sweep)
    return JOBS_FAILED if bad else 0


def read_journal(sweep: Path) -> list[Entry]:
    """The last entry of every job, by number; a job that never ended counts as ``lost``."""
    try:
        lines = (sweep / JOURNAL).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    last = {entry.job: entry for entry in (Entry(**json.loads(line)) for line in lines)}
    for entry in last.values():
        if entry.status == "running":
            entry.status, entry.error = "lost", "the process ended without a word (memory?)"
    return [last[number] for number in sorted(last)]


def _note(sweep: Path, entry: Entry) -> None:
    # One short write in append mode, so jobs in other processes cannot tear the line.
    try:
        with (sweep / JOURNAL).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")
    except OSError as error:
        logger.warning("cannot write %s: %s", sweep / JOURNAL, error.strerror)


def threads_for(wanted: int | None, launcher: Any) -> int:
    """CPU threads of one job: ``wanted``, but no more than its share of the cores.

    With each of several jobs at a time on all cores, all of them are several times slower.
    """
    available = DEFAULT_THREADS
    if "joblib" in str(launcher.get("_target_", "")):
        jobs = launcher.get("n_jobs") or 1
        available = max(1, min(available, cores() // (cores() if jobs < 0 else jobs)))
    return min(wanted or available, available)


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in INCIDENTAL}


def _join(overrides: list[str]) -> str:
    return " ".join(overrides) or "no overrides"
