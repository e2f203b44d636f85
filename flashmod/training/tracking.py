"""Where metrics go: a CSV file always, W&B when it can start. Neither may stop a training."""

from __future__ import annotations

import csv
import errno
import logging
import os
import time
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

logger = logging.getLogger(__name__)

METRICS = (
    "train/loss",
    "train/bits_per_byte",
    "val/bits_per_byte",
    "memory/attention_peak_mib",
    "memory/dense_attention_peak_mib",
    "memory/step_peak_mib",
    "memory/dense_step_peak_mib",
    "grad_error/out",
    "grad_error/dq",
    "grad_error/dk",
    "grad_error/dv",
    "grad_error/coverage",
    "throughput/tokens_per_s",
    "throughput/padding_saved",
)
STEP = "trainer/global_step"


class MetricsCsv(Logger):
    """A Lightning logger that appends one row of ``metrics.csv`` a call and flushes it.

    A row is on disk before the next step, so a killed process loses nothing that was logged.
    Columns are ``step``, ``time`` (seconds since the start) and the known metrics; a metric of
    another name adds a column. When the disk is full it warns once and stops writing: the file
    then ends with the last whole row.

    Args:
        path: the file; an existing one is replaced.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        self.columns = ["step", "time", *METRICS]
        self._began = time.monotonic()
        self._broken = False
        self._create()

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: ``result.json`` holds the configuration."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self._broken:
            return
        row = {key: float(value) for key, value in metrics.items() if key != "epoch"}
        new = [key for key in row if key not in self.columns]
        if new:
            rows = list(csv.DictReader(StringIO(self.path.read_text(encoding="utf-8"))))
            self.columns += new
            self._rewrite(rows)
            if self._broken:
                return
        elapsed = round(time.monotonic() - self._began, 3)
        self._append({"step": "" if step is None else step, "time": elapsed, **row})

    @rank_zero_only
    def _create(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rewrite([])

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        text = StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        temporary = self.path.with_name(f".{self.path.name}.new")
        try:
            _write_all(temporary, text.getvalue(), "wb")
            os.replace(temporary, self.path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            self._give_up(error)

    def _append(self, row: dict[str, Any]) -> None:
        text = StringIO()
        csv.DictWriter(text, self.columns, lineterminator="\n").writerow(row)
        whole = self.path.stat().st_size
        try:
            _write_all(self.path, text.getvalue(), "ab")
        except OSError as error:
            os.truncate(self.path, whole)
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        logger.warning("cannot write %s any more: %s", self.path, error.strerror)


def _write_all(path: Path, text: str, mode: str) -> None:
    data = text.encode()
    # Unbuffered, so that the row is with the system, and an error is ours, when this returns.
    with path.open(mode, buffering=0) as file:
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
