"""One attention call of a model, kept so that it can be repeated."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..functional import Prepared, prepare
from ..masks import Mask
from ..numerics import Results

Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass
class Captured:
    """One attention call, repeatable bit for bit. It holds references, detached: no copies but of
    parameters (a bias, a sink), which an optimizer overwrites.

    ``q, k, v`` and ``kwargs`` are those of :func:`flashmod.flash_attention`; a call of torch's SDPA
    is translated. ``unknown`` says why no exact reference exists for it (None: one does).
    """

    kind: str  # "flash", "dense", "sdpa"; "torch" is F.scaled_dot_product_attention itself
    run: Callable[..., Any]
    q: Tensor
    k: Tensor
    v: Tensor
    kwargs: dict[str, Any]
    unknown: str | None = None
    grad_out: Tensor | None = None
    autocast: torch.dtype | None = None
    rng_state: Tensor | None = None  # before the call, when its dropout is torch's own
    versions: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        with torch.inference_mode(False):
            if self.q.is_inference():  # such tensors count no versions and cannot join a graph
                self.q, self.k, self.v = (x.clone() for x in (self.q, self.k, self.v))
            self.kwargs = {name: _held_argument(x) for name, x in self.kwargs.items()}
        self.versions = self._current_versions()

    def changed(self) -> bool:
        """Whether an input, a mask or a bias was overwritten in place since the call."""
        return self.versions != self._current_versions()

    def _current_versions(self) -> tuple[int, ...]:
        tensors = [self.q, self.k, self.v]
        for x in self.kwargs.values():
            tensors += x.labels or () if isinstance(x, Mask) else [x]
        return tuple(x._version for x in tensors if isinstance(x, Tensor))

    def output_grad(self, seed: int = 0) -> Tensor:
        """What backward sent into the output, or seeded normal noise; shaped like the output."""
        if self.grad_out is not None:
            return self.grad_out
        shape = (*self.q.shape[:-1], self.v.shape[-1])
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(shape, generator=generator)
        return noise.to(self.q.device, self.autocast or self.q.dtype)

    def leaves(self) -> Tensors:
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        return q, k, v

    def repeat(self, leaves: Tensors, grad_out: Tensor) -> Results:
        """Forward and backward once more, on :meth:`leaves`; no other ``.grad`` is touched."""
        return self.repeat_with(self.run, self.kwargs, leaves, grad_out)

    def repeat_with(
        self, run: Callable[..., Any], kwargs: dict[str, Any], leaves: Tensors, grad_out: Tensor
    ) -> Results:
        """As :meth:`repeat`, with another function of flash attention's arguments.

        A bias and a sink that had a gradient get one; it is dropped.
        """
        others = [x for x in kwargs.values() if isinstance(x, Tensor) and x.requires_grad]
        with self._context(), torch.enable_grad():
            out = run(*leaves, **kwargs)
            grads = torch.autograd.grad(out, (*leaves, *others), grad_out.to(out.dtype))
            return Results(out, *grads[:3])

    def prepared(self) -> Prepared:
        """The call as the backends see it, rounded to the autocast dtype if there was one."""
        with self._context(), torch.no_grad():
            return prepare(self.q, self.k, self.v, **self.kwargs)

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        device = self.q.device
        cast = torch.autocast(
            device.type, dtype=self.autocast, enabled=self.autocast is not None, cache_enabled=False
        )
        with torch.inference_mode(False), cast, rng_restored(device):
            if self.rng_state is not None:
                set_rng_state(device, self.rng_state)
            yield


def _held(x: Tensor) -> Tensor:
    """``x`` outside any graph; its gradient, if it had one, can be asked for again."""
    parameter = x.is_leaf and x.requires_grad
    held = x.detach().clone() if parameter or x.is_inference() else x.detach()
    return held.requires_grad_(x.requires_grad)


def _held_argument(x: Any) -> Any:
    if isinstance(x, Mask) and x.labels is not None:
        queries, keys = x.labels
        return dataclasses.replace(x, labels=(_held(queries), _held(keys)))
    return _held(x) if isinstance(x, Tensor) else x


@contextlib.contextmanager
def rng_restored(device: torch.device) -> Iterator[None]:
    """Leave torch's generators (CPU's and this device's) as they were found."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def rng_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
