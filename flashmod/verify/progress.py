"""What a person watching sees: one line that changes on a terminal, plain lines in a log."""

from __future__ import annotations

import shutil
from typing import TextIO

from .rows import Row


class Progress:
    """Writes to ``stream`` what is running and what came of it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._terminal = stream, stream.isatty()
        self._check = ""

    def started(self, name: str) -> None:
        self._check = name
        self._line(f"{name} ...")

    def tick(self, done: int, total: int) -> None:
        """Only a terminal shows it."""
        if self._terminal:
            filled = 24 * done // max(total, 1)
            self._show(f"{self._check:<12} [{'#' * filled}{'.' * (24 - filled)}] {done}/{total}")

    def given(self, row: Row) -> None:
        verdict = "ok" if row.status == "passed" else row.status
        self._line(f"{verdict:<8} {row.name}: {row.value} (target {row.target})", keep=True)

    def clear(self) -> None:
        """Leave the terminal's line empty."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _line(self, text: str, keep: bool = False) -> None:
        if self._terminal and not keep:
            self._show(text)
            return
        self.clear()
        print(text, file=self._stream, flush=True)

    def _show(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r\x1b[K{text[:width]}")
        self._stream.flush()
