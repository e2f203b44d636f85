"""merge_attention: parts of the keys, joined, are attention over all of them."""

import math
from functools import reduce
from itertools import pairwise

import pytest
import torch
from cases import by_head, cu_seqlens, reference_attention, striped
from hypothesis import given
from hypothesis import strategies as st

from flashmod import Mask, TileConfig, flash_attention, merge_attention

TINY = TileConfig(16, 16)


def tensors(rows=11, kv_rows=37, batch=2, dtype=torch.float64):
    shapes = ((rows, 4, 8), (kv_rows, 2, 8), (kv_rows, 2, 6))
    return [torch.randn(batch, *x, dtype=dtype, requires_grad=True) for x in shapes]


def merged(parts):
    return reduce(lambda one, two: merge_attention(*one, *two), parts)


def check(whole, parts, leaves, tolerance=1e-9):
    """Results, and gradients through out and lse, of one attention and its joined parts."""
    wanted, got = whole, merged(parts)
    grads = [torch.randn_like(x) for x in wanted]
    for x, y in zip(got, wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
    for x, y in zip(
        *(torch.autograd.grad(results, leaves, grads) for results in (got, wanted)), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


CUTS = {"two": (0, 20, 37), "three": (0, 3, 16, 37), "one_key": (0, 1, 37), "none": (0, 0, 37, 37)}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("scored", [False, True], ids=["plain", "scored"])
def test_dense_parts(cuts, scored):
    """Scored: a bias that hides whole rows in some parts or all, and a sink in the first part."""
    q, k, v = tensors()
    bias, sink, leaves = None, None, [q, k, v]
    if scored:
        bias = torch.randn(2, 1, 11, 37, dtype=torch.float64)
        bias[:, :, 1::3, :20] = -math.inf
        bias[:, :, 2::3, 3:] = -math.inf
        bias[0, :, 4] = -math.inf
        sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
        bias, leaves = bias.requires_grad_(), [q, k, v, bias, sink]
    options = {"return_lse": True, "softcap": 2.0 if scored else 0.0}
    whole = reference_attention(q, k, v, attn_mask=bias, learnable_sink=sink, **options)
    parts = [
        flash_attention(
            q, k[:, a:b], v[:, a:b], attn_mask=None if bias is None else bias[..., a:b],
            learnable_sink=sink if n == 0 else None, tiles=TINY, **options,
        )
        for n, (a, b) in enumerate(pairwise(cuts))
    ]  # fmt: skip
    check(whole, parts, leaves)


@pytest.mark.parametrize("cut", [0, 1, 13])
def test_packed_parts(cut):
    """The keys of every sequence before and after ``cut``; some sequences have none there."""
    q_lengths, kv_lengths = (5, 0, 7, 3), (9, 4, 20, 0)
    q, k, v = (torch.randn(n, 2, 8, dtype=torch.float64) for n in (17, 33, 33))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cu_q, cu_k = cu_seqlens(q_lengths), cu_seqlens(kv_lengths)
    whole = reference_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True)
    assert (whole[1][:, 12:] == -math.inf).all()
    starts = [sum(kv_lengths[:n]) for n in range(4)]
    parts = []
    for first, last in ((0, cut), (cut, 99)):
        own = [
            torch.arange(start + min(first, n), start + min(last, n))
            for start, n in zip(starts, kv_lengths, strict=True)
        ]
        rows, cu = torch.cat(own), cu_seqlens([len(x) for x in own])
        parts.append(
            flash_attention(
                q, k[rows], v[rows], cu_seqlens_q=cu_q, cu_seqlens_k=cu, return_lse=True, tiles=TINY
            )
        )
    check(whole, parts, leaves)


def test_two_masks_that_share_the_keys():
    """Kernels and torch tiles; each key of a row in exactly one part, whole rows in one."""
    q, k, v = tensors(dtype=torch.float32)
    seen = torch.rand(2, 4, 11, 37) < 0.5
    seen[:, :, 3], seen[:, :, 4] = True, False
    parts = [
        flash_attention(q, k, v, attn_mask=mask, backend=backend, tiles=TINY, return_lse=True)
        for mask, backend in ((seen, "triton"), (~seen, "tiled"))
    ]
    whole = reference_attention(q, k, v, return_lse=True)
    check(whole, parts, [q, k, v], tolerance=3e-5)


@given(
    cuts=st.lists(st.integers(0, 23), max_size=4),
    causal=st.booleans(),
    fn=st.sampled_from([None, by_head]),
)
def test_any_split_in_any_order(cuts, causal, fn):
    """Associative and commutative: the parts are joined in turns from either end."""
    q, k, v = (x.detach() for x in tensors(9, 23))
    options = {"mask": Mask(causal=causal, fn=fn), "return_lse": True}
    whole = reference_attention(q, k, v, **options)
    ends = [0, *sorted(cuts), 23]
    parts = []
    for a, b in pairwise(ends):
        own = (torch.arange(23) >= a) & (torch.arange(23) < b)
        parts.append(flash_attention(q, k, v, attn_mask=own, **options))
    for order in (parts, parts[::-1], [*parts[1:], parts[0]]):
        for x, y in zip(merged(order), whole, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("largest", [1e-8, 1e6])
def test_far_apart_parts(largest):
    """The larger lse wins; nothing overflows, and no gradient is NaN."""
    out = [torch.randn(1, 3, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    lse = [x * torch.ones(1, 1, 3, dtype=torch.float64) for x in (largest, -largest)]
    lse = [x.requires_grad_() for x in lse]
    got = merge_attention(out[0], lse[0], out[1], lse[1])
    share = 1 / (1 + math.exp(-min(2 * largest, 700)))
    torch.testing.assert_close(got[0], share * out[0] + (1 - share) * out[1])
    torch.testing.assert_close(got[1], torch.logaddexp(*lse))
    grads = torch.autograd.grad(got, [*out, *lse], [torch.ones_like(x) for x in got])
    assert all(x.isfinite().all() for x in grads)


def test_gradcheck_with_dead_rows():
    shapes = ((2, 3, 2, 4), (2, 2, 3)) * 2
    inputs = [torch.randn(x, dtype=torch.float64, requires_grad=True) for x in shapes]
    dead = torch.zeros(2, 2, 3, dtype=torch.bool)
    dead[0, :, 1] = True

    def join(out1, lse1, out2, lse2):
        lse1 = lse1.masked_fill(dead, -math.inf)
        lse2 = lse2.masked_fill(dead.flip(0), -math.inf)
        return merge_attention(out1, lse1, out2, lse2)

    assert torch.autograd.gradcheck(join, inputs)


def test_rows_that_are_dead_in_both_parts_give_zero():
    out = [torch.zeros(1, 3, 1, 2, requires_grad=True) for _ in range(2)]
    lse = [torch.full((1, 1, 3), -math.inf, requires_grad=True) for _ in range(2)]
    got = merge_attention(out[0], lse[0], out[1], lse[1])
    assert (got[0] == 0).all() and (got[1] == -math.inf).all()
    grads = torch.autograd.grad(got, [*out, *lse], [torch.ones_like(x) for x in got])
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_keep_their_dtype_and_are_joined_in_float32(dtype):
    q, k, v = (x.detach() for x in tensors(dtype=dtype))
    parts = [
        flash_attention(q, k[:, at], v[:, at], return_lse=True)
        for at in (slice(0, 20), slice(20, None))
    ]
    out, lse = merged(parts)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    exact, _ = merged([(out.double(), lse.double()) for out, lse in parts])
    assert torch.equal(out, exact.to(dtype)) or (out - exact).abs().max() < torch.finfo(dtype).eps


REFUSALS = [
    ((2, 3, 4, 8), (2, 4, 3), (2, 5, 4, 8), (2, 4, 5), ["(2, 3, 4, 8)", "(2, 5, 4, 8)"]),
    ((2, 3, 4, 8), (2, 4, 3), (2, 3, 4, 8), (2, 3, 4), ["(2, 4, 3)", "(2, 3, 4)"]),
    ((2, 3, 4, 8), (2, 3, 4), (2, 3, 4, 8), (2, 3, 4), ["(2, 3, 4)", "(2, 3, 4, 8)", "(H, T)"]),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_shapes_that_do_not_fit_are_named(refusal):
    *shapes, words = refusal
    with pytest.raises(ValueError) as error:
        merge_attention(*(torch.zeros(shape) for shape in shapes))
    assert all(word in str(error.value) for word in words)


def test_a_mask_function_over_parts_sees_positions_of_the_whole():
    """Keys are hidden by masks, not cut off, so a function of positions means the same."""
    q, k, v = (x.detach() for x in tensors())
    options = {"mask": Mask(fn=striped, fn_args=(3, 2)), "return_lse": True}
    halves = [torch.arange(37) < 15, torch.arange(37) >= 15]
    parts = [flash_attention(q, k, v, attn_mask=half, **options) for half in halves]
    for x, y in zip(merged(parts), reference_attention(q, k, v, **options), strict=True):
        torch.testing.assert_close(x, y)
