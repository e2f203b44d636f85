"""float64 on random shapes with one dominant logit near 1e4, beside two independent witnesses."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import numerics
from ..functional import flash_attention, prepare
from ..masks import Mask
from ..measure.oracle import Oracle
from . import truth
from .context import Context, Runner
from .rows import Row, Target, worst

TARGET = Target("<", numerics.FP64_ERROR)
DOMINANT = 1e4
SHAPES = 50


class Shape(NamedTuple):
    """One dense causal call, (1, length, heads, D)."""

    length: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int


class _Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor


class _Errors(NamedTuple):
    """Of one shape."""

    dense: float  # a backend against dense attention: out, dq, dk, dv
    recurrence: float  # a backend against the recurrence: out and lse of one head
    witnesses: float  # dense attention against the recurrence


def run(context: Context) -> Iterator[Row]:
    """Rows of each backend against dense attention and against the per-key recurrence."""
    for runner in context.runners:
        count = context.count(SHAPES)
        subject = f"{count} shapes, one logit near 1e4, fp64: {runner.title}"
        names = (f"{subject} - dense", f"{subject} - per-key recurrence")
        if runner.missing:
            yield from (runner.not_run(name, TARGET) for name in names)
            continue
        shapes = draw(context.seed, count, runner.interpreted, context.quick)
        errors = []
        for number, shape in enumerate(shapes):
            errors.append(_errors(shape, context.seed + number, runner))
            context.tick(number + 1, count)
        yield from _rows(names, runner, shapes, errors)


def _rows(
    names: tuple[str, str], runner: Runner, shapes: list[Shape], errors: list[_Errors]
) -> Iterator[Row]:
    found = [error.dense for error in errors]
    where = f"up to {max(shape.length for shape in shapes)} tokens; out, dq, dk, dv"
    listed = [shape._asdict() for shape in shapes]
    data = {"errors": found, "shapes": listed, "backend": runner.title}
    yield Row(names[0], TARGET, _largest(found), where, data)
    witnesses = _largest([error.witnesses for error in errors])
    both = [x for error in errors for x in (error.recurrence, error.witnesses)]
    detail = f"out, lse of one head; dense - recurrence {witnesses:.1e}"
    yield Row(names[1], TARGET, _largest(both), detail)


def draw(seed: int, count: int, interpreted: bool, quick: bool) -> list[Shape]:
    """Odd lengths, the longest first; D = 64 in half of them, D_v another in a third."""
    rng = random.Random(seed)
    longest = 65 if interpreted else 511 if quick else 4095
    dims = (16, 24, 40) if interpreted else (16, 40, 80, 128)
    shapes = []
    for number in range(count):
        exponent = 1.0 if number == 0 else rng.random()
        length = int(math.exp(exponent * math.log(longest))) // 2 * 2 + 1
        dim = 64 if number % 2 == 0 else rng.choice(dims)
        kv_heads = rng.choice((1, 2)) if length < 700 else 1
        heads = kv_heads * (rng.choice((1, 2)) if length < 700 else 1)
        v_dim = rng.choice(dims) if number % 3 == 0 else dim
        shapes.append(Shape(min(length, longest), heads, kv_heads, dim, v_dim))
    if not interpreted and not quick:
        shapes[1] = shapes[1]._replace(length=4096)
    return shapes


def _errors(shape: Shape, seed: int, runner: Runner) -> _Errors:
    case = _build(shape, seed)
    out, lse, got = _attend(case, runner)
    oracle = Oracle(prepare(*case[:3], mask=Mask(causal=True)), case.grad_out)
    reference, unit = oracle.run(oracle.sample(1.0, seed))
    errors = numerics.attention_errors(got, reference, unit)
    own_out, own_lse = truth.per_key_recurrence(
        case.q[0, :, 0], case.k[0, :, 0], case.v[0, :, 0], shape.dim**-0.5
    )
    pairs = ((out[0, :, 0], own_out, unit.out), (lse[0, 0], own_lse, 1.0))
    return _Errors(
        _largest(list(errors)),
        _largest([numerics.error(*pair) for pair in pairs]),
        numerics.error(reference.out[0, :, 0], own_out, unit.out),
    )


def _attend(case: _Case, runner: Runner) -> tuple[Tensor, Tensor, numerics.Results]:
    """out, lse, and the results with gradients, on the CPU."""
    q, k, v = leaves = [x.to(runner.device, copy=True).requires_grad_() for x in case[:3]]
    out, lse = flash_attention(
        q, k, v, mask=Mask(causal=True), return_lse=True, backend=runner.name
    )
    grads = torch.autograd.grad(out, leaves, case.grad_out.to(runner.device))
    out, lse, *found = (x.detach().cpu() for x in (out, lse, *grads))
    return out, lse, numerics.Results(out, *found)


def _build(shape: Shape, seed: int) -> _Case:
    """Standard normal logits, but one key whose logits lie near 1e4 for every query."""
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, dim: int) -> Tensor:
        size = (1, shape.length, heads, dim)
        return torch.randn(size, generator=generator, dtype=torch.float64)

    q, k = normal(shape.heads, shape.dim), normal(shape.kv_heads, shape.dim)
    # Along the first axis only queries and the dominant key have a part.
    size = math.sqrt(DOMINANT * math.sqrt(shape.dim))
    key = int(torch.randint(shape.length, (), generator=generator))
    q[..., 0], k[..., 0] = size, 0.0
    k[:, key, :, 0] = size
    v = normal(shape.kv_heads, shape.v_dim)
    return _Case(q, k, v, normal(shape.heads, shape.v_dim))


def _largest(errors: list[float]) -> float:
    """A NaN is larger than anything."""
    return worst(dict(enumerate(errors)))[1]
