"""Every backend x every case, out, lse, dq, dk and dv against dense float64 on the same inputs."""

from itertools import combinations, product

import pytest
import torch
from cases import (
    DROPOUTS,
    GROUPINGS,
    LAYOUTS,
    MASKS,
    Case,
    Output,
    all_cases,
    build,
    covering_cases,
    expected,
    run,
)

from flashmod import TileConfig, baselines, numerics
from flashmod.functional import prepare

TILES = {"tiled": TileConfig(8, 16), "triton": TileConfig(16, 16)}


def check(case: Case, backend: str) -> Output:
    inputs, truth = build(case), expected(case)
    got = run(inputs, backend=backend, tiles=TILES[backend])
    ready = prepare(*inputs[:3], **inputs.kwargs)
    grad_out = inputs.grad_out.reshape(ready.q.shape[:3] + inputs.grad_out.shape[-1:])
    unit = numerics.units(ready.q, ready.k, ready.v, grad_out, ready.call.scale)
    logit = numerics.largest_logit(ready.q, ready.k, ready.call.scale)
    half = case.dtype in (torch.float16, torch.bfloat16)
    dense = results(run(inputs, baselines.dense)) if half else None
    allowed = numerics.allowed_errors(case.dtype, results(truth), unit, logit=logit, dense=dense)
    errors = numerics.attention_errors(results(got), results(truth), unit)
    assert errors.within(allowed), f"{errors} exceeds {allowed}"
    lse_error = numerics.error(got.lse, truth.lse, unit=1.0)
    assert lse_error <= (1e-9 if case.dtype == torch.float64 else 1e-5), f"lse: {lse_error}"
    for x, like in zip(got, (*inputs[:1], inputs.grad_lse, *inputs[:3]), strict=True):
        assert x.dtype == like.dtype
    return got


def results(output: Output) -> numerics.Results:
    return numerics.Results(output.out, output.dq, output.dk, output.dv)


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.id)
def test_tiled_equals_definition(case):
    check(case, "tiled")


@pytest.mark.parametrize("case", covering_cases(), ids=lambda case: case.id)
def test_triton_equals_definition(case):
    check(case, "triton")


DTYPE_CASES = [
    Case(layout, mask, dropout_p, grouping, dtype)
    for dtype in (torch.float16, torch.bfloat16, torch.float64)
    for layout, mask, dropout_p, grouping in (
        ("dense", "causal", 0.0, "mha"),
        ("slack", "mixed", 0.25, "gqa"),
        ("holes", "head_fn", 0.25, "mqa"),
    )
]


@pytest.mark.parametrize("backend", TILES)
@pytest.mark.parametrize("case", DTYPE_CASES, ids=lambda case: case.id)
def test_other_dtypes(case, backend):
    check(case, backend)


def test_table_is_as_large_as_promised():
    covering = covering_cases()
    assert len({case.id for case in covering}) == len(covering) >= 96
    assert len({case.id for case in all_cases()}) == len(LAYOUTS) * len(MASKS) * 2 * len(GROUPINGS)
    axes = {"layout": LAYOUTS, "mask": MASKS, "dropout_p": DROPOUTS, "grouping": GROUPINGS}
    for (one, a), (two, b) in combinations(axes.items(), 2):
        met = {(getattr(case, one), getattr(case, two)) for case in covering}
        assert met == set(product(a, b))


def test_slack_and_dead_rows_are_written_as_zero():
    case = Case("slack", "causal", 0.0, "mha")
    got = check(case, "tiled")
    assert (got.out[23:] == 0).all() and (got.dq[23:] == 0).all()
    assert (got.lse[:, 23:] == -torch.inf).all()
    assert (got.dk[:3] == 0).all() and (got.dv[:3] == 0).all()  # keys of a sequence without queries
    assert (got.dk[18:] == 0).all() and (got.dv[18:] == 0).all()
