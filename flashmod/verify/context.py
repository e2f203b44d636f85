"""What every check is given: which backends run where, the seed, how much to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..dispatch import load
from .rows import Row, Target

TITLES = {"tiled": "torch tiles", "triton": "Triton"}


class Runner(NamedTuple):
    """A backend and where its tensors live, or why it cannot run."""

    name: str
    device: str
    missing: str = ""

    @property
    def title(self) -> str:
        return TITLES[self.name]

    @property
    def interpreted(self) -> bool:
        """Small inputs only."""
        return self.name == "triton" and self.device == "cpu"

    def not_run(self, name: str, target: Target) -> Row:
        return Row(name, target, None, f"{self.title} cannot run here: {self.missing}")


class Context(NamedTuple):
    """The surroundings of one run of the checks.

    Args:
        seed: of every random number.
        quick: a few cases of each kind instead of all.
        runners: the torch tiles and Triton, also where one cannot run.
        tick: called with (done, total) after every case, to show progress.
    """

    seed: int
    quick: bool
    runners: tuple[Runner, ...]
    tick: Callable[[int, int], None] = lambda done, total: None

    def count(self, full: int) -> int:
        """How many of ``full`` cases to run."""
        return max(2, full // 10) if self.quick else full


def find_runners() -> tuple[Runner, ...]:
    """Both backends. Without a GPU, kernels run in Triton's interpreter.

    Triton reads the variable for it while it is imported: call this before.
    """
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
    if not interpreted and not torch.cuda.is_available():
        if sys.modules.get("triton") is not None:
            why = "it was imported before TRITON_INTERPRET=1 was set: set it outside"
            return _runner("tiled", "cpu"), Runner("triton", "cpu", why)
        os.environ["TRITON_INTERPRET"] = "1"
        interpreted = True
    return _runner("tiled", "cpu"), _runner("triton", "cpu" if interpreted else "cuda")


def _runner(name: str, device: str) -> Runner:
    try:
        load(name)
    except ImportError as error:
        return Runner(name, device, f"{error} (pip install 'flashmod[triton]')")
    return Runner(name, device)
