"""Ctrl-C and SIGTERM as one exception that no library takes for its own."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal asked the process to stop; no ``except Exception`` may swallow it."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"interrupted by {signal.Signals(number).name}")

    @property
    def exit_code(self) -> int:
        return 128 + self.number

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return type(self), (self.number,)


_stopping = False


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """While active, the first signal raises :class:`Interrupted`; later ones are ignored.

    So the clean-up that follows the first signal (checkpoint, record, W&B) is not cut short.
    An inner use of it changes nothing.
    """
    global _stopping
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is _stop:
        yield
        return
    _stopping = False
    before = {number: signal.signal(number, _stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    # A flag, not SIG_IGN: Lightning puts back the handlers that it found.
    global _stopping
    if not _stopping:
        _stopping = True
        raise Interrupted(number)
