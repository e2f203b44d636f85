"""The record that every run leaves: ``result.json``, whole at every moment."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flashmod.training.environment import environment

SCHEMA_VERSION = 1
FILE_NAME = "result.json"


class RunRecord:
    """Writes ``result.json`` of one run into ``directory``.

    The file is replaced in one step, so a reader, a full disk or a killed process never leaves
    half a record. It says ``running`` until :meth:`finish`.

    Args:
        directory: folder of the run, made if missing.
        name: short text that tells the run from others.
        command: the command line, one word an entry.
        overrides: the part of it that chose the configuration.
        config: the resolved configuration, plain types.
        seed: of the run.
        task: kind of run.
        write: whether this process writes the file; only one rank of several does.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        name: str,
        command: list[str],
        overrides: list[str],
        config: Mapping[str, Any],
        seed: int,
        task: str = "train",
        write: bool = True,
    ) -> None:
        self._write = write
        self.path = Path(directory) / FILE_NAME
        self._began = time.monotonic()
        self.content: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "status": "running",
            "task": task,
            "name": name,
            "error": None,
            "command": command,
            "overrides": overrides,
            "config": dict(config),
            "seed": seed,
            "summary": {},
            "predicted": [],
            "environment": environment(),
            "data": {},
            "started": _now(),
            "ended": None,
            "duration_s": None,
            "files": {},
        }

    def start(self) -> None:
        """Write the record as ``running``.

        Raises:
            OSError: the folder cannot be written.
        """
        self.update()

    def update(self, **entries: Any) -> None:
        """Merge mappings into, and replace other entries of, the record, and write it."""
        for key, value in entries.items():
            if isinstance(value, Mapping):
                self.content[key] = {**self.content[key], **value}
            else:
                self.content[key] = value
        if self._write:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.content)

    def finish(self, status: str, error: BaseException | None = None) -> None:
        """Close the record as ``ok``, ``failed`` or ``interrupted``.

        Raises:
            OSError: it could not be written; what is on disk is the last state that could.
        """
        if error is not None:
            self.content["error"] = describe(error)
        self.update(
            status=status, ended=_now(), duration_s=round(time.monotonic() - self._began, 3)
        )


def describe(error: BaseException) -> dict[str, str]:
    """``{"type", "message", "traceback"}`` of an exception."""
    trace = "".join(traceback.format_exception(error))
    return {"type": type(error).__name__, "message": str(error), "traceback": trace}


def read_record(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The record in ``directory``, or None where there is no readable one of this version."""
    try:
        content = json.loads((Path(directory) / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(content, dict) and content.get("schema_version") == SCHEMA_VERSION
    return content if known else None


def write_json(path: Path, content: Any) -> None:
    """Replace ``path`` by ``content`` in one step; numbers that JSON lacks become null.

    Raises:
        OSError: nothing was changed; the message names the file.
    """
    text = json.dumps(_plain(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            what = f"cannot write the record: {error.strerror}"
            raise OSError(error.errno, what, str(path)) from error
        raise


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return _plain(value.item()) if hasattr(value, "item") else str(value)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
