"""Tokens per second of a run, with the time spent measuring left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Throughput:
    """Counts real tokens and the time between steps, from its creation on.

    Args:
        clock: seconds, monotonic.
        skip_steps: first steps that ``tokens_per_s`` leaves out once others have ended: they also
            allocate, compile and load.

    Attributes:
        tokens: real tokens so far.
        padded: tokens that the same batches would have had with every sequence padded to the
            longest of its batch.
        seconds: time of the steps that have ended.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, skip_steps: int = 0) -> None:
        self.tokens, self.padded, self.seconds = 0, 0, 0.0
        self._left_out = [0, 0.0]  # tokens and seconds of the first steps
        self._skip = skip_steps
        self._clock = clock
        self._mark = clock()
        self._unfinished = 0.0  # of the step that has not ended yet

    def step(self, tokens: int, padded: int | None = None) -> None:
        """One step has ended; it took the time since the last one.

        Args:
            tokens: real tokens, padding and slack rows not counted.
            padded: N * longest sequence of the batch; the same as ``tokens`` by default.
        """
        self._bank()
        self.seconds, self._unfinished = self.seconds + self._unfinished, 0.0
        self.tokens += tokens
        self.padded += tokens if padded is None else padded
        if self._skip > 0:
            self._skip -= 1
            self._left_out = [self.tokens, self.seconds]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out."""
        self._bank()
        try:
            yield
        finally:
            self._mark = self._clock()

    @property
    def tokens_per_s(self) -> float | None:
        """None before the first step."""
        skipped_tokens, skipped_seconds = self._left_out
        if self.tokens > skipped_tokens:
            tokens, seconds = self.tokens - skipped_tokens, self.seconds - skipped_seconds
        else:
            tokens, seconds = self.tokens, self.seconds
        return tokens / seconds if tokens and seconds > 0 else None

    @property
    def padding_saved(self) -> float | None:
        """``1 - real tokens / (N * longest)``: the share of a padded batch that is not computed."""
        return 1 - self.tokens / self.padded if self.padded else None

    def _bank(self) -> None:
        now = self._clock()
        self._unfinished += now - self._mark
        self._mark = now
