"""A swapped model in DDP and in FSDP2, on two gloo processes, trains as one process alone."""

import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment

SCRIPT = Path(__file__).with_name("two_processes.py")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(kind, tmp_path):
    command = [sys.executable, str(SCRIPT), kind, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            env=environment(tmp_path, RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
