"""Find and read the ``result.json`` records below some folders."""

import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashmod.report.values import finite, flatten, mapping, numbers

logger = logging.getLogger(__name__)

RECORD_NAME = "result.json"
SCHEMA_VERSION = 1
SKIPPED_FOLDERS = {"wandb", ".hydra", ".git", ".venv", "checkpoints", "node_modules"}


class NoRecordsError(ValueError):
    """A folder holds no run record, or does not exist."""


@dataclass(frozen=True)
class Run:
    """One readable record. Text fields are user text and must be escaped.

    ``summary`` keeps finite numbers only; ``config`` is flat, with dotted keys.
    """

    path: Path
    name: str
    status: str
    attention: str
    seq_len: int | None
    tiles: str
    precision: str
    device: str
    started: str
    duration_s: float | None
    error_type: str
    error_message: str
    traceback: str
    summary: dict[str, float]
    predicted: frozenset[str]
    config: dict[str, Any]
    environment: dict[str, Any]
    data: dict[str, Any]
    command: str
    metrics_path: Path | None

    @property
    def commit(self) -> str:
        """The first ten digits, with ``-dirty`` where the tree was changed."""
        digits, dash, dirty = str(self.environment.get("commit") or "").partition("-")
        return digits[:10] + dash + dirty


@dataclass(frozen=True)
class Unreadable:
    """A file called ``result.json`` that is not a record this version can read."""

    path: Path
    reason: str


@dataclass
class Records:
    """All that was found, oldest run first."""

    runs: list[Run] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)

    @property
    def measured(self) -> list[Run]:
        """Runs that ended well: only these enter charts and sentences."""
        return [run for run in self.runs if run.status == "ok"]


def read(folders: Iterable[str | os.PathLike[str]]) -> Records:
    """Read every record below ``folders``, each once; a bad file never stops the others.

    Raises:
        NoRecordsError: a folder does not exist or holds no ``result.json``.
    """
    records, seen = Records(), set()
    for folder in map(Path, folders):
        paths = list(_find(folder))
        if not paths:
            state = "holds no result.json" if folder.exists() else "does not exist"
            raise NoRecordsError(
                f"{folder} {state}. Every run of flashmod-train leaves one in its folder "
                "(runs/train/<time>/ or runs/sweeps/<time>/<job>/): name such a folder or one "
                "above it."
            )
        for path in paths:
            if path.resolve() not in seen:
                seen.add(path.resolve())
                _read_one(path, records)
    records.runs.sort(key=lambda run: (run.started, str(run.path)))
    return records


def _find(folder: Path) -> Iterator[Path]:
    if folder.is_file():
        yield folder
    for root, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if name not in SKIPPED_FOLDERS)
        if RECORD_NAME in files:
            yield Path(root, RECORD_NAME)


def _read_one(path: Path, records: Records) -> None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(
                "not a flashmod run record: no schema_version"
                if version is None
                else f"schema_version is {version!r}, this flashmod reads {SCHEMA_VERSION}"
            )
        records.runs.append(_parse(path, content))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = f"not valid JSON: {error}" if isinstance(error, json.JSONDecodeError) else error
        records.unreadable.append(Unreadable(path, str(reason)))
        logger.warning("Cannot read %s: %s", path, reason)


def _parse(path: Path, content: dict[str, Any]) -> Run:
    config = flatten(mapping(content.get("config")))
    environment = mapping(content.get("environment"))
    summary = numbers(mapping(content.get("summary")))
    error = mapping(content.get("error"))
    length = finite(summary.get("data/seq_len", config.get("data.seq_len")))
    metrics = path.parent / str(mapping(content.get("files")).get("metrics") or "metrics.csv")
    return Run(
        path=path,
        name=str(content.get("name") or path.parent.name),
        status=str(content.get("status") or "unknown"),
        attention=str(
            _first(
                config,
                "attention.kind",
                "model.attention.kind",
                "attention.name",
                "model.attention",
                "attention",
            )
            or "unknown"
        ),
        seq_len=int(length) if length and length >= 1 else None,
        tiles=_tiles(config),
        precision=str(_first(config, "trainer.precision", "precision") or "not recorded"),
        device=_device(config, environment),
        started=str(content.get("started") or ""),
        duration_s=finite(content.get("duration_s")),
        error_type=str(error.get("type") or ""),
        error_message=str(error.get("message") or content.get("error") or ""),
        traceback=str(error.get("traceback") or ""),
        summary=summary,
        predicted=frozenset(map(str, content.get("predicted") or ())),
        config=config,
        environment=environment,
        data=mapping(content.get("data")),
        command=_command(content.get("command")),
        metrics_path=metrics if metrics.is_file() else None,
    )


def _first(config: dict[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _tiles(config: dict[str, Any]) -> str:
    tiles = _first(config, "attention.tiles", "model.attention.tiles")
    if tiles is None:
        sizes = [_first(config, f"attention.tiles.{k}") for k in ("block_m", "block_n")]
        tiles = [size for size in sizes if size is not None]
    return "x".join(map(str, tiles)) if isinstance(tiles, list) else str(tiles)


def _device(config: dict[str, Any], environment: dict[str, Any]) -> str:
    accelerator = str(config.get("trainer.accelerator") or "")
    if environment.get("gpu") and accelerator != "cpu":
        return str(environment["gpu"])
    cpu, threads = environment.get("cpu") or "CPU", environment.get("threads")
    return f"{cpu}, {threads} thread{'s' * (threads != 1)}" if threads else str(cpu)


def _command(argv: Any) -> str:
    return " ".join(map(str, argv)) if isinstance(argv, list) else str(argv or "")
