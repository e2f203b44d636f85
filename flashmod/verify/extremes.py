"""Logits from 1e-8 to 1e6: every result finite and within the accuracy rule."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .. import numerics
from . import results
from .accuracy import judge
from .batches import Batch, Spec, build
from .context import Context, Runner
from .rows import Row, Target, worst

TARGET = Target("<=", 1.0, "x")
DECADES = range(-8, 7)
_FP16_SCORES = 6e4  # above it those of dense float16 overflow, so that the rule has no yardstick
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def run(context: Context) -> Iterator[Row]:
    """A row per decade: the largest share of the allowed error, over backends and dtypes."""
    runners = [runner for runner in context.runners if not runner.missing]
    titles = " and ".join(runner.title for runner in runners)
    decades = DECADES[::7] if context.quick else DECADES
    for number, decade in enumerate(decades if runners else ()):
        shares: dict[str, float] = {}
        for runner in runners:
            for dtype in _DTYPES:
                for kind in ("spread", "offset"):
                    shares |= _shares(10.0**decade, kind, runner, dtype)
        context.tick(number + 1, len(decades))
        where, share = worst(shares)
        name = f"logits near 1e{decade}, share of the allowed error"
        yield Row(name, TARGET, share, f"{titles}; most in {where}")
    for runner in context.runners:
        if runner.missing:
            yield runner.not_run(f"logits from 1e-8 to 1e6: {runner.title}", TARGET)


def _shares(size: float, kind: str, runner: Runner, dtype: torch.dtype) -> dict[str, float]:
    """The share of what is allowed by result; infinite where not all are finite."""
    batch = _batch(size, kind, runner, dtype)
    got = results.run(batch, runner)
    where = f"{kind} {str(dtype)[6:]}, {runner.title}"
    if not all(bool(x.isfinite().all()) for x in got[:5] if x is not None):
        return {f"not finite: {where}": math.inf}
    if dtype == torch.float16 and size > _FP16_SCORES:
        return {f"finite {where}": 0.0}
    return {
        f"{result} of {where}": found.error / (found.allowed + _score_rounding(size, dtype))
        for result, found in judge(batch, got).items()
    }


def _score_rounding(size: float, dtype: torch.dtype) -> float:
    """What float32 scores of that size may err by the rule for float32.

    The half dtypes have such scores too. Dense torch has rounder ones, but uses the same in both
    passes, so that where one weight is 1 its error, the yardstick, can be 0.
    """
    return numerics.FP32_ERROR * size / numerics.FP32_LOGIT if dtype.itemsize == 2 else 0.0


def _batch(size: float, kind: str, runner: Runner, dtype: torch.dtype) -> Batch:
    """``spread``: logits of either sign up to ``size``; ``offset``: that plus or minus a few."""
    length = 33 if runner.interpreted else 97
    spec = Spec((length,), (length,), "dense", 1, 1, 64, 64, causal=True, scale=1.0)
    batch = build(spec, 2)
    part = math.sqrt(size)
    if kind == "offset":
        # Noise of size 1, or of the logits' own where those are smaller.
        noise = min(1.0, part) / math.sqrt(8)
        # Noise across the offset, which lies along all axes: 64 times 1/8 squared is 1.
        q, k = ((x - x.mean(-1, keepdim=True)) * noise + part / 8 for x in (batch.q, batch.k))
    else:
        q, k = batch.q, batch.k
        largest = float(torch.einsum("bihd,bjhd->bhij", q, k).abs().max())
        q, k = (x * part / math.sqrt(largest) for x in (q, k))
    return batch._replace(q=q, k=k).to(dtype)
