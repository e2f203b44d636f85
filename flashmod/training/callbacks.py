"""Callbacks for anyone's LightningModule: throughput, non-finite losses, best weights.

They know nothing of flashmod's own model or data, and belong to the Lightning that was imported
first; see :func:`flashmod.training.lightning.lightning`.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashmod.models import save
from flashmod.training.lightning import Callback, LightningModule, Trainer
from flashmod.training.measurements import AttentionMeasurements
from flashmod.training.tokens import Tokens, count_tokens

__all__ = [
    "AttentionMeasurements", "SafetensorsBest", "StopOnNonFinite", "Throughput", "Tokens",
    "count_tokens",
]  # fmt: skip
logger = logging.getLogger(__name__)


class StopOnNonFinite(Callback):
    """Raise at the first loss or gradient that is NaN or infinite, before it reaches a weight.

    So every checkpoint, also one that is saved because of the exception, is finite. Reads one
    number per step back from the device. Under DDP all ranks stop together.

    Args:
        gradients: look at the gradients as well; with a gradient scaler (``16-mixed``), which
            skips such steps itself, only the loss is looked at.

    Raises:
        FloatingPointError: names the step, counted from 0, and the value.
    """

    def __init__(self, gradients: bool = True) -> None:
        self.gradients = gradients

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        self._check(trainer, "loss", loss.detach())

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        if not self.gradients or getattr(trainer.precision_plugin, "scaler", None) is not None:
            return
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self._check(trainer, "gradient norm", torch.nn.utils.get_total_norm(gradients))

    def _check(self, trainer: Trainer, what: str, value: Tensor) -> None:
        finite = bool(value.isfinite().all())
        if trainer.strategy.reduce_boolean_decision(finite):
            return
        where = (
            f"the {what} is {value.sum().item()}"
            if not finite
            else f"a rank's {what} is not finite"
        )
        raise FloatingPointError(
            f"{where} at step {trainer.global_step} (epoch {trainer.current_epoch}); the weights "
            "are those of the last finite step. Lower the learning rate, clip gradients, or find "
            "the operation with Trainer(detect_anomaly=True)"
        )


class SafetensorsBest(Callback):
    """Keep the best weights as safetensors beside Lightning's checkpoints.

    Written after a validation whose monitored value is finite and the best so far; without any
    validation, the final weights at the end of training.

    Args:
        path: the file, for example ``run_dir / "best.safetensors"``.
        monitor: a logged metric.
        mode: ``"min"`` or ``"max"``.
        prefix: only entries of the state dict that start so are kept, without it; ``"net."``
            keeps the network of :class:`~flashmod.training.module.LitModel`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        monitor: str = "val/bits_per_byte",
        mode: str = "min",
        prefix: str = "",
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode is {mode!r}; it must be 'min' or 'max'")
        self.path, self.monitor, self.mode, self.prefix = Path(path), monitor, mode, prefix
        self.best: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Best of a file that is elsewhere says nothing about this one.
        self.best = state_dict["best"] if self.path.is_file() else None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get(self.monitor)
        if trainer.sanity_checking or value is None or not math.isfinite(float(value)):
            return
        sign = 1 if self.mode == "min" else -1
        if self.best is None or sign * float(value) < sign * self.best:
            self.best = float(value)
            self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.best is None:
            logger.info("%s was never logged: %s holds the final weights", self.monitor, self.path)
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        state = trainer.strategy.lightning_module_state_dict()  # collective where sharded
        if trainer.is_global_zero:
            cut = len(self.prefix)
            save({k[cut:]: v for k, v in state.items() if k.startswith(self.prefix)}, self.path)


class Throughput(Callback):
    """Real tokens per second, over the run so far.

    Time is what passes inside training steps: forward, backward and optimizer, but not data
    loading, validation or checkpoints. Steps in which a callback measures
    (:class:`AttentionMeasurements`) are left out, tokens and time alike. Padding and slack rows
    are no tokens. Logs ``throughput/tokens_per_s``, of all ranks together, and
    ``throughput/padding_saved``, the share of rows that padding would have added.

    Args:
        count: from a batch to its :class:`~flashmod.training.tokens.Tokens`.
        skip_steps: first steps to leave out; a first step also compiles and allocates.
        clock: seconds, monotonic.

    Attributes:
        tokens: real tokens seen by this rank, those of left-out steps included.
        tokens_per_s, padding_saved: as logged last; None before.
    """

    def __init__(
        self,
        count: Callable[[Any], Tokens] = count_tokens,
        skip_steps: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.count, self.skip_steps, self.clock = count, skip_steps, clock
        self.tokens = 0
        self.tokens_per_s: float | None = None
        self.padding_saved: float | None = None
        self._steps, self._timed, self._seconds = 0, 0, 0.0
        self._rows, self._padded = 0, 0
        self._started = 0.0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._started = self.clock()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds = self.clock() - self._started
        count = self.count(batch)
        self._steps += 1
        self.tokens += count.real
        self._rows += count.rows
        self._padded += count.padded
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        measuring = any(getattr(callback, "measuring", False) for callback in callbacks)
        if self._steps > self.skip_steps and not measuring:
            self._timed += count.real
            self._seconds += seconds
        self._log(trainer, pl_module)

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        local = torch.tensor(
            [self._timed, self._rows, self._padded], dtype=torch.int64, device=pl_module.device
        )
        timed, rows, padded = trainer.strategy.reduce(local, reduce_op="sum").tolist()
        values: dict[str, float] = {}
        if self._seconds > 0:
            self.tokens_per_s = values["throughput/tokens_per_s"] = timed / self._seconds
        if padded > 0:
            self.padding_saved = values["throughput/padding_saved"] = 1 - rows / padded
        pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)
