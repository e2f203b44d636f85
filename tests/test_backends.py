"""Every backend x every case: results and gradients against dense float64 on the same inputs."""

from itertools import combinations, product

import pytest
import torch
from cases import (
    AXES,
    DROPOUTS,
    LAYOUTS,
    MASKS,
    PER_TOKEN,
    SCORES,
    Case,
    Output,
    ScoredOutput,
    all_cases,
    build,
    common_cases,
    covering_cases,
    expected,
    run,
)
from torch import Tensor

from flashmod import TileConfig, baselines, numerics
from flashmod.functional import prepare

TILES = {"tiled": TileConfig(8, 16), "triton": TileConfig(16, 16)}


def check(case: Case, backend: str) -> Output | ScoredOutput:
    inputs, truth = build(case), expected(case)
    got = run(inputs, backend=backend, tiles=TILES[backend])
    ready = prepare(*inputs[:3], **inputs.kwargs)
    grad_out = inputs.grad_out.reshape(ready.q.shape[:3] + inputs.grad_out.shape[-1:])
    unit = numerics.units(ready.q, ready.k, ready.v, grad_out, ready.call.scale)
    logit = numerics.largest_logit(ready.q, ready.k, ready.call.scale)
    half = case.dtype in (torch.float16, torch.bfloat16)
    dense = run(inputs, baselines.dense) if half else None
    # Every entry of dP = dO V^T that a row's weights, which sum to 1 at most, can average. A bias
    # gets p (dP - delta), the sink -p delta, and delta is such an average itself.
    slope = unit.dq / (ready.call.scale * numerics.largest(ready.k))
    units = {"out": unit.out, "dq": unit.dq, "dk": unit.dk, "dv": unit.dv}
    for name, own_unit in (units | {"dbias": slope, "dsink": slope}).items():
        x, y = getattr(got, name, None), getattr(truth, name, None)
        if x is None:
            assert y is None
            continue
        like = None if dense is None else getattr(dense, name)
        limit = allowed(case.dtype, y, own_unit, logit, like)
        error = numerics.error(x, y, own_unit)
        assert error <= limit, f"{name}: {error} exceeds {limit}"
    lse_error = numerics.error(got.lse, truth.lse, unit=1.0)
    assert lse_error <= (1e-9 if case.dtype == torch.float64 else 1e-5), f"lse: {lse_error}"
    like = dict(zip(Output._fields, (*inputs[:1], inputs.grad_lse, *inputs[:3]), strict=True))
    like |= {"dbias": inputs.kwargs.get("attn_mask"), "dsink": inputs.kwargs.get("learnable_sink")}
    for name, x in got._asdict().items():
        assert x is None or x.dtype == like[name].dtype
        assert x is None or name == "out" or x.shape == like[name].shape
    return got


def allowed(
    dtype: torch.dtype, reference: Tensor, unit: float, logit: float, dense: Tensor | None
) -> float:
    """:func:`flashmod.numerics.allowed_errors` of a single result."""
    four = (reference, unit, dense)
    refs, units, denses = (None if x is None else [x] * 4 for x in four)
    return numerics.allowed_errors(
        dtype,
        numerics.Results(*refs),
        numerics.Errors(*units),
        logit=logit,
        dense=None if denses is None else numerics.Results(*denses),
    ).out


def rare_cases() -> list[Case]:
    common = set(common_cases())
    return [case for case in all_cases() if case not in common]


@pytest.mark.parametrize("case", common_cases(), ids=lambda case: case.id)
def test_tiled_equals_definition(case):
    check(case, "tiled")


@pytest.mark.slow
@pytest.mark.parametrize("case", rare_cases(), ids=lambda case: case.id)
def test_tiled_equals_definition_in_the_rest_of_the_table(case):
    check(case, "tiled")


@pytest.mark.parametrize("case", covering_cases(), ids=lambda case: case.id)
def test_triton_equals_definition(case):
    check(case, "triton")


DTYPE_CASES = [
    Case(layout, mask, dropout_p, grouping, scores, dtype)
    for dtype in (torch.float16, torch.bfloat16, torch.float64)
    for layout, mask, dropout_p, grouping, scores in (
        ("dense", "causal", 0.0, "mha", "none"),
        ("slack", "mixed", 0.25, "gqa", "all"),
        ("holes", "head_fn", 0.25, "mqa", "bias_of_keys"),
        ("padded", "images", PER_TOKEN, "gqa", "all"),
        ("cross", "documents", PER_TOKEN, "mqa", "all"),
    )
]


@pytest.mark.parametrize("backend", TILES)
@pytest.mark.parametrize("case", DTYPE_CASES, ids=lambda case: case.id)
def test_other_dtypes(case, backend):
    check(case, backend)


def test_table_is_as_large_as_promised():
    """Any two rows of different axes meet in every set of cases."""
    covering, common, every = covering_cases(), common_cases(), all_cases()
    assert len(set(covering)) == len(covering) == len(MASKS) * len(SCORES)
    assert len(set(every)) == len(every) == 3 * len(set(common))
    assert len({case.id for case in every}) == len(every) >= 10_000
    for (one, a), (two, b) in combinations(AXES.items(), 2):
        for cases in (covering, common, every):
            met = {(getattr(case, one), getattr(case, two)) for case in cases}
            assert met == set(product(a, b)), (one, two)
    quadruples = {(case.layout, case.mask, case.scores, case.dropout_p) for case in common}
    assert quadruples == set(product(LAYOUTS, MASKS, SCORES, DROPOUTS))


def test_slack_and_dead_rows_are_written_as_zero():
    case = Case("slack", "causal", 0.0, "mha")
    got = check(case, "tiled")
    assert (got.out[23:] == 0).all() and (got.dq[23:] == 0).all()
    assert (got.lse[:, 23:] == -torch.inf).all()
    assert (got.dk[:3] == 0).all() and (got.dv[:3] == 0).all()  # keys of a sequence without queries
    assert (got.dk[18:] == 0).all() and (got.dv[18:] == 0).all()
