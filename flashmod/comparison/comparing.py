"""A model before and after the swap, on one batch and one seed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..integrations.scan import doors_for
from ..integrations.sdpa_routing import Routing, route_sdpa
from ..integrations.torch_nn import SwapReport, swap_attention
from ..measure import count_tokens, peak_mib, track
from ..measure.room import available_bytes
from . import batch as batches
from . import dropout, steps
from .results import Comparison, Setting, Sides
from .state import Contents, Structure, restored
from .steps import Loss, Result, Step

_WIDER = 2.0  # float64 costs about so much more time than float32 on a CPU
_ROUGH = 1e-4  # an error of float32 gradients that rounding alone does not explain
_CALL_LIMIT_S = 10.0  # for checking one attention call, and for its dense twin
_SWAPS = ("mask", "causal", "window")  # options that change what a model computes


def compare(
    model: nn.Module,
    batch: Any,
    loss_fn: Loss | None = None,
    *,
    seed: int = 0,
    repeats: int = 5,
    time_limit_s: float = 30.0,
    **options: Any,
) -> Comparison:
    """Run a step of ``model`` as it is and with its attention swapped, and set them side by side.

    Every ``nn.MultiheadAttention`` is swapped; where there is none, the model's calls of
    ``F.scaled_dot_product_attention`` are routed. The model runs in the mode that it is in, without
    backward where gradients are off or all parameters are frozen. For the errors its dropout is
    switched off: two dropouts differ by their random numbers; memory and time are those with it.
    The model is restored exactly, also on exceptions: weights, buffers, gradients, modes, hooks,
    attributes, and the random generators.

    Args:
        batch: a tensor, a tuple of arguments ``model(*batch)`` or a dict, ``model(**batch)``.
        loss_fn: from ``output``, or from ``output, batch``, to one number. By default the output's
            own ``loss``, or all its floats weighted by seeded noise.
        seed: of the random numbers of every step.
        repeats: timed steps on each side, in turns, after one that is not; fewer where they
            would take longer than the limit.
        time_limit_s: about the longest time for the float64 copy, and for all timed steps.
        options: of :func:`flashmod.swap_attention`.
    Raises:
        ValueError: there is nothing to swap; says what the model calls instead. Or the loss is no
            single number.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    with restored(model):
        return _Comparing(model, batches.plain(batch), loss_fn, seed, repeats, time_limit_s).run(
            options
        )


@dataclass
class _Comparing:
    model: nn.Module
    batch: Any
    loss_fn: Loss | None
    seed: int
    repeats: int
    time_limit_s: float
    notes: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.step = Step(self.model, self.batch, self.loss_fn, self.seed)
        self.contents = Contents(self.model)
        tensors = [*self.model.parameters(), *self.model.buffers()]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)

    def run(self, options: dict[str, Any]) -> Comparison:
        padding = batches.padding_of(batches.named(self.batch, self.model.forward))
        valid = None if padding is None else padding.valid
        before = _Side(self, Structure(self.model))
        started = time.perf_counter()
        first = before.result()
        seconds = time.perf_counter() - started
        swap = self._swap(options)
        after = _Side(self, Structure(self.model), routes=not swap.swapped)
        second = after.result()
        if not swap.swapped and not after.calls:
            raise ValueError(self._nothing(swap))
        memory = Sides(before.memory(), after.memory())
        truth = self._truth(before, seconds, memory.before)
        self._note(first, second, options)
        reference = truth or first
        errors = [
            (steps.output_errors(r, reference, valid), steps.gradient_errors(r, reference))
            for r in ((first, second) if truth else (second,))
        ]
        outputs, parameters = zip(*errors, strict=True)
        medians = self._seconds(before, after)
        found = Comparison(
            self._setting(), swap, after.calls, "float64" if truth else "unswapped",
            _sides(outputs), _sides(parameters), memory,
            medians, (before.attention(), after.attention()),
            frozenset(after.predicted), padding, self.notes,
        )  # fmt: skip
        if (found.gradient_error.before or 0.0) > _ROUGH and self.dtype == torch.float32:
            self.notes.append(
                "the unswapped model's own gradients are that far from float64: often a ReLU whose "
                "input is so near 0 that rounding decides on which side. Compare the medians"
            )
        return found

    def _swap(self, options: dict[str, Any]) -> SwapReport:
        if any(isinstance(m, nn.MultiheadAttention) for m in self.model.modules()):
            return swap_attention(self.model, **options)
        if options:
            raise ValueError(
                f"{', '.join(options)} are options of swapped modules, and the model has no "
                "nn.MultiheadAttention"
            )
        return SwapReport()

    def _nothing(self, swap: SwapReport) -> str:
        skipped = [f"{layer.name}: {', '.join(layer.notes)}" for layer in swap.skipped]
        lines = ["there is nothing to swap in the model", *skipped, *doors_for(self.model)]
        return "\n  ".join(lines)

    def _truth(self, before: _Side, seconds: float, memory: float | None) -> Result | None:
        """The step in float64, or a note that says why not."""
        width = torch.finfo(self.dtype).bits / 64
        numbers = sum(t.numel() for t in (*self.model.parameters(), *self.model.buffers()))
        needed = int(16 * numbers + (memory or 0) * 2**20 / width)
        free = available_bytes(self.device) if self.device.type in ("cpu", "cuda") else needed
        if needed > free or seconds * _WIDER > self.time_limit_s:
            self.notes.append(
                f"no float64 copy: it would take about {needed / 2**20:,.0f} MiB "
                f"({free / 2**20:,.0f} are free) and {seconds * _WIDER:.0f} s (time_limit_s="
                f"{self.time_limit_s:g}); errors are differences from the unswapped model"
            )
            return None
        try:
            with before.ready(dropping=False), steps.double_precision(self.device):
                return steps.double_step(self.step).result()
        except Exception as error:  # whatever a model may not like about a copy or about float64
            self.notes.append(
                f"no float64 copy ({type(error).__name__}: {str(error).splitlines()[0]}); errors "
                "are differences from the unswapped model"
            )
            return None

    def _note(self, first: Result, second: Result, options: dict[str, Any]) -> None:
        changing = [f"{name}={options[name]}" for name in _SWAPS if options.get(name)]
        if changing:
            self.notes.append(
                f"{', '.join(changing)} changes what the model computes: the errors are "
                "differences between two models"
            )
        if first.drew or second.drew:
            self.notes.append(
                "the model draws random numbers beside dropout; both sides start from one seed, "
                "but errors may be differences of these numbers"
            )
        lost = [path or "the output" for path in first.outputs if path not in second.outputs]
        if lost:
            self.notes.append(f"not compared, for the swapped model has none: {', '.join(lost)}")
        if not self.step.backward:
            self.notes.append("no gradients: they are switched off, or every parameter is frozen")

    def _seconds(self, before: _Side, after: _Side) -> Sides:
        """Medians of steps in turns; the first two are left out where there is time for more."""
        rounds: list[tuple[float, float]] = []
        end = time.perf_counter() + self.time_limit_s
        while len(rounds) <= self.repeats and (not rounds or time.perf_counter() < end):
            rounds.append((before.seconds(), after.seconds()))
        rounds = rounds[1:] or rounds
        self.repeats = len(rounds)
        return Sides(*map(statistics.median, zip(*rounds, strict=True)))

    def _setting(self) -> Setting:
        return Setting(
            type(self.model).__name__, sum(p.numel() for p in self.model.parameters()),
            self.model.training, self.step.backward, str(self.dtype).removeprefix("torch."),
            str(self.device), self.seed, self.repeats,
        )  # fmt: skip

    def synchronise(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


class _Side:
    """The model with or without the swap; each measurement starts from the same state."""

    def __init__(self, owner: _Comparing, structure: Structure, routes: bool = False) -> None:
        self.owner, self.structure, self.routes = owner, structure, routes
        self.calls = 0
        self.predicted: set[str] = set()

    @contextmanager
    def ready(self, dropping: bool = True) -> Iterator[Routing | None]:
        self.structure.apply()
        try:
            dropped = [] if dropping else dropout.switch_off(self.owner.model)
            if dropped and not self.owner.dropped:
                self.owner.dropped = dropped
                self.owner.notes.append(
                    "errors are without dropout, memory and time with it: "
                    + ", ".join(dropped[:4] + [f"{len(dropped) - 4} more"] * (len(dropped) > 4))
                )
            if not self.routes:
                yield None
                return
            with route_sdpa(early_imports=True) as routing:
                yield routing
        finally:
            self.owner.step.forget()
            self.structure.apply()
            self.owner.contents.apply()

    def result(self) -> Result:
        with self.ready(dropping=False) as routing:
            found = self.owner.step.result()
        self.calls = routing.calls if routing else 0
        for reason, count in routing.left_to_torch.items() if routing else ():
            self.owner.notes.append(f"{count} calls of SDPA were left to torch: {reason}")
        return found

    def memory(self) -> float | None:
        with self.ready():
            try:
                return peak_mib(self.owner.step.prepared(), self.owner.device)
            except (RuntimeError, ValueError) as error:
                self.owner.notes.append(f"memory of a step is not measured: {error}")
                return None

    def seconds(self) -> float:
        with self.ready():
            run = self.owner.step.prepared()
            self.owner.synchronise()
            started = time.perf_counter()
            run()
            self.owner.synchronise()
            return time.perf_counter() - started

    def attention(self) -> dict[str, float]:
        """Metrics of one attention call, empty where none is seen."""
        limit = min(self.owner.time_limit_s, _CALL_LIMIT_S)
        with self.ready(), track(self.owner.model, time_limit_s=limit) as tracker:
            self.owner.step.prepared()()
            if tracker.captured is None:
                return {}
            tokens, padded = count_tokens(tracker.captured)
            tracker.throughput.step(tokens, padded)
            found = tracker.summary()
            self.predicted = tracker.predicted
        found["throughput/tokens_per_s"] = None  # of the measurement, not of the model
        lengths = tracker.captured.prepared().call.q_lengths
        found |= {"data/seq_len": float(lengths.max()), "data/tokens": float(tokens)}
        return {name: value for name, value in found.items() if value is not None}


def _sides(errors: tuple[dict[str, float], ...]) -> dict[str, Sides]:
    """One entry a name; with errors of one side only, those are of the swapped model."""
    before = errors[0] if len(errors) > 1 else {}
    names = dict.fromkeys(name for found in errors for name in found)
    return {name: Sides(before.get(name), errors[-1].get(name)) for name in names}
