"""One attention call of a model, kept so that it can be repeated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..functional import Prepared, prepare
from ..numerics import Results

Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass
class Captured:
    """One attention call, repeatable bit for bit. It holds references, detached: no copies.

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
        if self.q.is_inference():  # such tensors count no versions and cannot join a graph
            with torch.inference_mode(False):
                self.q, self.k, self.v = (x.clone() for x in (self.q, self.k, self.v))
        self.versions = tuple(x._version for x in (self.q, self.k, self.v))

    def changed(self) -> bool:
        """Whether q, k or v was overwritten in place since the call."""
        return self.versions != tuple(x._version for x in (self.q, self.k, self.v))

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
        """As :meth:`repeat`, with another function of flash attention's arguments."""
        with self._context(), torch.enable_grad():
            out = run(*leaves, **kwargs)
            return Results(out, *torch.autograd.grad(out, leaves, grad_out.to(out.dtype)))

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
