"""What Hydra runs: one training, or one job of a sweep."""

import functools
import logging
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from flashmod.experiments import assemble, console, interrupts, sweeps
from flashmod.experiments.runs import train
from flashmod.training.schema import ConfigError
from flashmod.training.summary import summary_rows

logger = logging.getLogger(__name__)


class RunEnded(BaseException):
    """Carries the error of a single run past Hydra, which would print a line about an Exception.

    ``told`` says that the user has been told of it.
    """

    def __init__(self, error: Exception, *, told: bool) -> None:
        super().__init__(str(error))
        self.error, self.told = error, told


def run_job(cfg: DictConfig) -> None:
    """What Hydra runs, once or for each job of a sweep."""
    console.quiet_libraries()  # a worker of a parallel launcher has not done so yet
    place = HydraConfig.get()
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise RunEnded(error, told=False) from error
    overrides = list(place.overrides.task)
    sweeping = place.mode == RunMode.MULTIRUN
    job = functools.partial(
        train,
        values,
        overrides=overrides,
        group=Path(place.sweep.dir).name if sweeping else None,
        log=Path(place.runtime.output_dir, f"{place.job.name}.log"),
        launcher=place.launcher,
    )
    with interrupts.raising():
        if sweeping:
            sweeps.run_one(job, values, overrides)
            return
        directory = Path(place.runtime.output_dir)
        try:
            record = job(directory)
        except ConfigError as error:
            raise RunEnded(error, told=False) from error
        except interrupts.Interrupted:
            _say_how_to_go_on(directory)
            raise
        except Exception as error:
            logger.exception("%s: %s", type(error).__name__, error)
            logger.info("its traceback lies in %s", console.near(directory / "result.json"))
            raise RunEnded(error, told=True) from error
        if rank_zero_only.rank == 0:
            console.show_summary(summary_rows(record), directory, report=values["report"])


def _say_how_to_go_on(directory: Path) -> None:
    last = directory / assemble.CHECKPOINTS / "last.ckpt"
    if last.exists() and rank_zero_only.rank == 0:
        again = f"the same command with ckpt_path={console.near(last)}"
        console.say(f"{again} goes on where it stopped")
