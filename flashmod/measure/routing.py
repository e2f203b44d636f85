"""Run a model with another attention, without changing the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from .. import baselines
from ..functional import flash_attention
from ..intercept import Request, intercepting
from .torch_sdpa import SdpaCall, watching_sdpa

Kind = Literal["flash", "dense", "sdpa"]
_FLASH_ONLY = ("backend", "tiles")


def implementation(kind: str) -> Callable[..., Any]:
    """The function of flash attention's arguments behind a kind, not to be intercepted again."""
    kinds = {"flash": flash_attention, "dense": baselines.dense, "sdpa": baselines.sdpa}
    if kind not in kinds:
        raise ValueError(f"attention is one of {', '.join(kinds)}, got {kind!r}")
    return inspect.unwrap(kinds[kind])


@contextmanager
def use(kind: Kind) -> Iterator[None]:
    """While active, every attention call runs as flash, dense or torch's SDPA.

    Calls of flashmod's three functions are routed, and those of
    ``F.scaled_dot_product_attention``. ``backend`` and ``tiles`` are dropped where they have no
    meaning. Compiled code is not routed.
    """
    target = implementation(kind)

    def on_request(request: Request) -> Any:
        kwargs = request.kwargs
        if kind != "flash":
            kwargs = {name: x for name, x in kwargs.items() if name not in _FLASH_ONLY}
        return target(request.q, request.k, request.v, **kwargs)

    def on_sdpa(call: SdpaCall) -> Any:
        if kind == "sdpa":
            return call.original()
        return call.from_rows(target(*call.operands(), **call.kwargs()))

    with intercepting(on_request), watching_sdpa(on_sdpa):
        yield
