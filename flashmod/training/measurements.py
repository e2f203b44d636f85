"""Measure the attention of any LightningModule on the batch it has just been trained on."""

from __future__ import annotations

import logging
from typing import Any

from flashmod import measure
from flashmod.measure.metrics import explained
from flashmod.training.lightning import Callback, LightningModule, Trainer
from flashmod.training.replay import StepReplay, state_kept

logger = logging.getLogger(__name__)
Metrics = dict[str, float | None]


class AttentionMeasurements(Callback):
    """Peak memory and gradient error of attention, on a live batch, under the metric names.

    Every ``every`` optimizer steps, and once at the end of training, the latest training step
    is run again: without logging, and with parameters, gradients, buffers and random numbers as
    before afterwards. Its attention call is then measured: ``memory/attention_peak_mib``,
    ``memory/step_peak_mib``, each with its ``dense_`` twin, and ``grad_error/*`` against float64.
    Compiled parts are measured as they run without compilation. What cannot be measured is
    logged as a warning and left out.

    Args:
        every: optimizer steps between two measurements; None for only one at the end.
        memory, grad_error: what is measured.
        time_limit_s: about the time that dense attention, and the gradient check, may take;
            above it a dense peak is predicted, and a sample of the query rows is checked.
        layer: number of the attention call within a forward pass.
        seed: of the sample.

    Attributes:
        summary: the latest value of every metric.
        predicted: metrics in ``summary`` that come from a closed form.
        measuring: True from a measurement until the next step, which
            :class:`~flashmod.training.callbacks.Throughput` reads.
    """

    def __init__(
        self,
        every: int | None = None,
        *,
        memory: bool = True,
        grad_error: bool = True,
        time_limit_s: float = 10.0,
        layer: int = 0,
        seed: int = 0,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every is {every}; it must be at least 1, or None")
        self.every, self.memory, self.grad_error = every, memory, grad_error
        self.time_limit_s, self.layer, self.seed = time_limit_s, layer, seed
        self.summary: Metrics = {}
        self.predicted: set[str] = set()
        self.measuring = False
        self._latest: tuple[Any, int] | None = None
        self._measured_step = -1

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.measuring = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._latest = (batch, batch_idx)
        step = trainer.global_step
        if self.every and step and step % self.every == 0:
            self._measure(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measure(trainer, pl_module)
        self._latest = None

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._latest is None or self._measured_step == trainer.global_step:
            return
        self._measured_step, self.measuring = trainer.global_step, True
        if not pl_module.automatic_optimization:
            logger.warning("attention is not measured: manual optimization cannot be run again")
            return
        replay = StepReplay(trainer, pl_module, *self._latest)
        found: Metrics = {}
        with explained("the training step"):
            found = self._measure_call(replay, pl_module)
            if self.memory:
                limit = self.time_limit_s
                found |= self._note(measure.measure_step(replay, pl_module, time_limit_s=limit))
        self.summary |= found
        values = {name: value for name, value in found.items() if value is not None}
        if trainer.is_global_zero and values:
            for target in trainer.loggers:
                target.log_metrics(values, step=trainer.global_step)

    def _measure_call(self, replay: StepReplay, pl_module: LightningModule) -> Metrics:
        with (
            measure.track(
                pl_module, layer=self.layer, time_limit_s=self.time_limit_s, seed=self.seed
            ) as watched,
            state_kept(pl_module),
        ):
            replay()
        if watched.captured is None:
            logger.warning("no attention call was seen in the training step")
            return {}
        return self._note(
            measure.measure_call(
                watched.captured,
                time_limit_s=self.time_limit_s,
                seed=self.seed,
                memory=self.memory,
                grad_error=self.grad_error,
            )
        )

    def _note(self, measured: measure.Measured) -> Metrics:
        self.predicted -= measured.values.keys()
        self.predicted |= measured.predicted
        return dict(measured.values)
