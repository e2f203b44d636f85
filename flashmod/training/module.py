"""Train a byte Transformer on packed batches with Lightning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashmod.models import ModelConfig, Transformer
from flashmod.training.packing import Packed

FINAL_LR = 0.1  # share of the learning rate that is left when the cosine ends


class LitModel(pl.LightningModule):
    """Next-byte prediction with AdamW, a linear warm-up and a cosine decay to a tenth of ``lr``.

    Logs ``train/loss`` (nats per byte), ``train/bits_per_byte`` and ``val/bits_per_byte``,
    which is exact over the validation set: every batch weighs as many bytes as it holds.
    Checkpoints hold plain types, so ``torch.load(path, weights_only=True)`` reads them.

    Args:
        model: sizes, as a :class:`~flashmod.models.ModelConfig` or its fields.
        attention: ``"flash"``, ``"sdpa"`` or ``"dense"``.
        backend, tiles: of flash attention; see :func:`flashmod.models.build_attention`.
        lr: learning rate after the warm-up.
        weight_decay: of matrices; norms and the embedding have none.
        warmup_steps: optimizer steps of the warm-up.
        compile: compile the Transformer. (Compiling a whole LightningModule crashes where it
            logs; measurements cannot see attention calls in compiled code.)
    """

    def __init__(
        self,
        model: ModelConfig | Mapping[str, Any],
        attention: str = "flash",
        *,
        backend: str | None = None,
        tiles: Sequence[int] | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        warmup_steps: int = 20,
        compile: bool = False,
    ) -> None:
        super().__init__()
        config = model if isinstance(model, ModelConfig) else ModelConfig.from_dict(model)
        self.save_hyperparameters(
            {
                "model": config.to_dict(),
                "attention": attention,
                "backend": backend,
                "tiles": None if tiles is None else [int(size) for size in tiles],
                "lr": lr,
                "weight_decay": weight_decay,
                "warmup_steps": warmup_steps,
                "compile": compile,
            }
        )
        self.net = Transformer(config, attention, backend=backend, tiles=tiles)
        self._val_nats, self._val_bytes = 0.0, 0
        if compile:
            self.net.compile(dynamic=True)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Logits (T, 256) of a packed batch."""
        return self.net(tokens, cu_seqlens)

    def training_step(self, batch: Packed, batch_idx: int) -> Tensor:
        total, count = self._loss(batch)
        loss = total / count
        values = {"train/loss": loss.detach(), "train/bits_per_byte": loss.detach() / math.log(2)}
        self.log_dict(values, on_step=True, on_epoch=False, batch_size=count, prog_bar=True)
        if self.trainer.world_size == 1:
            return loss
        # DDP averages the ranks' gradients; dividing by the mean count makes that the mean
        # over all bytes, whichever rank saw them.
        counts = torch.tensor(float(count), device=loss.device)
        return total / self.trainer.strategy.reduce(counts, reduce_op="mean")

    def on_validation_epoch_start(self) -> None:
        self._val_nats, self._val_bytes = 0.0, 0

    def validation_step(self, batch: Packed, batch_idx: int) -> None:
        total, count = self._loss(batch)
        self._val_nats += total.item()
        self._val_bytes += count

    def on_validation_epoch_end(self) -> None:
        # Lightning's own mean rounds half a byte away where the ranks' counts differ.
        sums = (self._val_nats, float(self._val_bytes))
        if self.trainer.world_size > 1:
            local = torch.tensor(sums, dtype=torch.float64, device=self.device)
            sums = tuple(self.trainer.strategy.reduce(local, reduce_op="sum").tolist())
        bits = sums[0] / max(sums[1], 1.0) / math.log(2)
        self.log("val/bits_per_byte", bits, batch_size=1, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        hparams = self.hparams
        optimizer = torch.optim.AdamW(
            parameter_groups(self.net, hparams["weight_decay"]), lr=hparams["lr"]
        )
        total = self.trainer.estimated_stepping_batches
        warmup = hparams["warmup_steps"]
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, warmup, total)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def _loss(self, batch: Packed) -> tuple[Tensor, int]:
        """Sum of the negative log-likelihoods in nats, and the number of bytes in it."""
        logits = self(batch.tokens, batch.cu_seqlens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, batch.targets, reduction="sum"), batch.targets.numel()


def parameter_groups(net: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups: matrices decay, norms, biases and embeddings do not."""
    embeddings = {id(m.weight) for m in net.modules() if isinstance(m, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in net.parameters():
        decays = parameter.ndim >= 2 and id(parameter) not in embeddings
        (decayed if decays else kept).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]


def warmup_cosine(step: int, warmup_steps: int, total_steps: float) -> float:
    """Factor of the learning rate at ``step`` (from 0): up to 1, then down to ``FINAL_LR``.

    With ``total_steps`` infinite it stays at 1.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if math.isinf(total_steps):
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress))
