"""The whole configuration of a training run, typed: the schema that every config must fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flashmod.models.config import ModelConfig
from flashmod.training.data import DataConfig
from flashmod.training.forms import show
from flashmod.training.schema import ConfigError, number


@dataclass(frozen=True)
class AttentionConfig:
    """Which attention the model uses.

    Args:
        kind: ``"flash"``, torch's ``"sdpa"``, or ``"dense"``: softmax(QK^T)V in full.
        backend: of flash: ``"triton"``, ``"tiled"``, or None for the best that can do the call.
        tiles: of flash: [queries, keys] of one tile, or those, warps and stages; None for the
            library's choice.
    """

    kind: Literal["flash", "sdpa", "dense"] = "flash"
    backend: Literal["triton", "tiled"] | None = None
    tiles: tuple[int, int] | tuple[int, int, int, int] | None = number(None, low=1)

    def __post_init__(self) -> None:
        extra = {"backend": self.backend, "tiles": self.tiles}
        for name, value in extra.items():
            if self.kind != "flash" and value is not None:
                raise ValueError(
                    f"attention.{name}={show(value)}: has no effect with attention={self.kind}; "
                    f"leave it out or choose attention=flash"
                )


@dataclass(frozen=True)
class BatchConfig:
    """How many documents one step sees: exactly one of the two.

    Args:
        tokens: token budget; whole documents are packed until the next would exceed it.
        sequences: this many documents, so that tokens grow with their length.
    """

    tokens: int | None = number(None, low=1)
    sequences: int | None = number(None, low=1)

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.sequences is None):
            raise ValueError(
                f"batch.tokens={show(self.tokens)} and batch.sequences={show(self.sequences)}: "
                "set one and leave the other null, e.g. batch.tokens=4096 batch.sequences=null"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a linear warm-up and a cosine decay to a tenth of ``lr``."""

    lr: float = number(1e-3, low=0)
    weight_decay: float = number(0.01, low=0)
    warmup_steps: int = number(20, low=0)


@dataclass(frozen=True)
class TrainerConfig:
    """What Lightning's Trainer gets.

    Args:
        max_steps: optimizer steps.
        val_every: steps between two validations; the last step is always validated.
        val_batches: batches of a validation, None for all.
        log_every: steps between two logged values.
        accelerator, devices, strategy, precision: as in Lightning.
        threads: CPU threads of torch, at most what it would take itself; None for that many.
            A small model gains nothing from many, and loses much where the cores are shared.
        grad_clip: largest gradient norm, None for no limit.
        progress: a progress bar; None for one only where a terminal shows it.
    """

    max_steps: int = number(200, low=1)
    val_every: int = number(100, low=1)
    val_batches: int | None = number(None, low=1)
    log_every: int = number(10, low=1)
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: int = number(1, low=1)
    strategy: str = "auto"
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"] = "32-true"
    threads: int | None = number(None, low=1)
    grad_clip: float | None = number(1.0, low=0)
    progress: bool | None = None


@dataclass(frozen=True)
class MeasureConfig:
    """What is measured beside the loss; each measurement is left out of the throughput.

    Args:
        every: steps between two measurements, None for only one at the end.
        memory: peak memory, with the dense twin.
        grad_error: errors against dense float64 attention.
        time_limit_s: about the time of one measurement: a longer gradient check samples query
            rows, a dense peak that would take longer is predicted.
    """

    every: int | None = number(None, low=1)
    memory: bool = True
    grad_error: bool = True
    time_limit_s: float = number(10.0, low=0.1)


@dataclass(frozen=True)
class WandbConfig:
    """How a run is logged to W&B.

    Args:
        mode: ``"offline"``, ``"online"``, or ``"disabled"`` for no W&B at all. The shipped
            configuration takes it from the environment variable ``WANDB_MODE``.
        project: W&B project.
        directory: the folder ``wandb/`` with the runs is made in it, shared by all runs.
        init_timeout: seconds that an online start may take before the run is kept offline.
        entity: W&B user or team; None is the default of the account.
    """

    mode: Literal["offline", "online", "disabled", "dryrun", "run"] = "offline"
    project: str = "flashmod"
    directory: str = "runs"
    init_timeout: float = number(30.0, low=1)
    entity: str | None = None


@dataclass(frozen=True)
class LoggerConfig:
    """``metrics.csv`` is always written; W&B beside it unless null."""

    wandb: WandbConfig | None = None


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run.

    Args:
        name: of the run, in records and W&B; None for one made of the overrides.
        seed: of the parameters, the batches and the dropout.
        ckpt_path: a checkpoint to go on from.
        report: write the report page at the end.
    """

    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    name: str | None = None
    seed: int = number(0, low=0, high=2**32 - 1)
    ckpt_path: str | None = None
    report: bool = True

    def __post_init__(self) -> None:
        budget, longest = self.batch.tokens, self.data.seq_len
        if budget is not None and budget < longest:
            raise ConfigError(
                [
                    f"batch.tokens={budget}: a batch must hold the longest sequence, "
                    f"data.seq_len={longest}; e.g. batch.tokens={4 * longest}"
                ]
            )
