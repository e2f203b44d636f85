"""fp32, bf16 and fp16 by the accuracy rule, and gradients against central finite differences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import numerics
from . import drawing, results
from .batches import Batch, Spec, build
from .context import Context, Runner
from .results import Results
from .rows import Row, Target, worst

RULE = Target("<=", 1.0, "x")
FP32 = Target("<=", numerics.FP32_ERROR)
DIFFERENCES = Target("<", 1e-6)
_STEP = 1e-5
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(context: Context) -> Iterator[Row]:
    """A row per dtype, and one of finite differences, for every backend."""
    for runner in context.runners:
        for dtype in _DTYPES:
            wide = dtype == torch.float32
            what = "largest error" if wide else "share of the allowed error"
            name, target = f"{str(dtype)[6:]}, {what}: {runner.title}", FP32 if wide else RULE
            if runner.missing:
                yield runner.not_run(name, target)
            else:
                yield _rule(runner, dtype, name, target)
    for runner in context.runners:
        name = f"gradients - finite differences, fp64: {runner.title}"
        if runner.missing:
            yield runner.not_run(name, DIFFERENCES)
        else:
            yield _differences(context, runner, name)


def _specs(small: bool) -> dict[str, Spec]:
    lengths = (65,) if small else (333,)
    plain = Spec(lengths, lengths, "dense", 4, 2, 64, 64, causal=True)
    ragged = ((17, 0, 31), (21, 4, 31)) if small else ((150, 0, 61), (170, 4, 61))
    return {"causal": plain, "all features": drawing.everything(*ragged, 64 if not small else 32)}


def _rule(runner: Runner, dtype: torch.dtype, name: str, target: Target) -> Row:
    measured: dict[str, Judged] = {}
    for kind, spec in _specs(runner.interpreted).items():
        batch = build(spec, 1, dtype)
        judged = judge(batch, results.run(batch, runner))
        measured |= {f"{result}, {kind}": found for result, found in judged.items()}
    where, share = worst({place: found.share for place, found in measured.items()})
    error = measured[where].error
    if target is FP32:  # no logit comes near 50, so that what is allowed is the target itself
        return Row(name, target, error, where)
    return Row(name, target, share, f"{where}: {error:.1e}")


class Judged(NamedTuple):
    """An error and what it may be at most."""

    error: float
    allowed: float

    @property
    def share(self) -> float:
        return self.error / self.allowed if self.allowed else float(self.error > 0)


def judge(batch: Batch, got: Results) -> dict[str, Judged]:
    """The errors of out, dq, dk, dv and what :func:`flashmod.numerics.allowed_errors` allows."""
    dtype, truth = batch.q.dtype, results.definition(batch)
    dense = _results(results.definition(batch, dtype)) if dtype.itemsize == 2 else None
    own = results.units(batch)
    unit = numerics.Errors(*(own[name] for name in numerics.Errors._fields))
    q, k = (x.double().nan_to_num(0.0).flatten(0, -3) for x in (batch.q, batch.k))
    reference, logit = _results(truth), numerics.largest_logit(q, k, batch.scale)
    allowed = numerics.allowed_errors(dtype, reference, unit, logit=logit, dense=dense)
    errors = numerics.attention_errors(_results(got), reference, unit)
    judged = map(Judged, errors, allowed)
    return dict(zip(numerics.Errors._fields, judged, strict=True))


def _results(x: Results) -> numerics.Results:
    return numerics.Results(x.out, x.dq, x.dk, x.dv)


def _differences(context: Context, runner: Runner, name: str) -> Row:
    """Slopes of the definition along random directions beside a backend's gradients."""
    lens = ((9, 0, 14), (12, 3, 14)) if runner.interpreted else ((23, 0, 41), (30, 3, 41))
    batch = build(drawing.everything(*lens, 16), context.seed)
    got = results.run(batch, runner)
    operands = {
        "q": (batch.q, got.dq), "k": (batch.k, got.dk), "v": (batch.v, got.dv),
        "attn_mask": (batch.attn_mask, got.dbias), "sink": (batch.sink, got.dsink),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(context.seed)
    errors = {}
    for number, (operand, (x, gradient)) in enumerate(operands.items()):
        assert x is not None and gradient is not None
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        direction = torch.where(x.isfinite(), direction, 0.0)
        slope = (_value(batch, operand, x + _STEP * direction)
                 - _value(batch, operand, x - _STEP * direction)) / (2 * _STEP)  # fmt: skip
        # A random direction meets a share of the gradient about as long as the gradient is.
        errors[operand] = abs(slope - float((gradient * direction).sum())) / float(gradient.norm())
        context.tick(number + 1, len(operands))
    _, largest = worst(errors)
    listed = ", ".join(f"{operand} {error:.1e}" for operand, error in errors.items())
    return Row(
        name, DIFFERENCES, largest, f"all features, central, along random directions: {listed}"
    )


def _value(batch: Batch, operand: str, x: Tensor) -> float:
    """What the gradients are those of: sums of out and of the finite lse, weighted."""
    changed = Batch(**{**batch._asdict(), operand: x})
    found = results.definition(changed, gradients=False)
    lse = torch.where(found.lse.isfinite(), found.lse, 0.0)
    out = torch.where(batch.grad_out.isfinite(), found.out * batch.grad_out, 0.0)
    return float(out.sum() + (lse * batch.grad_lse).sum())
