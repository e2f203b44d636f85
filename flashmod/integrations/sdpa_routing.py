"""Route existing calls of ``F.scaled_dot_product_attention`` to flash attention."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..patches import TORCH_SDPA, SdpaPatch
from .checkpointing import CheckpointPatch, recomputes_foreign
from .sdpa import run
from .sdpa_arguments import SdpaArguments


@dataclass(eq=False)
class Routing:
    """What was routed while this was active; compiled code is not counted.

    Attributes:
        calls: number of calls that ran as flash attention.
        left_to_torch: number of calls that torch ran after all, by reason.
    """

    calls: int = 0
    left_to_torch: dict[str, int] = field(default_factory=dict)
    early_imports: bool = field(default=False, repr=False)


_lock = threading.RLock()
_active: list[Routing] = []  # one may be there twice: within its context and in a recomputation
_enabled: list[Routing] = []


def routed_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """What stands at ``F.scaled_dot_product_attention`` while routing is on.

    A name that still refers to this afterwards runs what stood there before.
    """
    given = SdpaArguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    foreign = not torch.compiler.is_compiling() and recomputes_foreign()
    if foreign or not _patch.active:
        return given.call(_patch.below)
    return run(given, routed_sdpa, _patch.below, _count)


def _count(reason: str | None) -> None:
    for routing in set(_active):
        if reason is None:
            routing.calls += 1
        else:
            routing.left_to_torch[reason] = routing.left_to_torch.get(reason, 0) + 1


@contextmanager
def route_sdpa(early_imports: bool = False) -> Iterator[Routing]:
    """While active, calls of ``F.scaled_dot_product_attention`` run as flash attention.

    For the whole process: other threads are routed too. Contexts nest, and torch's function is
    back afterwards, exceptions included. ``torch.compile`` compiles once with and once without
    routing. ``torch.utils.checkpoint`` recomputes with what its forward pass ran with, also when
    the backward pass runs outside. Not routed: scripted modules, and the fused path that torch's
    encoder layers and ``nn.MultiheadAttention`` take in eval mode without gradients.

    Args:
        early_imports: also replace the function in modules that imported it by name; a search
            through ``sys.modules`` of some 10 ms.
    Yields:
        the :class:`Routing`, which counts calls.
    """
    routing = Routing(early_imports=early_imports)
    _start(routing)
    try:
        yield routing
    finally:
        _end(routing)


def enable_sdpa(early_imports: bool = False) -> Routing:
    """As :func:`route_sdpa`, until :func:`disable_sdpa`. Enabling twice is enabling once."""
    with _lock:
        if not _enabled:
            _enabled.append(Routing(early_imports=early_imports))
            _start(_enabled[0])
        elif early_imports:
            _enabled[0].early_imports = True
            _early_imports.search()
            _early_imports.refer_to(routed_sdpa)
        return _enabled[0]


def disable_sdpa() -> None:
    """Undo :func:`enable_sdpa`; contexts that are active stay so."""
    with _lock:
        if _enabled:
            _end(_enabled.pop())


class _EarlyImports:
    """Names that refer to torch's function, in modules that imported it."""

    def __init__(self) -> None:
        self.names: list[tuple[dict[str, Any], str]] = []

    def search(self) -> None:
        """Add names; those found before may refer to the replacement by now."""
        known = {(id(namespace), name) for namespace, name in self.names}
        self.names += [
            (vars(module), name)
            for path, module in list(sys.modules.items())
            if isinstance(module, ModuleType)
            and path.partition(".")[0] not in ("torch", "flashmod")
            for name, value in list(vars(module).items())
            if value is TORCH_SDPA and (id(vars(module)), name) not in known
        ]

    def refer_to(self, function: Callable[..., Any]) -> None:
        for namespace, name in self.names:
            value = namespace.get(name)
            if value is TORCH_SDPA or value is routed_sdpa:
                namespace[name] = function


def _start(routing: Routing, search: bool = True) -> None:
    with _lock:
        if not _active:
            _patch.start()
            _checkpoints.start()
        _active.append(routing)
        if routing.early_imports:
            if search:
                _early_imports.search()
            _early_imports.refer_to(routed_sdpa)


def _end(routing: Routing) -> None:
    with _lock:
        _active.remove(routing)
        if not any(one.early_imports for one in _active):
            _early_imports.refer_to(TORCH_SDPA)
        if not _active:
            _checkpoints.end()
            _patch.end()


def _remember() -> Callable[[], AbstractContextManager[None]]:
    """What routes a recomputation as its forward pass is routed now."""
    routings = tuple(set(_active))

    @contextmanager
    def again() -> Iterator[None]:
        for routing in routings:
            _start(routing, search=False)
        try:
            yield
        finally:
            for routing in routings:
                _end(routing)

    return again


_patch = SdpaPatch(routed_sdpa, outermost=True)
_checkpoints = CheckpointPatch(_remember)
_early_imports = _EarlyImports()
