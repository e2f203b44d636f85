"""Run flashmod-train as a user does: another process, an empty folder, no account."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "flashmod.experiments.train")


def environment(directory: Path, **variables: str) -> dict[str, str]:
    """This process's environment without any W&B setting, home and settings in ``directory``."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "NETRC"))}
    own = {"HOME": str(directory), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**inherited, **own, **variables}


def launch(
    directory: Path,
    *arguments: str,
    command: Sequence[str] = COMMAND,
    timeout: float = 240,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run to the end in ``directory``, without a terminal."""
    return subprocess.run(
        [*command, *arguments],
        cwd=directory,
        env=environment(directory, **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def record(directory: Path) -> dict:
    return json.loads((directory / "result.json").read_text(encoding="utf-8"))


def only_run(directory: Path) -> Path:
    (run,) = (directory / "runs" / "train").iterdir()
    return run


def wandb_runs(directory: Path) -> list[Path]:
    """Folders of offline runs that hold a run's file."""
    return sorted(p.parent for p in (directory / "runs").glob("wandb/offline-run-*/run-*.wandb"))


def wandb_records(run: Path) -> list[Any]:
    """The records of a run's file: a log of 32 KiB blocks, as LevelDB writes it."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = next(run.glob("run-*.wandb")).read_bytes()
    records, partial, at = [], b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        partial += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(partial))
            partial = b""
    return records
