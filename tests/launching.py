"""Run flashmod-train as a user does: another process, an empty folder, no account."""

import json
import os
import subprocess
import sys
from pathlib import Path

COMMAND = (sys.executable, "-m", "flashmod.experiments.train")


def environment(directory: Path, **variables: str) -> dict[str, str]:
    """This process's environment without any W&B setting, home and settings in ``directory``."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "NETRC"))}
    own = {"HOME": str(directory), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**inherited, **own, **variables}


def launch(
    directory: Path, *arguments: str, timeout: float = 240, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run to the end in ``directory``, without a terminal."""
    return subprocess.run(
        [*COMMAND, *arguments],
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
