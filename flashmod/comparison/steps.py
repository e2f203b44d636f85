"""One step of a model, seeded and repeatable: forward, loss, backward."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from ..numerics import error
from . import batch as batches
from .state import set_seed

Loss = Callable[..., Tensor]


class Result(NamedTuple):
    """What a step gave: float outputs by path, gradients by parameter, and its random draws."""

    outputs: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    drew: bool


class Step:
    """A step of ``model`` on copies of one batch; the same random numbers every time.

    Args:
        loss_fn: as for :func:`flashmod.compare`.
        seed: of the random generators before each step, and of the default loss.
    """

    def __init__(self, model: nn.Module, batch: Any, loss_fn: Loss | None, seed: int) -> None:
        self.model, self.batch, self.loss_fn, self.seed = model, batch, loss_fn, seed
        trains = any(p.requires_grad for p in model.parameters())
        self.backward = torch.is_grad_enabled() and trains

    def prepared(self) -> Callable[[], Any]:
        """The step with its batch copied and its seed set; returns the model's output.

        Gradients stay in ``.grad``, where :meth:`forget` removes them.
        """
        self.forget()
        batch = batches.copied(self.batch)
        set_seed(self.seed)
        return lambda: self._forward_backward(batch)

    def result(self) -> Result:
        """Run it and collect what it gave."""
        run = self.prepared()
        before = _states()
        output = run()
        drew = any(not torch.equal(a, b) for a, b in zip(before, _states(), strict=True))
        parameters = self.model.named_parameters() if self.backward else ()
        grads = {name: p.grad for name, p in parameters if p.requires_grad}
        self.forget()
        return Result(floats(output), grads, drew)

    def forget(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def _forward_backward(self, batch: Any) -> Any:
        output = batches.call(self.model, batch)
        if self.backward:
            loss = self._loss(output, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(f"loss_fn must return one number as a tensor, got {what}")
            loss.backward()
        return output

    def _loss(self, output: Any, batch: Any) -> Tensor:
        if self.loss_fn is None:
            return default_loss(output, self.seed)
        return self.loss_fn(output, batch) if _takes_batch(self.loss_fn) else self.loss_fn(output)


def default_loss(output: Any, seed: int) -> Tensor:
    """A ``loss`` entry or attribute of the output, else its floats weighted by seeded noise.

    Raises:
        ValueError: no output has a gradient.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.numel() == 1 and own.requires_grad:
        return own
    generator = torch.Generator().manual_seed(seed)
    terms = []
    for x in floats(output, detach=False).values():
        # Rounded to 8 bits, so that every dtype has the same weights.
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float32).bfloat16()
        wide = torch.promote_types(x.dtype, torch.float32)
        if x.requires_grad:
            terms.append((x.to(wide) * noise.to(x.device, wide)).sum() / math.sqrt(x.numel() or 1))
    if not terms:
        raise ValueError("no output of the model has a gradient: pass loss_fn, or train=False")
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def floats(output: Any, detach: bool = True) -> dict[str, Tensor]:
    """The float tensors in an output, by path."""
    leaves, _ = tree_flatten_with_path(output)
    found = {keystr(path): x for path, x in leaves if isinstance(x, Tensor)}
    kept = {path: x for path, x in found.items() if x.is_floating_point()}
    return {path: x.detach().clone() if detach else x for path, x in kept.items()}


def double_step(step: Step) -> Step:
    """The same step in float64, on a copy of the model with the weights that it has now."""
    model = copy.deepcopy(step.model).double()
    return Step(model, batches.copied(step.batch, double=True), step.loss_fn, step.seed)


@contextmanager
def double_precision(device: torch.device) -> Iterator[None]:
    """New floats are float64, and autocast is off."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(before)


def output_errors(found: Result, truth: Result, valid: Tensor | None) -> dict[str, float]:
    """Error of each output that both have, over the rows that are no padding."""
    return {
        path: error(_rows(x, valid), _rows(truth.outputs[path], valid))
        for path, x in found.outputs.items()
        if path in truth.outputs and truth.outputs[path].shape == x.shape
    }


def _rows(x: Tensor, valid: Tensor | None) -> Tensor:
    """The rows of tokens, where ``x`` is (N, S, ...) or (S, N, ...) for the (N, S) mask."""
    if valid is None or x.dim() < 2:
        return x
    for mask in (valid, valid.T):
        if x.shape[:2] == mask.shape:
            return x[mask.to(x.device)]
    return x


def gradient_errors(found: Result, truth: Result) -> dict[str, float]:
    """Error of every parameter's gradient that the truth has.

    Relative to the largest gradient in the same module: one that is 0 but for rounding, such as
    that of a key's bias, is no measure of itself.
    """
    sizes: dict[str, float] = {}
    for name, grad in truth.grads.items():
        if grad is not None and grad.numel():
            owner, largest = name.rpartition(".")[0], grad.abs().max().item()
            sizes[owner] = max(sizes.get(owner, 0.0), largest)
    errors = {}
    for name, grad in truth.grads.items():
        other = found.grads.get(name)
        if grad is not None:
            unit = sizes.get(name.rpartition(".")[0], 0.0)
            errors[name] = math.inf if other is None else error(other, grad, unit)
        elif other is not None:
            errors[name] = math.inf if bool(other.any()) else 0.0
    return errors


def _takes_batch(function: Loss) -> bool:
    """Whether ``function`` has a second argument that must be given."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in plain and p.default is inspect.Parameter.empty]
    return len(needed) > 1


def _states() -> list[Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]
