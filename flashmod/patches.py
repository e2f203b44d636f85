"""Put functions in place of torch's SDPA for a while; they may come and go in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F

NAME = "scaled_dot_product_attention"
TORCH_SDPA = F.scaled_dot_product_attention  # as it was when this was imported
_lock = threading.RLock()


class SdpaPatch:
    """One function in place of ``F.scaled_dot_product_attention``, for the whole process.

    Patches form a chain that starts at the attribute: each function calls ``patch.below``. One
    that ends is taken out of the chain wherever it stands; only where foreign code has patched
    over it does it stay reachable, and then it must pass calls on while ``active`` is false.

    Args:
        function: takes the calls.
        outermost: stays above patches that come later and are not.
    """

    def __init__(self, function: Callable[..., Any], outermost: bool = False) -> None:
        self.function, self.outermost = function, outermost
        self.below: Callable[..., Any] = getattr(F, NAME)
        self.active = False
        function.patch = self  # type: ignore[attr-defined]

    def start(self) -> None:
        with _lock:
            above, below = None, getattr(F, NAME)
            while (other := _patch_of(below)) is not None and (
                not other.active or (other.outermost and not self.outermost)
            ):
                above, below = other if other.active else above, other.below
            self.below, self.active = below, True
            _put(above, self.function)

    def end(self) -> None:
        with _lock:
            self.active = False
            above, at = None, getattr(F, NAME)
            while at is not self.function and (other := _patch_of(at)) is not None:
                above, at = other, other.below
            if at is self.function:
                _put(above, self.below)

    @contextmanager
    def installed(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.end()


def torch_sdpa() -> Callable[..., Any]:
    """``F.scaled_dot_product_attention`` as it is without the patches that replace it outright."""
    function = getattr(F, NAME)
    while (patch := _patch_of(function)) is not None and patch.outermost:
        function = patch.below
    return function


def _patch_of(function: Callable[..., Any]) -> SdpaPatch | None:
    return getattr(function, "patch", None)


def _put(above: SdpaPatch | None, function: Callable[..., Any]) -> None:
    if above is None:
        setattr(F, NAME, function)
    else:
        above.below = function
