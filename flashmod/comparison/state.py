"""Put a model and the random generators back exactly as they were."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Undo = Callable[[], None]


class _Part(NamedTuple):
    """A module's class, its attributes, and what the containers among them hold."""

    module: nn.Module
    kind: type
    attributes: dict[str, Any]
    contents: list[tuple[Any, Any]]


class Structure:
    """Classes, attributes, hooks, modes and submodules of a model, but no tensor's values.

    Every container attribute (a list, a dict, torch's dicts of hooks) stays the same object and
    gets its entries back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parts = [_part(module) for module in model.modules()]
        self._required = [(p, p.requires_grad) for p in model.parameters()]

    def apply(self) -> None:
        """Make the model what it was; twice is as good as once."""
        for module, kind, attributes, contents in self._parts:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for container, entries in contents:
                _refill(container, entries)
        for parameter, required in self._required:
            parameter.requires_grad_(required)


def _part(module: nn.Module) -> _Part:
    attributes = dict(vars(module))
    containers = [
        value for value in attributes.values() if isinstance(value, dict | list | set | deque)
    ]
    return _Part(module, type(module), attributes, [(c, copy.copy(c)) for c in containers])


def _refill(container: Any, entries: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(entries)


class Contents:
    """The values of a model's parameters, buffers and other tensor attributes; on the CPU."""

    def __init__(self, model: nn.Module) -> None:
        tensors = {id(t): t for module in model.modules() for t in _tensors(module)}
        self._values = [(t, t.data, t.detach().to("cpu", copy=True)) for t in tensors.values()]
        generators = {id(g): g for m in model.modules() for g in _generators(m)}
        self._states = [(g, g.get_state()) for g in generators.values()]

    def apply(self) -> None:
        """Write the values back. No version is counted, so graphs that hold the tensors live on."""
        for tensor, memory, value in self._values:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                if tensor.data_ptr() != memory.data_ptr():
                    tensor.data = memory
                memory.copy_(value)
        for generator, state in self._states:
            generator.set_state(state)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    plain = (value for value in vars(module).values() if isinstance(value, Tensor))
    held = (*module._parameters.values(), *module._buffers.values(), *plain)
    yield from (t for t in held if t is not None and t.layout == torch.strided and not t.is_meta)


def _generators(module: nn.Module) -> Iterator[torch.Generator]:
    yield from (value for value in vars(module).values() if isinstance(value, torch.Generator))


def set_seed(seed: int) -> None:
    """Seed every generator that :func:`random_restored` restores."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # else the seed would wait for the day it is
        torch.cuda.manual_seed_all(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


@contextmanager
def random_restored() -> Iterator[None]:
    """Leave the generators of Python, NumPy, torch and every CUDA device as they were found."""
    undo: list[Undo] = []
    state, python = torch.get_rng_state(), random.getstate()
    undo += [lambda: torch.set_rng_state(state), lambda: random.setstate(python)]
    if (numpy := sys.modules.get("numpy")) is not None:
        old = numpy.random.get_state()
        undo.append(lambda: numpy.random.set_state(old))
    if torch.cuda.is_initialized():
        states = torch.cuda.get_rng_state_all()
        undo.append(lambda: torch.cuda.set_rng_state_all(states))
    try:
        yield
    finally:
        for step in undo:
            step()


@contextmanager
def gradients_apart(model: nn.Module) -> Iterator[None]:
    """Take every ``.grad``, and the hooks that follow its accumulation, away for a while.

    Those hooks belong to optimizers that step within the backward pass.
    """
    held = [(p, p.grad) for p in model.parameters()]
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
    kept = [(own, copy.copy(own)) for own in hooks if own]
    for parameter, _ in held:
        parameter.grad = None
    for own, _ in kept:  # emptied, since a dict that was taken away would still be called
        own.clear()
    try:
        yield
    finally:
        for parameter, grad in held:
            parameter.grad = grad
        for own, entries in kept:
            _refill(own, entries)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Leave everything of the model, and every random generator, as it was; also on exceptions."""
    structure, contents = Structure(model), Contents(model)
    try:
        with random_restored(), gradients_apart(model):
            yield
    finally:
        structure.apply()
        contents.apply()
