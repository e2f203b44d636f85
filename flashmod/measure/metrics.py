"""Everything that can be measured of one attention call and of one step, by metric name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from ..numerics import Results
from .capture import Captured, Tensors
from .dense_memory import Peak, attention_peak, dense_attention_peak, metered_repeat
from .gradient_error import gradient_error
from .steps import Step, step_peaks

logger = logging.getLogger(__name__)
ATTENTION_PEAK = "memory/attention_peak_mib"
DENSE_ATTENTION_PEAK = "memory/dense_attention_peak_mib"
STEP_PEAK = "memory/step_peak_mib"
DENSE_STEP_PEAK = "memory/dense_step_peak_mib"
COVERAGE = "grad_error/coverage"
GRAD_ERRORS = tuple(f"grad_error/{name}" for name in ("out", "dq", "dk", "dv"))
TOKENS_PER_S = "throughput/tokens_per_s"
PADDING_SAVED = "throughput/padding_saved"


class Measured(NamedTuple):
    """Values by metric name, and the names whose value comes from a closed form."""

    values: dict[str, float]
    predicted: set[str]

    def note(self, name: str, peak: Peak) -> None:
        self.values[name] = peak.mib
        if peak.predicted:
            self.predicted.add(name)


def measure_call(
    call: Captured,
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
    memory: bool = True,
    grad_error: bool = True,
) -> Measured:
    """Attention memory, its dense twin and the gradient errors, from as few repeats as possible.

    What cannot be measured is left out, and a warning says why.

    Args:
        time_limit_s, seed: as for :func:`flashmod.measure.track`.
        memory, grad_error: what is wanted.
    """
    measured = Measured({}, set())

    def repeat(leaves: Tensors, grad_out: Tensor) -> Results:
        if not memory:
            return call.repeat(leaves, grad_out)
        measured.values[ATTENTION_PEAK], results = metered_repeat(call, leaves, grad_out)
        return results

    if grad_error:
        with explained("gradient error"):
            error = gradient_error(call, time_limit_s, seed, repeat)
            measured.values.update(zip(GRAD_ERRORS, error.errors, strict=True))
            measured.values[COVERAGE] = error.coverage
    if memory and ATTENTION_PEAK not in measured.values:
        with explained("attention memory"):
            measured.values[ATTENTION_PEAK] = attention_peak(call, seed)
    if memory:
        with explained("dense attention memory"):
            peak = dense_attention_peak(call, time_limit_s, seed)
            measured.note(DENSE_ATTENTION_PEAK, peak)
    return measured


def measure_step(
    fn: Step, model: nn.Module | None = None, *, time_limit_s: float = 10.0
) -> Measured:
    """Memory of a step and its dense twin; see :func:`flashmod.measure.step_peaks`."""
    measured = Measured({}, set())
    with explained("step memory"):
        peaks = step_peaks(fn, model, time_limit_s)
        measured.values[STEP_PEAK] = peaks.own
        measured.note(DENSE_STEP_PEAK, peaks.dense)
    return measured


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what keeps ``what`` from being measured into a warning."""
    try:
        yield
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        logger.warning("%s is not measured: %s", what, error)
