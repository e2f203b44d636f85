"""Let ``torch.utils.checkpoint`` recompute with the attention that its forward pass ran with."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.utils.checkpoint

_thread = threading.local()


class Recomputation:
    """A checkpointed function; whenever it is called, it runs within ``again()``."""

    def __init__(
        self, function: Callable[..., Any], again: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.function, self.again = function, again
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _set_foreign(False), self.again():
            return self.function(*args, **kwargs)


class CheckpointPatch:
    """While started, checkpointed functions remember what ``remember()`` gives.

    Patched is what ``torch.utils.checkpoint.checkpoint`` looks up when it is called, so it does not
    matter how callers imported it. Checkpointing that other libraries wrote is not seen.
    """

    def __init__(self, remember: Callable[[], Callable[[], AbstractContextManager[Any]]]) -> None:
        self.remember = remember
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        module = torch.utils.checkpoint
        reentrant = module.CheckpointFunction
        forward, backward = reentrant.forward, reentrant.backward
        generator = module._checkpoint_without_reentrant_generator

        def remembering_forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
            return forward(ctx, self._wrap(function), *args)

        def remembering_backward(ctx: Any, *grads: Any) -> Any:
            with _set_foreign(not isinstance(ctx.run_function, Recomputation)):
                return backward(ctx, *grads)

        def remembering_generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return generator(self._wrap(function), *args, **kwargs)

        self._replace(reentrant, "forward", staticmethod(remembering_forward))
        self._replace(reentrant, "backward", staticmethod(remembering_backward))
        self._replace(module, "_checkpoint_without_reentrant_generator", remembering_generator)

    def end(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append(functools.partial(setattr, owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if recomputes_foreign() else Recomputation(function, self.remember())


def recomputes_foreign() -> bool:
    """Whether this thread recomputes a function whose forward pass ran before the patch."""
    return getattr(_thread, "foreign", False)


@contextmanager
def _set_foreign(value: bool) -> Iterator[None]:
    before = recomputes_foreign()
    _thread.foreign = value
    try:
        yield
    finally:
        _thread.foreign = before
