"""Watch a model while it runs, then measure the attention it did."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..baselines import hides
from ..functional import Prepared
from .capture import Captured
from .metrics import (
    ATTENTION_PEAK,
    COVERAGE,
    DENSE_ATTENTION_PEAK,
    DENSE_STEP_PEAK,
    GRAD_ERRORS,
    PADDING_SAVED,
    STEP_PEAK,
    TOKENS_PER_S,
    Measured,
    measure_call,
    measure_step,
)
from .recorder import Recorder
from .steps import Step
from .throughput import Throughput

logger = logging.getLogger(__name__)


class Tracker:
    """What :func:`track` hands out.

    Attributes:
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
        skip_steps: int,
    ) -> None:
        self.model, self.time_limit_s, self.seed = model, time_limit_s, seed
        self.throughput = Throughput(clock, skip_steps)
        self.recorder = Recorder(None if model is None else layer)
        self._call, self._step = Measured({}, set()), Measured({}, set())
        self._measured: Captured | None = None
        self._told = False  # that padding is not counted

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
            ready = self.captured.prepared()
            if _may_hide_padding(ready) and not self._told:
                self._told = True
                logger.warning(
                    "rows are counted as tokens: attn_mask hides pairs, and padding among them is "
                    "not told apart. Pass step(tokens=...) where the batch is padded"
                )
            tokens, padded = _count(ready)
        self.throughput.step(tokens, padded)
        self.recorder.new_pass()

    def measure_step(self, fn: Step) -> None:
        """Measure a step's memory and its dense twin, for :meth:`summary`.

        Args:
            fn: as for :func:`flashmod.measure.step_peak`.
        """
        with self.throughput.paused():
            self._step = self.recorder.through(
                lambda: measure_step(fn, self.model, time_limit_s=self.time_limit_s)
            )

    def summary(self) -> dict[str, float | None]:
        """Every metric by name; None for what could not be measured (the log says why).

        The captured call is measured on the first use and again when another one was captured.
        """
        call = self.captured
        if call is None:
            logger.warning(
                "no attention call was seen. Seen are flashmod's functions and "
                "F.scaled_dot_product_attention outside compiled code; nn.MultiheadAttention calls "
                "it when it trains with need_weights=False"
            )
        elif call is not self._measured:
            with self.throughput.paused(), torch.inference_mode(False):
                self._call = self.recorder.through(
                    lambda: measure_call(call, time_limit_s=self.time_limit_s, seed=self.seed)
                )
            self._measured = call
        names = (ATTENTION_PEAK, DENSE_ATTENTION_PEAK, STEP_PEAK, DENSE_STEP_PEAK)
        return {
            **dict.fromkeys((*names, *GRAD_ERRORS, COVERAGE)),
            **self._call.values,
            **self._step.values,
            TOKENS_PER_S: self.throughput.tokens_per_s,
            PADDING_SAVED: self.throughput.padding_saved,
        }

    @property
    def predicted(self) -> set[str]:
        """Names in :meth:`summary` that come from a closed form, not from a measurement."""
        return self._call.predicted | self._step.predicted


@contextmanager
def track(
    model: nn.Module | None = None,
    *,
    layer: int = 0,
    time_limit_s: float = 10.0,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    skip_steps: int = 1,
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
        skip_steps: first steps that the rate leaves out once others have ended.
    """
    tracker = Tracker(model, layer, time_limit_s, seed, clock, skip_steps)
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
    """Real tokens of a call, and of its batch padded to the longest sequence.

    Where a mask of self-attention goes by keys alone, the keys that no head sees are padding.
    """
    return _count(call.prepared())


def _count(ready: Prepared) -> tuple[int, int]:
    call = ready.call
    lengths = call.q_lengths.tolist()
    tokens, mask = sum(lengths), call.attn_mask
    if mask is not None and _is_self_attention(ready) and mask.shape[2] == 1 < mask.shape[3]:
        shown = mask if mask.dtype == torch.bool else mask != float("-inf")
        keys = torch.arange(mask.shape[3], device=mask.device)
        tokens = int((shown.any(1)[:, 0] & (keys < call.kv_lengths[:, None])).sum())
    return tokens, len(lengths) * max(lengths, default=0)


def _may_hide_padding(ready: Prepared) -> bool:
    """Whether rows may be padding although the call's lengths and key-wise masks say nothing."""
    call = ready.call
    mask, every = call.attn_mask, bool((call.q_lengths == ready.q.shape[1]).all())
    if mask is None or not every or not _is_self_attention(ready):
        return False
    return mask.shape[0] == call.num_sequences and mask.shape[2] > 1 and hides(mask)


def _is_self_attention(ready: Prepared) -> bool:
    return torch.equal(ready.call.q_lengths, ready.call.kv_lengths)
