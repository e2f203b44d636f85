"""What a configuration asks of this machine that it does not have: found before a run starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from flashmod.training.data import matching_files
from flashmod.training.environment import unused_nvidia_gpu
from flashmod.training.schema import ConfigError
from flashmod.training.settings import TrainConfig


def check(config: TrainConfig) -> None:
    """Check files and devices.

    Raises:
        ConfigError: names each key, its value and the right form.
    """
    problems = [*_checkpoint(config), *_files(config), *_device(config)]
    if problems:
        raise ConfigError(problems)


def _checkpoint(config: TrainConfig) -> Iterator[str]:
    path = config.ckpt_path
    if path is None or path in ("best", "last") or "://" in path or Path(path).is_file():
        return
    yield f"ckpt_path={path}: there is no such file; a run keeps its own in checkpoints/last.ckpt"


def _files(config: TrainConfig) -> Iterator[str]:
    if config.data.name == "files" and config.data.glob and not matching_files(config.data.glob):
        yield f"data.glob={config.data.glob}: matches no file, seen from {Path.cwd()}"


def _device(config: TrainConfig) -> Iterator[str]:
    if config.trainer.accelerator == "gpu" and not torch.accelerator.is_available():
        why = unused_nvidia_gpu() or "torch sees no GPU."
        yield f"trainer.accelerator=gpu: {why} trainer.accelerator=auto takes what there is"
