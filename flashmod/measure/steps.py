"""Peak memory of a whole training step, as it is and with dense attention in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..functional import prepare
from ..intercept import Request, intercepting
from .capture import rng_restored
from .dense_memory import DenseSize, Peak, dense_size, fits
from .memory import MIB, peak_mib
from .routing import use
from .torch_sdpa import SdpaCall, watching_sdpa

Step = Callable[[], object]


def step_peak(fn: Step, model: nn.Module | None = None) -> float:
    """Memory of one step beyond what was allocated before it, in MiB.

    Args:
        fn: forward and backward, without the optimizer, so that it can be repeated.
        model: whose gradients, buffers and modes are as before afterwards (gradients start at
            None, so the step's own are counted). The random generators are restored in any case.
    """
    with _restored(model):
        return peak_mib(fn, _device(model))


class StepPeaks(NamedTuple):
    """Memory of a step as it is, in MiB, and with dense attention."""

    own: float
    dense: Peak


def step_peaks(fn: Step, model: nn.Module | None = None, time_limit_s: float = 10.0) -> StepPeaks:
    """:func:`step_peak`, and the same with dense attention in place of every attention call.

    Where dense attention does not fit into memory and time, its closed form is added to the step's
    own peak: the matrices that every layer saves, and what the backward of the largest layer needs
    beside them.
    """
    sizes: list[DenseSize] = []
    device = _device(model)
    with _restored(model), _sizing(sizes):
        own = peak_mib(fn, device)
    layer = max((s.peak - s.saved for s in sizes), default=0)
    predicted = int(own * MIB) + sum(s.saved for s in sizes) + layer
    if not fits(sum(s.pairs for s in sizes), predicted, device, time_limit_s):
        return StepPeaks(own, Peak(predicted / MIB, predicted=True))
    with _restored(model), use("dense"):
        return StepPeaks(own, Peak(peak_mib(fn, device), predicted=False))


def dense_step_peak(fn: Step, model: nn.Module | None = None, time_limit_s: float = 10.0) -> Peak:
    """The ``dense`` of :func:`step_peaks`."""
    return step_peaks(fn, model, time_limit_s).dense


@contextmanager
def _sizing(sizes: list[DenseSize]) -> Iterator[None]:
    def note(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> None:
        with torch.no_grad(), rng_restored(q.device):
            sizes.append(dense_size(prepare(q, k, v, **kwargs)))

    def on_request(request: Request) -> Any:
        note(request.q, request.k, request.v, **request.kwargs)
        return request.run(request.q, request.k, request.v, **request.kwargs)

    def on_sdpa(call: SdpaCall) -> Any:
        note(*call.operands(), **call.kwargs())
        return call.original()

    with intercepting(on_request), watching_sdpa(on_sdpa):
        yield


@contextmanager
def _restored(model: nn.Module | None) -> Iterator[None]:
    parameters = [] if model is None else list(model.parameters())
    modules = [] if model is None else list(model.modules())
    buffers = [] if model is None else list(model.buffers())
    grads, modes = [p.grad for p in parameters], [m.training for m in modules]
    contents = [b.detach().clone() for b in buffers]
    for parameter in parameters:
        parameter.grad = None
    try:
        with rng_restored(_device(model)):
            yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for module, training in zip(modules, modes, strict=True):
            module.training = training
        for buffer, content in zip(buffers, contents, strict=True):
            buffer.detach().copy_(content)


def _device(model: nn.Module | None) -> torch.device:
    if model is not None:
        for tensor in model.parameters():
            return tensor.device
    return torch.device("cpu")
