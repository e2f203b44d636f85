"""Watch a model while it runs, then measure the attention it did."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics import Results
from ..spec import spans
from .capture import Captured, Tensors
from .dense_memory import attention_peak, dense_attention_peak, metered_repeat
from .gradient_error import gradient_error
from .recorder import Recorder
from .steps import Step, dense_step_peak, step_peak
from .throughput import Throughput

logger = logging.getLogger(__name__)
ATTENTION_PEAK = "memory/attention_peak_mib"
DENSE_ATTENTION_PEAK = "memory/dense_attention_peak_mib"
STEP_PEAK = "memory/step_peak_mib"
DENSE_STEP_PEAK = "memory/dense_step_peak_mib"
COVERAGE = "grad_error/coverage"
GRAD_ERRORS = tuple(f"grad_error/{name}" for name in ("out", "dq", "dk", "dv"))
TOKENS_PER_S = "throughput/tokens_per_s"
PADDING_SAVED = "throughput/padding_saved"


class Tracker:
    """What :func:`track` hands out.

    Attributes:
        predicted: names in :meth:`summary` that come from a closed form, not from a measurement.
        throughput: counts what :meth:`step` is told.
        captured: the attention call that is measured, once one was seen.
    """

    def __init__(
        self,
        model: nn.Module | None,
        layer: int,
        time_limit_s: float,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        self.model, self.time_limit_s, self.seed = model, time_limit_s, seed
        self.predicted: set[str] = set()
        self.throughput = Throughput(clock)
        self.recorder = Recorder(None if model is None else layer)
        self._step_metrics: dict[str, float | None] = {}
        self._call_metrics: dict[str, float | None] = {}
        self._measured: Captured | None = None

    @property
    def captured(self) -> Captured | None:
        return self.recorder.captured

    def step(self, tokens: int | None = None, padded: int | None = None) -> None:
        """A training step has ended: count its tokens and time.

        Args:
            tokens: real tokens of the step; read from the attention call by default.
            padded: N * longest sequence, for ``padding_saved``; likewise.
        """
        if self.captured is not None and self.captured.q.is_cuda:
            torch.cuda.synchronize(self.captured.q.device)
        if tokens is None:
            if self.captured is None:
                raise ValueError("tokens=None reads the attention call, but none was seen so far")
            tokens, padded = count_tokens(self.captured)
        self.throughput.step(tokens, padded)
        self.recorder.new_pass()

    def step_peak(self, fn: Step) -> float:
        """``memory/step_peak_mib`` of ``fn``; see :func:`flashmod.measure.step_peak`."""
        with self.throughput.paused():
            peak = self.recorder.through(lambda: step_peak(fn, self.model))
        self._step_metrics[STEP_PEAK] = peak
        return peak

    def dense_step_peak(self, fn: Step) -> float:
        """``memory/dense_step_peak_mib`` of ``fn``, measured or predicted."""
        with self.throughput.paused():
            peak = self.recorder.through(lambda: dense_step_peak(fn, self.model, self.time_limit_s))
        self._note(DENSE_STEP_PEAK, peak.predicted)
        self._step_metrics[DENSE_STEP_PEAK] = peak.mib
        return peak.mib

    def summary(self) -> dict[str, float | None]:
        """Every metric by name; None for what could not be measured (the log says why).

        The captured call is measured on the first use and again when another one was captured.
        """
        if self.captured is not self._measured or not self._call_metrics:
            with self.throughput.paused(), torch.inference_mode(False):
                self._call_metrics = self.recorder.through(self._measure)
            self._measured = self.captured
        return {
            **self._call_metrics,
            **self._step_metrics,
            TOKENS_PER_S: self.throughput.tokens_per_s,
            PADDING_SAVED: self.throughput.padding_saved,
        }

    def _measure(self) -> dict[str, float | None]:
        names = (ATTENTION_PEAK, DENSE_ATTENTION_PEAK, *GRAD_ERRORS, COVERAGE)
        metrics: dict[str, float | None] = dict.fromkeys(names)
        call = self.captured
        if call is None:
            logger.warning(
                "no attention call was seen. Seen are flashmod's functions and "
                "F.scaled_dot_product_attention outside compiled code; nn.MultiheadAttention calls "
                "it when it trains with need_weights=False"
            )
            return metrics
        with _explained("dense attention memory"):
            dense = dense_attention_peak(call, self.time_limit_s, self.seed)
            metrics[DENSE_ATTENTION_PEAK] = dense.mib
            self._note(DENSE_ATTENTION_PEAK, dense.predicted)

        def repeat(leaves: Tensors, grad_out: Tensor) -> Results:
            metrics[ATTENTION_PEAK], results = metered_repeat(call, leaves, grad_out)
            return results

        with _explained("gradient error"):
            error = gradient_error(call, self.time_limit_s, self.seed, repeat)
            metrics |= dict(zip(GRAD_ERRORS, error.errors, strict=True))
            metrics[COVERAGE] = error.coverage
        if metrics[ATTENTION_PEAK] is None:
            with _explained("attention memory"):
                metrics[ATTENTION_PEAK] = attention_peak(call, self.seed)
        return metrics

    def _note(self, name: str, predicted: bool) -> None:
        (self.predicted.add if predicted else self.predicted.discard)(name)


@contextmanager
def track(
    model: nn.Module | None = None,
    *,
    layer: int = 0,
    time_limit_s: float = 10.0,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Tracker]:
    """Watch the attention calls of any model; ``summary()`` measures one of them afterwards.

    Kept are detached references to q, k, v and the output's gradient of one call, the latest that
    fits: linear memory, freed with the tracker. Nothing else changes: results, random numbers,
    gradients and hooks are those of a run that is not watched.

    Args:
        model: whose forward passes are told apart, to find ``layer``. Without one, or when its own
            ``forward`` is not called, ``step()`` tells passes apart; without a model the latest
            call of all is kept.
        layer: number of the attention call within a forward pass.
        time_limit_s: about the time that checking gradients may take, and dense attention.
        seed: of the sample of rows, and of a gradient where no backward ran.
        clock: seconds, for ``throughput/tokens_per_s``.
    """
    tracker = Tracker(model, layer, time_limit_s, seed, clock)
    hook = None
    if model is not None:
        hook = model.register_forward_pre_hook(lambda *_: tracker.recorder.new_pass())
    try:
        with tracker.recorder.watching():
            yield tracker
    finally:
        if hook is not None:
            hook.remove()


def count_tokens(call: Captured) -> tuple[int, int]:
    """Real tokens of a call, and of its batch padded to the longest sequence."""
    ready = call.prepared()
    lengths = [s.limits.q_len for s in spans(ready.call, ready.q, ready.k)]
    tokens, mask = sum(lengths), ready.call.key_mask
    if mask is not None and mask.shape == ready.q.shape[:2]:  # padding of self-attention
        tokens = int(mask.sum())
    return tokens, len(lengths) * max(lengths, default=0)


@contextmanager
def _explained(what: str) -> Iterator[Any]:
    try:
        yield
    except (ValueError, NotImplementedError, RuntimeError) as error:
        logger.warning("%s is not measured: %s", what, error)
