"""Let a measurement watch, repeat or replace attention calls, whatever model makes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


class Request(NamedTuple):
    """One attention call that has not run yet; ``request.run(q, k, v, **kwargs)`` runs it."""

    kind: str  # "flash", "sdpa" or "dense"
    run: Callable[..., Any]
    q: Tensor
    k: Tensor
    v: Tensor
    kwargs: dict[str, Any]


Handler = Callable[[Request], Any]
_handlers: list[Handler] = []


def interceptable(kind: str) -> Callable[[F], F]:
    """Mark ``fn(q, k, v, **kwargs)`` as a call that :func:`intercepting` may take over."""

    def decorate(fn: F) -> F:
        @functools.wraps(fn)
        def wrapper(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
            if not _handlers or torch.compiler.is_compiling():
                return fn(q, k, v, **kwargs)
            return _handlers[-1](Request(kind, fn, q, k, v, kwargs))

        return wrapper  # type: ignore[return-value]

    return decorate


@contextmanager
def intercepting(handler: Handler) -> Iterator[None]:
    """While active, every interceptable call returns ``handler(request)`` instead.

    Handlers nest: the innermost one decides. Compiled code is not intercepted.
    """
    _handlers.append(handler)
    try:
        yield
    finally:
        _handlers.remove(handler)
