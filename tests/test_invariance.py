"""What must not change a result: tiles, batch order, layout, strides, foreign memory."""

import pytest
import torch
from cases import (
    LAYOUTS,
    PER_TOKEN,
    SEED,
    Case,
    Inputs,
    build,
    by_head,
    cu_seqlens,
    run,
    striped,
    text_and_images,
)
from hypothesis import given
from hypothesis import strategies as st

from flashmod import Mask, TileConfig, flash_attention

BACKENDS = ("tiled", "triton")
LENGTHS = (5, 0, 18, 9)  # odd, empty, and longer than a tile
MASK = Mask(causal=True, window=(11, None), prefix_len=3)


def packed(lengths=LENGTHS, kv_lengths=None, *, heads=(2, 1), slack=0, dim=8):
    """(q, k, v, grad_out) of packed sequences; keys as long as queries unless given."""
    kv_lengths = lengths if kv_lengths is None else kv_lengths
    rows = [sum(x) + slack for x in (lengths, kv_lengths, kv_lengths, lengths)]
    counts = (heads[0], heads[1], heads[1], heads[0])
    return [torch.randn(r, h, dim) for r, h in zip(rows, counts, strict=True)]


def results(tensors, backend, *, grad_lse=None, tiles=None, **kwargs):
    """out, lse, dq, dk, dv with dropout on."""
    q, k, v, grad_out = tensors
    lse_shape = grad_out.shape[:-1]
    grad_lse = torch.ones(lse_shape).transpose(-1, -2) if grad_lse is None else grad_lse
    kwargs = {"mask": MASK, "dropout_p": 0.25, "dropout_seed": SEED, **kwargs}
    tiles = tiles or (TileConfig(8, 16) if backend == "tiled" else TileConfig(16, 16))
    return run(Inputs(q, k, v, grad_out, grad_lse, kwargs), backend=backend, tiles=tiles)


def assert_equal(a, b):
    for name, x, y in zip(a._fields, a, b, strict=True):
        assert x is None or torch.equal(x, y), f"{name} differs by {(x - y).abs().max()}"


def assert_close(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=2e-5)


TILES = {
    "tiled": [(1, 1), (3, 5), (16, 7), (64, 128), (5, 16)],
    "triton": [(16, 32), (32, 16), (64, 64)],
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_tile_size_changes_nothing(backend):
    cu = cu_seqlens(LENGTHS)
    tensors = packed()
    first = results(tensors, backend, cu_seqlens_q=cu)
    for tiles in TILES[backend]:
        other = results(tensors, backend, cu_seqlens_q=cu, tiles=TileConfig(*tiles))
        assert_close(first, other)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=4),
    tiles=st.tuples(st.integers(1, 24), st.integers(1, 40)),
    window=st.tuples(*[st.none() | st.integers(0, 12)] * 2),
    prefix=st.integers(0, 6),
)
def test_any_ragged_batch_equals_its_sequences(lengths, tiles, window, prefix):
    """Random batches on the torch tiles: each sequence alone, in other tiles."""
    q_lengths, kv_lengths = [a for a, _ in lengths], [b for _, b in lengths]
    tensors = packed(q_lengths, kv_lengths, slack=1, dim=4)
    options = {"mask": Mask(window=window, prefix_len=prefix)}
    whole = results(
        tensors, "tiled", tiles=TileConfig(*tiles),
        cu_seqlens_q=cu_seqlens(q_lengths), cu_seqlens_k=cu_seqlens(kv_lengths), **options,
    )  # fmt: skip
    for n in range(len(lengths)):
        q_at, kv_at = (slice(sum(x[:n]), sum(x[: n + 1])) for x in (q_lengths, kv_lengths))
        own = [x[at][None] for x, at in zip(tensors, (q_at, kv_at, kv_at, q_at), strict=True)]
        alone = results(own, "tiled", sequence_ids=torch.tensor([n]), **options)
        parts = (
            whole.out[q_at],
            whole.lse[:, q_at],
            whole.dq[q_at],
            whole.dk[kv_at],
            whole.dv[kv_at],
        )
        assert_close([x[None] for x in parts], alone)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [MASK, Mask(fn=striped, fn_args=(3, 2))], ids=["interval", "fn"])
def test_a_sequence_alone_equals_itself_in_the_batch_bitwise(backend, mask):
    """Given its own id, which dropout and the mask function see."""
    tensors = packed()
    whole = results(tensors, backend, mask=mask, cu_seqlens_q=cu_seqlens(LENGTHS))
    for n in (0, 2):
        at = slice(sum(LENGTHS[:n]), sum(LENGTHS[: n + 1]))
        options = {
            "cu_seqlens_q": cu_seqlens(LENGTHS[n : n + 1]),
            "sequence_ids": torch.tensor([n]),
        }
        alone = results([x[at] for x in tensors], backend, mask=mask, **options)
        parts = (whole.out[at], whole.lse[:, at], *(x[at] for x in whole[2:]))
        assert_equal(type(whole)(*parts), alone)


def scored(lengths):
    """Everything that changes scores, for packed sequences as their own batch."""
    total, count = sum(lengths), len(lengths)
    labels = torch.arange(total) // 4 % 3
    bias = torch.randn(count, 1, max(lengths), max(lengths))
    return {
        "mask": Mask(fn=text_and_images, fn_args=(9,), labels=(labels, labels)),
        "attn_mask": bias.masked_fill(bias < -1, -torch.inf),
        "softcap": 2.0,
        "alibi_slopes": torch.rand(count, 2),
        "learnable_sink": torch.randn(2),
        "dropout_p": torch.rand(total).round(decimals=1),
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scored_sequence_alone_equals_itself_in_the_batch_bitwise(backend):
    tensors, kwargs = packed(), scored(LENGTHS)
    whole = results(tensors, backend, cu_seqlens_q=cu_seqlens(LENGTHS), **kwargs)
    sinks = 0.0
    for n, length in enumerate(LENGTHS):
        at = slice(sum(LENGTHS[:n]), sum(LENGTHS[: n + 1]))
        labels = [x[at] for x in kwargs["mask"].labels]
        own = kwargs | {
            "mask": Mask(fn=text_and_images, fn_args=(9,), labels=tuple(labels)),
            "attn_mask": kwargs["attn_mask"][n : n + 1, :, :length, :length],
            "alibi_slopes": kwargs["alibi_slopes"][n],
            "dropout_p": kwargs["dropout_p"][at],
            "sequence_ids": torch.tensor([n]),
            "cu_seqlens_q": cu_seqlens(LENGTHS[n : n + 1]),
        }
        alone = results([x[at] for x in tensors], backend, **own)
        parts = (whole.out[at], whole.lse[:, at], *(x[at] for x in whole[2:5]))
        assert_equal(type(whole)(*parts, whole.dbias[n : n + 1, :, :length, :length], None), alone)
        sinks = sinks + alone.dsink
    torch.testing.assert_close(sinks, whole.dsink)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_order_changes_nothing_bitwise(backend):
    tensors = [torch.randn(3, 17, h, 8) for h in (2, 1, 1, 2)]
    lengths, order = torch.tensor([17, 4, 9]), torch.tensor([2, 0, 1])
    one = results(tensors, backend, lengths_q=lengths, lengths_k=lengths)
    two = results(
        [x[order] for x in tensors], backend,
        lengths_q=lengths[order], lengths_k=lengths[order], sequence_ids=order,
    )  # fmt: skip
    assert_equal(type(one)(*(x[order] for x in one)), two)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_equals_packed_bitwise(backend):
    tensors = packed()
    whole = results(tensors, backend, cu_seqlens_q=cu_seqlens(LENGTHS))
    padded = [pad(x, LENGTHS) for x in tensors]
    lengths = torch.tensor(LENGTHS)
    other = results(padded, backend, lengths_q=lengths, lengths_k=lengths)
    assert_equal(
        whole,
        type(whole)(
            unpad(other.out), unpad(other.lse.transpose(1, 2)).T, *(unpad(x) for x in other[2:])
        ),
    )
    for n, length in enumerate(LENGTHS):
        assert (other.out[n, length:] == 0).all() and (other.lse[n, :, length:] == -torch.inf).all()
        assert all((x[n, length:] == 0).all() for x in other[2:])


def pad(x, lengths, fill=0.0):
    out = x.new_full((len(lengths), max(lengths) + 2, *x.shape[1:]), fill)
    for row, part in zip(out, x.split(list(lengths)), strict=True):
        row[: len(part)] = part
    return out


def unpad(x, lengths=LENGTHS):
    return torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["slack", "holes"])
@pytest.mark.parametrize("scores", ["none", "all"])
def test_a_second_run_is_bitwise_the_same(backend, layout, scores):
    inputs = build(Case(layout, "head_fn", 0.25, "gqa", scores))
    assert_equal(*(run(inputs, backend=backend) for _ in range(2)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["padded", "slack", "holes"])
@pytest.mark.parametrize("scores", ["none", "all"])
def test_poisoned_memory_reaches_nothing(backend, layout, scores):
    """NaN in slack, beyond lengths, in hidden keys, and in the gradients of such rows."""
    inputs = build(Case(layout, "causal", 0.25, "gqa", scores))
    clean = run(inputs, backend=backend)
    poisoned = run(poison(layout, inputs), backend=backend)
    assert_equal(clean, poisoned)
    assert all(x.isfinite().all() for x in poisoned if x is not poisoned.lse)


def poison(name, inputs):
    layout = LAYOUTS[name]
    q, k, v, grad_out = (x.clone() for x in inputs[:4])
    grad_lse = inputs.grad_lse.clone()
    for n, (q_len, kv_len) in enumerate(zip(layout.q, layout.kv, strict=True)):
        if layout.kind == "packed":
            q_at, kv_at = slice(sum(layout.q), None), slice(sum(layout.kv), None)
            idle = [slice(0, 3)]  # keys of the sequence that has no queries
            q[q_at] = grad_out[q_at] = grad_lse[:, q_at] = torch.nan
        else:
            q_at, kv_at = (n, slice(q_len, None)), (n, slice(kv_len, None))
            idle = [(n, key) for key in (layout.hidden[n] if layout.hidden else ())]
            q[q_at] = grad_out[q_at] = grad_lse[n, :, q_len:] = torch.nan
        for place in (kv_at, *idle):
            k[place] = v[place] = torch.nan
    return Inputs(q, k, v, grad_out, grad_lse, inputs.kwargs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_hidden_by_a_mask_function_or_a_window_are_not_read(backend):
    """Each head has keys of its own that nobody sees; one tile holds them and visible ones."""
    tensors = [torch.randn(1, 17, 2, 8) for _ in range(4)]
    options = {"mask": Mask(fn=odd_keys, window=(4, 4), align="top_left")}
    hidden = torch.zeros(1, 17, 2, 1, dtype=torch.bool)
    hidden[:, 0::2, 0], hidden[:, 1::2, 1] = True, True
    tail = [tensors[0][:, :9], *tensors[1:3], tensors[3][:, :9]]  # keys from 13 on are out of reach
    out_of_reach = hidden.clone()
    out_of_reach[:, 13:] = True
    for inputs, gone in ((tensors, hidden), (tail, out_of_reach)):
        q, k, v, grad_out = inputs
        poisoned = [q, *(x.masked_fill(gone, torch.nan) for x in (k, v)), grad_out]
        clean, got = (results(x, backend, **options) for x in (inputs, poisoned))
        assert_equal(clean, got)
        assert (got.dk[gone.expand_as(k)] == 0).all() and (got.dv[gone.expand_as(v)] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_a_mask_function_hides_from_every_head_are_not_read(backend):
    """The function looks at no head, so its tiles have no axis for heads."""
    tensors = [torch.randn(1, 17, 2, 8) for _ in range(4)]
    gone = (torch.arange(17) % 3 == 0)[:, None, None]
    poisoned = [x.masked_fill(gone, torch.nan) if i in (1, 2) else x for i, x in enumerate(tensors)]
    options = {"mask": Mask(fn=no_third_key)}
    assert_equal(*(results(x, backend, **options) for x in (tensors, poisoned)))


def no_third_key(batch, head, q_idx, kv_idx):
    return kv_idx % 3 != 0


def odd_keys(batch, head, q_idx, kv_idx):
    return (kv_idx + head) % 2 == 1


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy, in the interpreter
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
@pytest.mark.parametrize("hides", ["window", "mask_fn", "key_mask"])
def test_rows_that_see_no_key_are_not_read(backend, fill, hides):
    """Queries and incoming gradients of rows whose every key is hidden, by whatever means."""
    options, dead = {
        "window": ({"mask": Mask(window=(4, None), align="top_left")}, torch.arange(18) >= 9),
        "mask_fn": ({"mask": Mask(fn=even_queries)}, torch.arange(18) % 2 == 1),
        "key_mask": (
            {
                "mask": Mask(window=(0, 0), align="top_left"),
                "attn_mask": torch.tensor([True, False, True, True, True])[None, None, None],
            },
            (torch.arange(18) == 1) | (torch.arange(18) > 4),
        ),
    }[hides]
    tensors = [torch.randn(1, n, 2, 8) for n in (18, 5, 5, 18)]
    poisoned = [
        x.masked_fill(dead[:, None, None], fill) if x.shape[1] == 18 else x for x in tensors
    ]
    poisoned_lse = torch.ones(1, 2, 18).masked_fill(dead, fill)
    clean = results(tensors, backend, **options)
    got = results(poisoned, backend, grad_lse=poisoned_lse, **options)
    assert_equal(clean, got)
    assert (got.out[:, dead] == 0).all() and (got.dq[:, dead] == 0).all()
    assert (got.lse[..., dead] == -torch.inf).all()


def even_queries(batch, head, q_idx, kv_idx):
    return q_idx % 2 == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_change_nothing_bitwise(backend):
    plain = [torch.randn(1, 18, h, 8) for h in (2, 1, 1, 2)]
    strided = {
        "heads_first": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain],
        "dim_first": [x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for x in plain],
        "every_other": [x.repeat_interleave(2, -1)[..., ::2] for x in plain],
    }
    contiguous = results(plain, backend)
    for tensors in strided.values():
        assert not tensors[0].is_contiguous()
        assert_equal(contiguous, results(tensors, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_inputs_and_gradients(backend):
    """Stride 0: one key for all rows, and the gradient of a sum."""
    q, k, v, _ = (torch.randn(2, 18, h, 8) for h in (2, 1, 1, 2))
    k, v = (x[:1, :1].expand(2, 18, 1, 8) for x in (k, v))
    ones = torch.ones(()).expand(2, 18, 2, 8)
    flat = torch.ones(()).expand(2, 2, 18)
    expanded = results([q, k, v, ones], backend, grad_lse=flat)
    assert_equal(
        expanded, results([q, k.clone(), v.clone(), ones.clone()], backend, grad_lse=flat.clone())
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_do_not_write_to_their_inputs(backend):
    inputs = build(Case("slack", "images", PER_TOKEN, "gqa", "all"))
    mask = inputs.kwargs["mask"]
    tensors = [*inputs[:5], *(x for x in inputs.kwargs.values() if isinstance(x, torch.Tensor))]
    tensors += mask.labels
    before = [x.clone() for x in tensors]
    run(inputs, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_does_not_depend_on_the_backend_or_value(backend):
    """The dropped weights, read off with one-hot values, are those of the definition."""
    q, k = torch.randn(1, 18, 2, 4), torch.randn(1, 20, 2, 4)
    v = torch.eye(20).reshape(1, 20, 1, 20).expand(1, 20, 2, 20)
    options = {"mask": Mask(fn=by_head), "dropout_p": 0.5, "dropout_seed": 9}
    weights, whole = (
        flash_attention(q, k, v, backend=backend, **o) for o in (options, {"mask": options["mask"]})
    )
    kept = weights != 0
    torch.testing.assert_close(weights, torch.where(kept, whole * 2, 0.0))
    assert 0.3 < kept.sum() / (whole != 0).sum() < 0.7
