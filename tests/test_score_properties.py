"""What must hold of caps, slopes, biases, sinks, labels and rates, whatever their values."""

import math

import pytest
import torch
from cases import SEED, Inputs, ScoredOutput, cu_seqlens, run, same_document
from hypothesis import given
from hypothesis import strategies as st
from oracle import random_bits

from flashmod import Mask, TileConfig, flash_attention

BACKENDS = ("tiled", "triton")
ROWS, KEYS = 13, 21
TILES = TileConfig(16, 16)

windows = st.tuples(*[st.none() | st.integers(0, 12)] * 2)
seeds = st.integers(0, 1 << 16)
backends = pytest.mark.parametrize("backend", BACKENDS)


def inputs(seed=0, rows=ROWS, keys=KEYS, heads=(2, 1), **kwargs):
    """A float64 batch of two; the same seed gives the same tensors."""
    generator = torch.Generator().manual_seed(seed)
    sides = ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]), (rows, heads[0]))
    shapes = [(2, *side, 4) for side in sides]
    q, k, v, grad_out = (torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes)
    grad_lse = torch.randn(2, heads[0], rows, generator=generator, dtype=torch.float64)
    return Inputs(q, k, v, grad_out, grad_lse, kwargs)


def random(seed, *shape):
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def assert_same(a, b, fields=("out", "lse", "dq", "dk", "dv"), tolerance=1e-10):
    for name in fields:
        x, y = getattr(a, name), getattr(b, name)
        torch.testing.assert_close(
            x, y, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def attend(x, backend="tiled", tiles=TILES):
    return run(x, backend=backend, tiles=tiles)


@given(seed=seeds, window=windows, size=st.sampled_from([1.0, 1e3]))
def test_a_shift_of_a_row_of_bias_moves_lse_alone(seed, window, size):
    bias, shift = random(seed, 2, 1, ROWS, KEYS), size * random(seed + 1, 2, 1, ROWS, 1)
    bias[:, :, ::4, 3:9] = -math.inf
    one, two = (
        attend(inputs(seed, mask=Mask(window=window), attn_mask=x)) for x in (bias, bias + shift)
    )
    assert_same(one, two, ("out", "dq", "dk", "dv", "dbias"), tolerance=1e-9)
    torch.testing.assert_close(one.lse + shift[..., 0], two.lse)


@given(seed=seeds, window=windows)
def test_a_sink_is_a_key_of_value_zero(seed, window):
    """A key more, in the first place, that every query sees and whose logit is the sink."""
    sink = random(seed, 2)
    plain = inputs(seed, attn_mask=random(seed + 1, 2, 2, ROWS, KEYS), learnable_sink=sink)
    bias = plain.kwargs["attn_mask"].clone()
    bias.masked_fill_(torch.arange(KEYS) % 5 == seed % 5, -math.inf)
    plain.kwargs["attn_mask"] = bias
    column = sink[:, None, None].expand(2, 2, ROWS, 1)
    k, v = (torch.cat([torch.zeros_like(x[:, :1]), x], 1) for x in (plain.k, plain.v))
    longer = plain._replace(k=k, v=v, kwargs={"attn_mask": torch.cat([column, bias], -1)})
    one, two = attend(plain), attend(longer)
    assert_same(one, two, ("out", "lse", "dq"))
    for a, b in ((one.dk, two.dk), (one.dv, two.dv)):
        torch.testing.assert_close(a, b[:, 1:])
    torch.testing.assert_close(one.dbias, two.dbias[..., 1:])
    torch.testing.assert_close(one.dsink, two.dbias[..., 0].sum((0, 2)))


@backends
@pytest.mark.parametrize("sink", [-math.inf, -1e4])
def test_a_sink_of_minus_infinity_is_none(sink, backend):
    """Also in rows that see no key."""
    seen = torch.ones(ROWS, KEYS, dtype=torch.bool)
    seen[::3] = False
    with_sink = inputs(attn_mask=seen, learnable_sink=torch.full((2,), sink, dtype=torch.float64))
    one, two = attend(with_sink, backend), attend(inputs(attn_mask=seen), backend)
    assert_same(one, two, ("out", "dq", "dk", "dv"))
    live = two.lse.isfinite()
    torch.testing.assert_close(one.lse[live], two.lse[live])
    assert (one.lse[~live] == sink).all()
    if sink == -math.inf:
        assert (one.dsink == 0).all()
    else:  # the rows without keys hold the sink alone
        torch.testing.assert_close(one.dsink, with_sink.grad_lse[:, :, ::3].sum((0, 2)))


@backends
def test_a_huge_sink_takes_everything(backend):
    got = attend(inputs(learnable_sink=torch.full((2,), 1e6, dtype=torch.float64)), backend)
    assert (got.out == 0).all() and (got.lse == 1e6).all()
    assert all((x == 0).all() for x in (got.dq, got.dk, got.dv))
    torch.testing.assert_close(got.dsink, inputs().grad_lse.sum((0, 2)))


@given(seed=seeds, window=windows)
def test_a_huge_cap_is_none(seed, window):
    capped = attend(inputs(seed, mask=Mask(window=window), softcap=1e9))
    assert_same(capped, attend(inputs(seed, mask=Mask(window=window))), tolerance=1e-8)


@given(seed=seeds, cap=st.floats(0.01, 5.0))
def test_a_cap_bounds_the_logits(seed, cap):
    x = inputs(seed, softcap=cap, softmax_scale=10.0)
    lse = attend(x).lse
    assert (lse <= math.log(KEYS) + cap + 1e-12).all() and (
        lse >= math.log(KEYS) - cap - 1e-12
    ).all()


@backends
def test_a_cap_of_tiny_scores_keeps_them(backend):
    """tanh near 0 must not round to 0, nor its slope to anything but 1."""
    x = inputs(softcap=30.0, softmax_scale=1e-12)
    one, two = attend(x, backend), attend(inputs(softmax_scale=1e-12), backend)
    assert_same(one, two, tolerance=1e-14)
    torch.testing.assert_close(one.dq, two.dq, rtol=1e-12, atol=0.0)


@given(seed=seeds, window=windows, align=st.sampled_from(["bottom_right", "top_left"]))
def test_alibi_is_a_bias(seed, window, align):
    """Per sequence and head; the cap comes before either."""
    slopes, mask = random(seed, 2, 2).abs(), Mask(window=window, align=align)
    shift = KEYS - ROWS if align == "bottom_right" else 0
    distance = (torch.arange(ROWS)[:, None] + shift - torch.arange(KEYS)).abs()
    bias = -slopes[..., None, None] * distance
    one = attend(inputs(seed, mask=mask, softcap=2.0, alibi_slopes=slopes))
    assert_same(one, attend(inputs(seed, mask=mask, softcap=2.0, attn_mask=bias)))
    shared = attend(inputs(seed, mask=mask, softcap=2.0, alibi_slopes=slopes[0]))
    for a, b in zip(
        shared,
        attend(inputs(seed, mask=mask, softcap=2.0, alibi_slopes=slopes[:1].expand(2, 2))),
        strict=True,
    ):
        assert torch.equal(a, b)


@backends
def test_a_bool_mask_is_a_bias_of_minus_infinity(backend):
    seen = torch.rand(2, 2, ROWS, KEYS) < 0.5
    seen[0, 1, 3] = False
    one = attend(inputs(attn_mask=seen), backend)
    two = attend(inputs(attn_mask=torch.zeros(seen.shape).masked_fill(~seen, -math.inf)), backend)
    assert_same(one, two, tolerance=1e-13)
    assert (two.dbias[~seen] == 0).all()


@given(
    lengths=st.lists(st.integers(0, 14), min_size=1, max_size=4).filter(any),
    causal=st.booleans(),
    tiles=st.tuples(st.integers(1, 20), st.integers(1, 20)),
)
def test_documents_by_labels_are_packed_sequences(lengths, causal, tiles):
    """With a bias and a sink; ALiBi and windows go by distance, which packing does not change."""
    total = sum(lengths)
    labels = torch.cat([torch.full((n,), 7 * i) for i, n in enumerate(lengths)])[None]
    x = inputs(sum(lengths), rows=total, keys=total)
    options = {
        "softcap": 3.0,
        "alibi_slopes": torch.tensor([0.1, 0.3]),
        "learnable_sink": random(3, 2),
    }
    one_row = Inputs(
        *(t[:1] for t in x[:5]),
        options
        | {"mask": Mask(causal=causal, window=(9, 5), fn=same_document, labels=(labels, labels))},
    )
    packed = Inputs(
        *(t[0] for t in x[:5]),
        options | {"mask": Mask(causal=causal, window=(9, 5)), "cu_seqlens_q": cu_seqlens(lengths)},
    )
    one, two = (attend(t, tiles=TileConfig(*tiles)) for t in (one_row, packed))
    for name in ("out", "lse", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(one, name)[0], getattr(two, name))
    torch.testing.assert_close(one.dsink, two.dsink)


@backends
def test_equal_rates_are_one_rate(backend):
    for p in (0.0, 0.3, 1.0):
        rates = torch.full((2, ROWS), p, dtype=torch.float64)
        one, two = (attend(inputs(dropout_p=x, dropout_seed=SEED), backend) for x in (p, rates))
        assert_same(one, two, tolerance=1e-13)


@backends
def test_every_token_has_its_own_rate(backend):
    """Rows of different rates are those of calls with that rate alone."""
    rates = (0.0, 0.2, 0.75, 1.0)
    index = torch.arange(2 * ROWS).reshape(2, ROWS) % 4
    mixed = attend(inputs(dropout_p=torch.tensor(rates)[index], dropout_seed=SEED), backend)
    for i, p in enumerate(rates):
        alone = attend(inputs(dropout_p=p, dropout_seed=SEED), backend)
        for name in ("out", "dq"):
            rows = (getattr(x, name)[index == i] for x in (mixed, alone))
            torch.testing.assert_close(*rows, rtol=1e-13, atol=1e-13)


@backends
def test_a_weight_falls_strictly_below_the_threshold_of_its_row(backend):
    """Row i's rate is the very number that decides over key i, or one step more."""
    x = inputs(heads=(1, 1))
    eye = torch.eye(KEYS, dtype=torch.float64).expand(2, KEYS, KEYS)[:, :, None]
    bits = [[int(random_bits(SEED, n, 0, i, i)) for i in range(ROWS)] for n in range(2)]
    for more in (0, 1):
        rates = (torch.tensor(bits) + more).double() / 65536
        options = {"dropout_p": rates, "dropout_seed": SEED, "backend": backend, "tiles": TILES}
        weights = flash_attention(x.q, x.k, eye, **options)[:, :, 0]
        assert ((weights.diagonal(dim1=1, dim2=2) == 0) == bool(more)).all()


@given(seed=seeds, tiles=st.tuples(st.integers(1, 20), st.integers(1, 30)))
def test_tiles_change_nothing(seed, tiles):
    kwargs = everything(seed)
    one, two = (attend(inputs(seed, **kwargs), tiles=TileConfig(*t)) for t in ((16, 16), tiles))
    assert_same(one, two, ScoredOutput._fields)


@pytest.mark.parametrize("tiles", [(16, 32), (32, 16)], ids=str)
def test_tiles_of_kernels_change_nothing(tiles):
    one, two = (
        attend(inputs(**everything(0)), "triton", TileConfig(*t)) for t in ((16, 16), tiles)
    )
    assert_same(one, two, ScoredOutput._fields)


def everything(seed):
    labels = [torch.arange(2 * n).reshape(2, n) // 8 for n in (ROWS, KEYS)]
    bias = random(seed, 2, 1, ROWS, KEYS)
    return {
        "mask": Mask(window=(15, 9), fn=same_document, labels=tuple(labels)),
        "attn_mask": bias.masked_fill(bias < -1, -math.inf),
        "softcap": 2.0,
        "alibi_slopes": random(seed + 1, 2, 2).abs(),
        "learnable_sink": random(seed + 2, 2),
        "dropout_p": (random(seed + 3, 2, ROWS) / 2).clamp(0, 1),
        "dropout_seed": seed,
    }


@backends
def test_bias_of_pairs_that_do_not_see_each_other_is_not_read(backend):
    """NaN beyond the lengths, in the causal future, where a function hides; its gradient is 0."""
    clean = inputs(**everything(0))
    options = {
        "mask": Mask(causal=True, fn=third, align="top_left"),
        "lengths_q": torch.tensor([13, 8]),
    }
    options["lengths_k"] = torch.tensor([9, 21])
    kwargs = clean.kwargs | options
    i, j = torch.arange(ROWS)[:, None], torch.arange(KEYS)
    gone = (j > i) | ((i + j) % 3 == 0) | (i >= options["lengths_q"][:, None, None])
    gone = (gone | (j >= options["lengths_k"][:, None, None]))[:, None]
    poisoned = kwargs | {"attn_mask": kwargs["attn_mask"].masked_fill(gone, math.nan)}
    one, two = (attend(clean._replace(kwargs=x), backend) for x in (kwargs, poisoned))
    for name in one._fields:
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    assert (two.dbias[gone] == 0).all()


def third(batch, head, q_idx, kv_idx):
    return (q_idx + kv_idx) % 3 != 0
