"""One run: validate, keep a record, train, measure."""

import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from flashmod.experiments import assemble, cli, interrupts, sweeps
from flashmod.training import preflight, wandb_run
from flashmod.training.data import load_corpus
from flashmod.training.environment import unused_nvidia_gpu
from flashmod.training.records import RunRecord, read_record
from flashmod.training.schema import ConfigError, build
from flashmod.training.settings import TrainConfig
from flashmod.training.tracking import MetricsCsv

logger = logging.getLogger(__name__)


def train(
    values: Mapping[str, Any],
    directory: Path,
    *,
    overrides: list[str],
    group: str | None,
    log: Path,
    launcher: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train as ``values`` say, into ``directory``, and return the record.

    Whatever happens, ``result.json`` says how it ended and the W&B run is finished.

    Args:
        values: the resolved configuration.
        directory: of the run.
        overrides: the command line's part of ``values``.
        group: name of the sweep; None for a single run.
        log: log file of the run.
        launcher: Hydra's configuration of what runs the jobs.

    Raises:
        ConfigError: before anything starts; for a job of a sweep the record says so.
    """
    record = RunRecord(
        directory,
        name=values.get("name") or _name(overrides),
        command=json.loads(os.environ.get(cli.COMMAND, "null")) or sys.argv,
        overrides=overrides,
        config=values,
        seed=values.get("seed", 0),
        write=rank_zero_only.rank == 0,
    )
    config = _begin(record, launcher or {}, sweeping=group is not None)
    run, exit_code = None, 1
    try:
        run = _wandb(config, record, group)
        _fit(config, record, run, log)
        record.finish("ok")
        exit_code = 0
    except interrupts.Interrupted as stop:
        exit_code = stop.exit_code
        _close(record, "interrupted", stop)
        raise
    except BaseException as error:
        _close(record, "failed", error)
        raise
    finally:
        wandb_run.close(run, exit_code)
    return record.content


def _begin(record: RunRecord, launcher: Mapping[str, Any], *, sweeping: bool) -> TrainConfig:
    """Validate, then make the folder and the process ready; the record says ``running``."""
    directory, values = record.path.parent, record.content["config"]
    try:
        config = build(TrainConfig, values)
        preflight.check(config)
    except ConfigError as error:
        if sweeping:
            record.start()
            record.finish("failed", error)
        raise
    if config.ckpt_path is None and rank_zero_only.rank == 0 and read_record(directory):
        _clean(directory)
    threads = sweeps.threads_for(config.trainer.threads, launcher)
    torch.set_num_threads(threads)
    record.content["environment"]["threads"] = threads
    record.start()
    if hint := unused_nvidia_gpu():
        logger.warning("%s", hint)
    return config


def _wandb(config: TrainConfig, record: RunRecord, group: str | None) -> Any | None:
    if config.logger.wandb is None or rank_zero_only.rank > 0:
        return None
    name, values = record.content["name"], record.content["config"]
    return wandb_run.start(config.logger.wandb, name=name, group=group, values=values)


def _fit(config: TrainConfig, record: RunRecord, run: Any, log: Path) -> None:
    directory = record.path.parent
    pl.seed_everything(config.seed, workers=True, verbose=False)
    corpus = load_corpus(config.data)
    loggers: list[Logger] = [MetricsCsv(directory / "metrics.csv")]
    if run is not None:
        loggers.append(wandb_run.WandbMetrics(run))
    record.update(
        data=corpus.record(),
        files={
            "metrics": "metrics.csv",
            "log": _relative(log, directory),
            "wandb": None if run is None else _relative(Path(run.dir).parent, directory),
        },
    )
    trainer = assemble.trainer(config, directory, loggers, progress=_progress(config))
    trainer.fit(
        assemble.module(config), *assemble.loaders(config, corpus), ckpt_path=config.ckpt_path
    )
    values = {k: float(v) for k, v in trainer.callback_metrics.items() if "/" in k}
    values["data/unigram_entropy"] = corpus.unigram_entropy
    values["data/seq_len"] = config.data.seq_len
    found, predicted = assemble.measured(trainer)
    values |= {name: value for name, value in found.items() if value is not None}
    record.update(summary=values, predicted=predicted, files=assemble.written(directory))
    if run is not None:
        run.summary.update(values)


def _close(record: RunRecord, status: str, error: BaseException) -> None:
    try:
        record.finish(status, error)
    except OSError as full:
        logger.error("%s", full)


def _clean(directory: Path) -> None:
    """Remove what an earlier attempt in the same folder left, so that it is not taken for new."""
    shutil.rmtree(directory / assemble.CHECKPOINTS, ignore_errors=True)
    (directory / assemble.WEIGHTS).unlink(missing_ok=True)


def _name(overrides: list[str]) -> str:
    told = [o for o in overrides if not o.startswith(("sweep=", "logger", "report"))]
    return " ".join(told) or "default"


def _progress(config: TrainConfig) -> bool:
    wanted = config.trainer.progress
    return sys.stderr.isatty() if wanted is None else wanted


def _relative(path: Path, start: Path) -> str:
    return os.path.relpath(path, start)
