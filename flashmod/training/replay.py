"""Run the training step of any LightningModule once more, without a trace in the training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flashmod.training.lightning import LightningModule, Trainer


class StepReplay:
    """Forward and backward of one training step, as often as called.

    Parameters, gradients, buffers and random generators are as before afterwards, and nothing
    is logged. Compiled parts run eagerly, so that attention calls can be seen. State that a
    ``training_step`` keeps elsewhere, such as a running metric, sees the batch once more.

    Args:
        trainer: gives the precision.
        pl_module: with automatic optimization; a manual step would change the weights.
        batch, batch_idx: as ``training_step`` gets them.
    """

    def __init__(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.trainer, self.pl_module = trainer, pl_module
        self.batch, self.batch_idx = batch, batch_idx

    def __call__(self) -> None:
        """One forward and backward.

        Raises:
            TypeError: when ``training_step`` returns no loss.
        """
        device = self.pl_module.device
        devices = [device] if device.type == "cuda" else []
        with (
            muted(self.pl_module),
            state_kept(self.pl_module),
            torch.random.fork_rng(devices),
            torch.compiler.set_stance("force_eager"),
            torch.enable_grad(),
        ):
            with self.trainer.precision_plugin.train_step_context():
                loss = _loss(self.pl_module.training_step(self.batch, self.batch_idx))
            loss.backward()


@contextlib.contextmanager
def muted(pl_module: LightningModule) -> Iterator[None]:
    """While active, ``self.log`` and ``self.log_dict`` do nothing."""
    names = ("log", "log_dict")
    for name in names:
        pl_module.__dict__[name] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for name in names:
            del pl_module.__dict__[name]


@contextlib.contextmanager
def state_kept(pl_module: LightningModule) -> Iterator[None]:
    """Start without gradients; put gradients and buffers back at the end."""
    gradients = [(p, p.grad) for p in pl_module.parameters()]
    buffers = [(b, b.detach().clone()) for b in pl_module.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _loss(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, Tensor):
        raise TypeError(f"training_step returned {type(result).__name__} and no loss")
    return loss
