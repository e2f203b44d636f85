"""The accuracy measure itself: what it counts, what it forgives and what it must not forgive."""

import math

import pytest
import torch

from flashmod import numerics
from flashmod.numerics import Errors, Results

NAN, INF = math.nan, math.inf


def test_error_is_relative_to_the_larger_of_reference_and_unit():
    x, ref = torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0])
    assert numerics.error(x, ref) == 0.25
    assert numerics.error(x, ref, unit=1.0) == 0.25
    assert numerics.error(x, ref, unit=5.0) == 0.1


def test_error_of_a_result_that_cancels_is_judged_by_its_unit():
    ref = torch.zeros(3)
    assert numerics.error(torch.full((3,), 1e-6), ref, unit=1.0) == pytest.approx(1e-6)
    assert numerics.error(torch.full((3,), 1e-6), ref) == INF
    assert numerics.error(ref, ref) == 0.0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_error_never_forgives_what_is_not_finite(bad):
    error = numerics.error(torch.tensor([0.0, bad]), torch.tensor([0.0, 1.0]), unit=1.0)
    assert not error <= 1e30


def test_error_takes_equal_infinities_as_equal():
    lse = torch.tensor([-INF, 2.0])
    assert numerics.error(lse, lse.clone()) == 0.0
    assert numerics.error(torch.tensor([-INF, 3.0]), lse) == 0.5


def test_error_compares_in_float64():
    ref = torch.tensor([1.0], dtype=torch.float64) + 1e-12
    assert numerics.error(torch.ones(1), ref) == pytest.approx(1e-12, rel=1e-3)


def test_error_refuses_shapes_that_would_broadcast():
    with pytest.raises(ValueError, match=r"\(1,\).*\(3,\)"):
        numerics.error(torch.zeros(1), torch.zeros(3))


def test_error_of_nothing_is_zero():
    assert numerics.error(torch.zeros(0, 4), torch.zeros(0, 4)) == 0.0


def test_largest_ignores_what_is_not_finite():
    assert numerics.largest(torch.tensor([NAN, -3.0, INF])) == 3.0
    assert numerics.largest(torch.tensor([NAN])) == 0.0


@pytest.mark.parametrize("block", [1, 40, 1 << 22])
def test_largest_product_is_exact_whatever_the_block(monkeypatch, block):
    monkeypatch.setattr(numerics, "_BLOCK_ELEMENTS", block)
    rows, columns = torch.randn(13, 4, 8), torch.randn(7, 2, 8)
    products = torch.einsum("rhd,khd->hrk", rows, columns.repeat_interleave(2, 1))
    assert numerics.largest_product(rows, columns) == pytest.approx(products.abs().max().item())


def test_units_are_the_sizes_of_the_terms():
    q, k, v, grad = (torch.randn(2, 5, 2, 4) for _ in range(4))
    dp = torch.einsum("bqhd,bkhd->bhqk", grad, v).abs().max().item()
    unit = numerics.units(q, k, v, grad, 0.5)
    assert unit.out == v.abs().max()
    assert unit.dv == grad.abs().max()
    assert unit.dq == pytest.approx(0.5 * k.abs().max().item() * dp)
    assert unit.dk == pytest.approx(0.5 * q.abs().max().item() * dp)


def test_units_take_a_packed_sequence():
    q, k, v, grad = (torch.randn(1, 5, 2, 4) for _ in range(4))
    packed = numerics.units(q[0], k[0], v[0], grad[0], 0.5)
    assert packed == pytest.approx(numerics.units(q, k, v, grad, 0.5))


def test_largest_logit():
    q, k = torch.randn(2, 5, 2, 4), torch.randn(2, 3, 1, 4)
    logits = torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * 0.5
    assert numerics.largest_logit(q, k, 0.5) == pytest.approx(logits.abs().max().item())


def dense_results(q, k, v, grad):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    heads = [x.transpose(1, 2) for x in leaves]
    weights = (heads[0] @ heads[1].mT * q.shape[-1] ** -0.5).softmax(-1)
    out = (weights @ heads[2]).transpose(1, 2)
    return Results(out.detach(), *torch.autograd.grad(out, leaves, grad))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_dense_attention_keeps_its_own_allowance(dtype, size):
    q, k, v, grad = (torch.randn(2, 33, 2, 16).to(dtype) for _ in range(4))
    q = q * size
    truth = dense_results(*(x.double() for x in (q, k, v, grad)))
    mine = dense_results(q, k, v, grad)
    unit = numerics.units(q, k, v, grad, 0.25)
    logit = numerics.largest_logit(q, k, 0.25)
    allowed = numerics.allowed_errors(dtype, truth, unit, logit=logit, dense=mine)
    assert numerics.attention_errors(mine, truth, unit).within(allowed)


def test_a_wrong_gradient_is_not_allowed():
    q, k, v, grad = (torch.randn(2, 33, 2, 16) for _ in range(4))
    truth = dense_results(*(x.double() for x in (q, k, v, grad)))
    mine = dense_results(q, k, v, grad)
    unit = numerics.units(q, k, v, grad, 0.25)
    allowed = numerics.allowed_errors(torch.float32, truth, unit)
    for name in Results._fields:
        wrong = mine._replace(**{name: getattr(mine, name) * 1.001})
        assert not numerics.attention_errors(wrong, truth, unit).within(allowed)


def test_allowances_by_dtype():
    ones = Results(*[torch.ones(2, dtype=torch.float64)] * 4)
    unit = Errors(1.0, 0.5, 2.0, 0.0)
    assert numerics.allowed_errors(torch.float64, ones, unit) == (1e-9,) * 4
    assert numerics.allowed_errors(torch.float32, ones, unit, logit=49) == (1e-5,) * 4
    assert numerics.allowed_errors(torch.float32, ones, unit, logit=500) == pytest.approx(
        (1e-4,) * 4
    )
    dense = Results(*[torch.full((2,), 1.25)] * 4)
    eps = torch.finfo(torch.bfloat16).eps
    half = numerics.allowed_errors(torch.bfloat16, ones, unit, dense=dense)
    assert half == pytest.approx((0.5 + 2 * eps, 0.5 + eps, 0.25 + 2 * eps, 0.5))
    with pytest.raises(ValueError, match="dense="):
        numerics.allowed_errors(torch.float16, ones, unit)


def test_nan_is_never_within():
    assert Errors(0.0, 0.0, 1.0, 0.0).within(Errors(0.0, 0.0, 1.0, 0.0))
    assert not Errors(0.0, NAN, 0.0, 0.0).within(Errors(1.0, 1.0, 1.0, 1.0))
