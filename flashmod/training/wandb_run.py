"""One W&B run a job: offline unless asked, and never a reason for training to stop or wait."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from flashmod.training.settings import WandbConfig
from flashmod.training.tracking import METRICS, STEP

logger = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
_gave_up: set[str] = set()  # reasons already told: a sweep waits and warns once, not once a job


def start(
    config: WandbConfig, *, name: str, group: str | None, values: Mapping[str, Any]
) -> Any | None:
    """A new W&B run, or None when W&B is disabled, missing or cannot start.

    An online run that cannot start becomes an offline one, with one warning.

    Args:
        config: where and how.
        name: of the run.
        group: joins the runs of a sweep; None for a single run.
        values: the resolved configuration, shown beside the run.
    """
    mode = {"dryrun": "offline", "run": "online"}.get(config.mode, config.mode)
    if mode == "disabled":
        return None
    try:
        import wandb
    except ImportError:
        logger.warning("wandb is not installed: metrics go to metrics.csv only (logger=csv)")
        return None
    reason = None
    try:
        Path(config.directory).mkdir(parents=True, exist_ok=True)
        if mode == "online" and not _gave_up:
            reason, run = _online(wandb, config, name, group, values)
            if run is not None:
                return run
        run = _init(wandb, config, "offline", name, group, values)
    except Exception as error:  # every cause has the same remedy
        why = f"W&B cannot start an offline run: {_first_line(error)}"
        _warn(f"{reason}; {why}" if reason else why, "Metrics go to metrics.csv only; logger=csv")
        return None
    if reason:
        later = f"`wandb sync {config.directory}/wandb/offline-run-*` uploads it later"
        _warn(reason, f"The run is kept offline, and {later}; WANDB_MODE=offline")
    return run


class WandbMetrics(Logger):
    """A Lightning logger that writes into a run that is already there."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    @property
    def name(self) -> str:
        return "wandb"

    @property
    def version(self) -> str:
        return str(self.run.id)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run got the whole configuration when it started."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.run.log({**metrics, STEP: step} if step is not None else dict(metrics))


def close(run: Any | None, exit_code: int) -> None:
    """Finish ``run`` with the exit code of its job; a failure to do so is only logged."""
    if run is None:
        return
    try:
        run.finish(exit_code=exit_code)
    except Exception as error:
        logger.warning("W&B could not finish the run: %s", _first_line(error))


def _online(
    wandb: Any, config: WandbConfig, name: str, group: str | None, values: Mapping[str, Any]
) -> tuple[str | None, Any | None]:
    """A reason why there is no online run, or the run."""
    reason = _unreachable(wandb) or _no_key(wandb)
    if reason is None:
        try:
            return None, _init(wandb, config, "online", name, group, values)
        except Exception as error:  # wandb documents no complete list of what init raises
            reason = _first_line(error)
            wandb.teardown()
    return f"WANDB_MODE=online cannot start: {reason}", None


def _init(
    wandb: Any,
    config: WandbConfig,
    mode: str,
    name: str,
    group: str | None,
    values: Mapping[str, Any],
) -> Any:
    settings = wandb.Settings(
        silent=True,
        console="off",
        x_disable_stats=True,
        disable_code=True,
        disable_git=True,
        init_timeout=config.init_timeout,
    )
    run = wandb.init(
        project=config.project,
        entity=config.entity,
        dir=config.directory,
        name=name,
        group=group,
        job_type="train",
        config=dict(values),
        mode=mode,
        reinit="create_new",
        settings=settings,
    )
    run.define_metric(STEP)
    for metric in METRICS:  # by name: a pattern would be overruled by W&B's own "*"
        run.define_metric(metric, step_metric=STEP)
    return run


def _no_key(wandb: Any) -> str | None:
    try:
        if wandb.login(prompt=False):
            return None
    except Exception as error:
        return _first_line(error)
    return "no API key is configured (run `wandb login` or set WANDB_API_KEY)"


def _unreachable(wandb: Any) -> str | None:
    """Ask the server for a connection: wandb itself would retry for the whole time limit."""
    url = urlsplit(wandb.setup().settings.base_url)
    if getproxies():
        return None
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=PROBE_SECONDS).close()
    except OSError as error:
        return f"{url.netloc} cannot be reached ({error})"
    return None


def _warn(reason: str, remedy: str) -> None:
    if reason not in _gave_up:
        _gave_up.add(reason)
        logger.warning("%s. %s silences this", reason, remedy)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__
