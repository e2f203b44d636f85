"""From a typed configuration to the objects of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import Logger

from flashmod.training.callbacks import (
    AttentionMeasurements,
    SafetensorsBest,
    StopOnNonFinite,
    Throughput,
)
from flashmod.training.data import Corpus
from flashmod.training.module import LitModel
from flashmod.training.packing import PackedLoader
from flashmod.training.sampler import PackedBatchSampler
from flashmod.training.settings import TrainConfig

CHECKPOINTS, WEIGHTS = "checkpoints", "best.safetensors"


def loaders(config: TrainConfig, corpus: Corpus) -> tuple[PackedLoader, PackedLoader]:
    """The loaders of training and validation."""
    tokens, sequences = config.batch.tokens, config.batch.sequences

    def loader(documents: Sequence[bytes], shuffle: bool) -> PackedLoader:
        sampler = PackedBatchSampler(
            list(map(len, documents)),
            tokens_per_batch=tokens,
            sequences_per_batch=sequences,
            shuffle=shuffle,
            seed=config.seed,
            drop_last=shuffle,
        )
        return PackedLoader(documents, sampler, pin_memory=torch.cuda.is_available())

    return loader(corpus.train, True), loader(corpus.val, False)


def module(config: TrainConfig) -> LitModel:
    """The LightningModule with its model."""
    return LitModel(
        config.model,
        config.attention.kind,
        backend=config.attention.backend,
        tiles=config.attention.tiles,
        lr=config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        warmup_steps=config.optimizer.warmup_steps,
    )


class ValidateLastStep(pl.Callback):
    """Validate after the last step, also where ``val_every`` does not divide ``max_steps``."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # Lightning validates before a stop that was asked for, but not before its own.
        if trainer.global_step >= trainer.max_steps:
            trainer.should_stop = True


def callbacks(config: TrainConfig, directory: Path) -> list[pl.Callback]:
    """Checkpoints, the watch for non-finite losses, and what is measured."""
    found: list[pl.Callback] = [
        StopOnNonFinite(),
        ValidateLastStep(),
        Throughput(skip_steps=min(2, config.trainer.max_steps - 1)),
        SafetensorsBest(directory / WEIGHTS, prefix="net."),
        ModelCheckpoint(
            dirpath=directory / CHECKPOINTS,
            filename="best",
            monitor="val/bits_per_byte",
            save_top_k=1,
            save_last=True,
            save_on_exception=True,
            enable_version_counter=False,
        ),
    ]
    if config.measure.memory or config.measure.grad_error:
        wanted = config.measure
        found.append(
            AttentionMeasurements(
                wanted.every,
                memory=wanted.memory,
                grad_error=wanted.grad_error,
                time_limit_s=wanted.time_limit_s,
                seed=config.seed,
            )
        )
    return found


def trainer(
    config: TrainConfig, directory: Path, loggers: list[Logger], *, progress: bool
) -> pl.Trainer:
    """Lightning's Trainer with everything attached."""
    wanted: Any = config.trainer
    return pl.Trainer(
        max_steps=wanted.max_steps,
        max_epochs=-1,
        val_check_interval=min(wanted.val_every, wanted.max_steps),
        check_val_every_n_epoch=None,
        limit_val_batches=wanted.val_batches or 1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=wanted.log_every,
        accelerator=wanted.accelerator,
        devices=wanted.devices,
        strategy=wanted.strategy,
        precision=wanted.precision,
        gradient_clip_val=wanted.grad_clip,
        enable_progress_bar=progress,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=directory,
        logger=loggers,
        callbacks=callbacks(config, directory),
    )


def measured(trainer: pl.Trainer) -> tuple[dict[str, float | None], list[str]]:
    """What the callbacks found, and the names of what is predicted in it."""
    values: dict[str, float | None] = {}
    predicted: set[str] = set()
    for callback in trainer.callbacks:
        if isinstance(callback, Throughput):
            values["throughput/tokens_per_s"] = callback.tokens_per_s
            values["throughput/padding_saved"] = callback.padding_saved
        if isinstance(callback, AttentionMeasurements):
            values |= callback.summary
            predicted |= callback.predicted
    return values, sorted(predicted)


def written(directory: Path) -> dict[str, str]:
    """The ``files`` entries of what a training left, relative to ``directory``."""
    places = {"checkpoint": f"{CHECKPOINTS}/best.ckpt", "weights": WEIGHTS}
    return {name: place for name, place in places.items() if (directory / place).is_file()}
