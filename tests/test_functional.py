"""What flash_attention accepts, refuses and defaults to."""

# ruff: noqa: E501 - one refusal a line
import math
import re

import pytest
import torch
from cases import by_head, cu_seqlens, reference_attention, same_document
from torch._subclasses import FakeTensorMode

from flashmod import (
    FlashMultiheadAttention,
    Mask,
    TileConfig,
    UnsupportedAttention,
    flash_attention,
)
from flashmod.contents import check_contents
from flashmod.functional import prepare


def tensors(q=(2, 5, 4, 8), k=(2, 7, 2, 8), v=None, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype) for shape in (q, k, v or k)]


def packed(rows=5):
    return [torch.randn(rows, 2, 8) for _ in range(3)]


def rates(bad):
    """One rate per query token; that of token 3 of sequence 1 is ``bad``."""
    p = torch.full((2, 5), 0.5, dtype=torch.float64)
    p[1, 3] = bad
    return p


def labelled(q_labels, kv_labels):
    return Mask(fn=same_document, labels=(q_labels.int(), kv_labels.int()))


INT = torch.int32
REFUSALS = {
    "q_2d": (tensors(q=(5, 8)), {}, ValueError, "q must be (B, S, H, D), got shape (5, 8)"),
    "k_3d": (tensors(k=(7, 2, 8)), {}, ValueError, "k must be (B, S, H, D), got shape (7, 2, 8)"),
    "packed_4d": (tensors(), {"cu_seqlens_q": cu_seqlens([5])}, ValueError, "q must be (T, H, D)"),
    "not_packed": (packed(), {}, ValueError, "q must be (B, S, H, D), got shape (5, 2, 8)"),
    "batch": (tensors(k=(3, 7, 2, 8)), {}, ValueError, "batch size 2, k has 3"),
    "head_dim": (tensors(k=(2, 7, 2, 9)), {}, ValueError, "head dimension 8, k has 9"),
    "kv_rows": (tensors(v=(2, 6, 2, 8)), {}, ValueError, "got (2, 7, 2, 8) and (2, 6, 2, 8)"),
    "kv_heads": (tensors(v=(2, 7, 4, 8)), {}, ValueError, "got (2, 7, 2, 8) and (2, 7, 4, 8)"),
    "group": (tensors(k=(2, 7, 3, 8)), {}, ValueError, "must divide that of query heads, got 3 and 4"),
    "no_kv_head": (tensors(k=(2, 7, 0, 8)), {}, ValueError, "got 0 and 4"),
    "int": ([x.int() for x in tensors()], {}, TypeError, "q must be float16, bfloat16, float32 or float64, got torch.int32"),
    "mixed": ([*tensors()[:2], tensors()[1].half()], {}, TypeError, "got torch.float32 for q and torch.float16 for v"),
    "device": ([*tensors()[:2], tensors()[1].to("meta")], {}, ValueError, "got cpu for q and meta for v"),
    "cu_int64": (packed(), {"cu_seqlens_q": torch.tensor([0, 5])}, TypeError, "cu_seqlens_q must be int32, got torch.int64"),
    "cu_2d": (packed(), {"cu_seqlens_q": torch.zeros(1, 2, dtype=INT)}, ValueError, "must be (N + 1,), got shape (1, 2)"),
    "cu_empty": (packed(), {"cu_seqlens_q": torch.zeros(0, dtype=INT)}, ValueError, "must be (N + 1,), got shape (0,)"),
    "cu_k_alone": (tensors(), {"cu_seqlens_k": cu_seqlens([5])}, ValueError, "cu_seqlens_k was given without cu_seqlens_q"),
    "cu_counts": (packed(), {"cu_seqlens_q": cu_seqlens([2, 3]), "cu_seqlens_k": cu_seqlens([5])}, ValueError, "describes 2 sequences, cu_seqlens_k 1"),
    "cu_beyond": (packed(), {"cu_seqlens_q": cu_seqlens([2, 5])}, ValueError, "sequence 1 of q ends at row 7, but q has 5 rows"),
    "cu_k_beyond": (packed(), {"cu_seqlens_q": cu_seqlens([5]), "cu_seqlens_k": cu_seqlens([6])}, ValueError, "sequence 0 of k ends at row 6, but k has 5 rows"),
    "cu_lengths": (packed(), {"cu_seqlens_q": torch.tensor([2, 3], dtype=INT)}, ValueError, "must start at 0, got 2"),
    "cu_falls": (packed(), {"cu_seqlens_q": torch.tensor([0, 4, 3], dtype=INT)}, ValueError, "sequence 1 of q has length -1"),
    "cu_and_lengths": (packed(), {"cu_seqlens_q": cu_seqlens([5]), "lengths_q": torch.tensor([5])}, ValueError, "lengths_q and lengths_k describe padded input"),
    "lengths_shape": (tensors(), {"lengths_q": torch.tensor([5])}, ValueError, "lengths_q must be (2,), one length per batch row, got (1,)"),
    "lengths_float": (tensors(), {"lengths_k": torch.tensor([5.0, 2.0])}, TypeError, "lengths_k must hold integers, got torch.float32"),
    "lengths_bool": (tensors(), {"lengths_k": torch.tensor([True, False])}, TypeError, "lengths_k must hold integers, got torch.bool"),
    "lengths_beyond": (tensors(), {"lengths_k": torch.tensor([7, 8])}, ValueError, "but k has 7 rows"),
    "lengths_negative": (tensors(), {"lengths_q": torch.tensor([2, -3])}, ValueError, "sequence 1 of q has length -3"),
    "p_above": (tensors(), {"dropout_p": 1.5}, ValueError, "dropout_p must lie between 0 and 1, got 1.5"),
    "p_below": (tensors(), {"dropout_p": -0.1}, ValueError, "dropout_p must lie between 0 and 1, got -0.1"),
    "p_nan": (tensors(), {"dropout_p": math.nan}, ValueError, "dropout_p must lie between 0 and 1, got nan"),
    "seed_int32": (tensors(), {"dropout_p": 0.5, "dropout_seed": torch.tensor(1, dtype=INT)}, TypeError, "0-d int64 tensor, got torch.int32"),
    "seed_1d": (tensors(), {"dropout_p": 0.5, "dropout_seed": torch.tensor([1])}, TypeError, "of shape (1,)"),
    "seed_float": (tensors(), {"dropout_p": 0.5, "dropout_seed": 1.5}, TypeError, "0-d int64 tensor, got 1.5"),
    "seed_huge": (tensors(), {"dropout_p": 0.5, "dropout_seed": 2**63}, ValueError, "64 bits, got 9223372036854775808"),
    "ids_shape": (tensors(), {"sequence_ids": torch.tensor([1, 2, 3])}, ValueError, "sequence_ids must be (2,), one per sequence, got (3,)"),
    "ids_float": (tensors(), {"sequence_ids": torch.tensor([0.5, 1.5])}, TypeError, "sequence_ids must hold integers, got torch.float32"),
    "lengths_int64": (tensors(), {"lengths_q": torch.tensor([2**32 + 3, 2])}, ValueError, "sequence 0 of q ends at row 2147483647, but q has 5 rows"),
    "q_none": ((None, *tensors()[1:]), {}, TypeError, "q must be a tensor, got NoneType"),
    "k_list": ((tensors()[0], [1.0], tensors()[2]), {}, TypeError, "k must be a tensor, got list"),
    "mask_tensor": (tensors(), {"mask": torch.ones(5, 7).bool()}, TypeError, "mask must be a flashmod.Mask, got Tensor: a boolean mask goes into attn_mask"),
    "mask_name": (tensors(), {"mask": "causal"}, TypeError, "mask must be a flashmod.Mask, got str"),
    "tiles_float": (tensors(), {"tiles": TileConfig(16.0, 16)}, TypeError, "tiles must hold integers, got TileConfig(block_m=16.0"),
    "attn_mask_device": (tensors(), {"attn_mask": torch.ones(2, 1, 1, 7, device="meta").bool()}, ValueError, "attn_mask is on meta, q, k and v are on cpu"),
    "mask_count": (tensors(), {"mask": Mask(prefix_len=[1, 2, 3])}, ValueError, "has shape (3,), but the call has 2 sequences"),
    "mask_dtype": (tensors(), {"attn_mask": torch.ones(5, 7, dtype=INT)}, TypeError, "attn_mask must be bool (True = visible) or a floating-point bias, got torch.int32"),
    "mask_array": (tensors(), {"attn_mask": [[True] * 7] * 5}, TypeError, "attn_mask must be a tensor, got list"),
    "mask_5d": (tensors(), {"attn_mask": torch.zeros(1, 2, 4, 5, 7)}, ValueError, "attn_mask must broadcast to (B, H, S, S_kv), here (2, 4, 5, 7), got (1, 2, 4, 5, 7)"),
    "mask_keys": (tensors(), {"attn_mask": torch.ones(2, 1, 1, 5).bool()}, ValueError, "here (2, 4, 5, 7), got (2, 1, 1, 5)"),
    "mask_queries": (tensors(), {"attn_mask": torch.zeros(7, 7)}, ValueError, "here (2, 4, 5, 7), got (7, 7)"),
    "mask_heads": (tensors(), {"attn_mask": torch.zeros(1, 2, 5, 7)}, ValueError, "here (2, 4, 5, 7), got (1, 2, 5, 7)"),
    "mask_batch": (tensors(), {"attn_mask": torch.zeros(3, 1, 1, 7)}, ValueError, "here (2, 4, 5, 7), got (3, 1, 1, 7)"),
    "mask_of_kv_heads": (packed(), {"cu_seqlens_q": cu_seqlens([2, 3]), "attn_mask": torch.zeros(3, 1, 3, 3)}, ValueError, "attn_mask must broadcast to (N, H, longest, longest), here (2, 2, any, any), got (3, 1, 3, 3)"),
    "packed_mask_queries": (packed(), {"cu_seqlens_q": cu_seqlens([2, 3]), "attn_mask": torch.zeros(2, 3)}, ValueError, "attn_mask has 2 queries, but sequence 1 has 3: it goes by positions within a sequence and must cover the longest"),
    "packed_mask_keys": (packed(), {"cu_seqlens_q": cu_seqlens([4, 1]), "attn_mask": torch.ones(2, 1, 1, 3).bool()}, ValueError, "attn_mask has 3 keys, but sequence 0 has 4"),
    "softcap_negative": (tensors(), {"softcap": -1.0}, ValueError, "softcap must be 0 (off) or a positive number, got -1.0"),
    "softcap_inf": (tensors(), {"softcap": math.inf}, ValueError, "got inf"),
    "softcap_nan": (tensors(), {"softcap": math.nan}, ValueError, "got nan"),
    "softcap_tensor": (tensors(), {"softcap": torch.tensor(3.0)}, TypeError, "softcap must be a number, got Tensor: it has no gradient"),
    "slopes_number": (tensors(), {"alibi_slopes": 0.5}, TypeError, "alibi_slopes must be a tensor, got float"),
    "slopes_int": (tensors(), {"alibi_slopes": torch.ones(4, dtype=INT)}, TypeError, "alibi_slopes must be floating-point, got torch.int32"),
    "slopes_heads": (tensors(), {"alibi_slopes": torch.ones(2)}, ValueError, "alibi_slopes must be (4,) or (2, 4), got (2,)"),
    "slopes_count": (tensors(), {"alibi_slopes": torch.ones(3, 4)}, ValueError, "alibi_slopes must be (4,) or (2, 4), got (3, 4)"),
    "slopes_0d": (tensors(), {"alibi_slopes": torch.tensor(0.5)}, ValueError, "alibi_slopes must be (4,) or (2, 4), got ()"),
    "slopes_grad": (tensors(), {"alibi_slopes": torch.ones(4, requires_grad=True)}, ValueError, "alibi_slopes has no gradient: pass alibi_slopes.detach()"),
    "slopes_device": (tensors(), {"alibi_slopes": torch.ones(4, device="meta")}, ValueError, "alibi_slopes is on meta, q, k and v are on cpu"),
    "sink_number": (tensors(), {"learnable_sink": 0.5}, TypeError, "learnable_sink must be a tensor, got float"),
    "sink_int": (tensors(), {"learnable_sink": torch.ones(4, dtype=INT)}, TypeError, "learnable_sink must be floating-point, got torch.int32"),
    "sink_heads": (tensors(), {"learnable_sink": torch.ones(2)}, ValueError, "got (2,)"),
    "sink_2d": (tensors(), {"learnable_sink": torch.ones(2, 4)}, ValueError, "learnable_sink must be (4,), got (2, 4)"),
    "sink_device": (tensors(), {"learnable_sink": torch.ones(4, device="meta")}, ValueError, "learnable_sink is on meta, q, k and v are on cpu"),
    "rates_0d": (tensors(), {"dropout_p": torch.tensor(0.5)}, ValueError, "dropout_p must be (2, 5), one per token, got ()"),
    "rates_keys": (tensors(), {"dropout_p": torch.zeros(2, 7)}, ValueError, "dropout_p must be (2, 5), one per token, got (2, 7)"),
    "rates_packed": (packed(), {"cu_seqlens_q": cu_seqlens([5]), "dropout_p": torch.zeros(4)}, ValueError, "dropout_p must be (5,), one per token, got (4,)"),
    "rates_int": (tensors(), {"dropout_p": torch.zeros(2, 5, dtype=INT)}, TypeError, "dropout_p must hold floating-point rates, got torch.int32"),
    "rates_grad": (tensors(), {"dropout_p": torch.zeros(2, 5, requires_grad=True)}, ValueError, "dropout_p has no gradient: pass dropout_p.detach()"),
    "rates_device": (tensors(), {"dropout_p": torch.zeros(2, 5, device="meta")}, ValueError, "dropout_p is on meta, q, k and v are on cpu"),
    "rates_above": (tensors(), {"dropout_p": rates(1.5)}, ValueError, "dropout_p must lie between 0 and 1; that of token (1, 3) does not"),
    "rates_below": (tensors(), {"dropout_p": rates(-1e-9)}, ValueError, "that of token (1, 3) does not"),
    "rates_nan": (tensors(), {"dropout_p": rates(math.nan)}, ValueError, "that of token (1, 3) does not"),
    "labels_count": (tensors(), {"mask": labelled(torch.zeros(2, 4), torch.zeros(2, 7))}, ValueError, "labels of queries must be (2, 5), one per token, got (2, 4)"),
    "labels_keys": (tensors(), {"mask": labelled(torch.zeros(2, 5), torch.zeros(2, 5))}, ValueError, "labels of keys must be (2, 7), one per token, got (2, 5)"),
    "labels_packed": (packed(), {"cu_seqlens_q": cu_seqlens([5]), "mask": labelled(torch.zeros(4), torch.zeros(5))}, ValueError, "labels of queries must be (5,), one per token, got (4,)"),
    "labels_device": (tensors(), {"mask": labelled(torch.zeros(2, 5), torch.zeros(2, 7, device="meta"))}, ValueError, "labels of keys is on meta, q, k and v are on cpu"),
    "labels_wide": (tensors(), {"mask": Mask(fn=same_document, labels=(torch.zeros(2, 5).long(), torch.full((2, 7), 1 << 32)))}, ValueError, "labels of keys must fit into int32, got values from 4294967296"),
    "labels_float": (tensors(), {"mask": Mask(fn=same_document, labels=(torch.zeros(2, 5), torch.zeros(2, 7)))}, TypeError, "labels of queries must hold integers, got torch.float32"),
    "cu_list": (packed(), {"cu_seqlens_q": [0, 5]}, TypeError, "cu_seqlens_q must be a tensor, got list"),
    "lengths_list": (tensors(), {"lengths_q": [5, 5]}, TypeError, "lengths_q must be a tensor, got list"),
    "scale_tensor": (tensors(), {"softmax_scale": torch.tensor(0.5)}, TypeError, "softmax_scale must be a number, got Tensor"),
    "tiles_zero": (tensors(), {"tiles": TileConfig(0, 16)}, ValueError, "tiles must hold numbers of 1 or more, got TileConfig(block_m=0"),
}  # fmt: skip


@pytest.mark.parametrize(("inputs", "kwargs", "kind", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_wrong_argument_is_named_with_both_values(inputs, kwargs, kind, message):
    with pytest.raises(kind, match=re.escape(message)) as error:
        flash_attention(*inputs, **kwargs)
    assert type(error.value) is kind


def test_shapes_and_dtypes_of_results():
    q, k, v = tensors(v=(2, 7, 2, 3))
    out, lse = flash_attention(q, k, v, return_lse=True)
    assert out.shape == (2, 5, 4, 3) and lse.shape == (2, 4, 5)
    assert out.is_contiguous()
    out, lse = flash_attention(*packed(), cu_seqlens_q=cu_seqlens([2, 3]), return_lse=True)
    assert out.shape == (5, 2, 8) and lse.shape == (2, 5)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        out, lse = flash_attention(*tensors(dtype=dtype), return_lse=True)
        assert out.dtype == dtype
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_defaults():
    q, k, v = tensors()
    full = flash_attention(q, k, v)
    options = {
        "mask": Mask(), "softmax_scale": 8**-0.5, "lengths_q": torch.tensor([5, 5]),
        "lengths_k": torch.tensor([7, 7]), "sequence_ids": torch.tensor([0, 1]), "backend": "tiled",
        "attn_mask": torch.ones(1, 1, 1, 7).bool(), "dropout_seed": 3, "softcap": 0.0,
        "alibi_slopes": torch.zeros(4), "dropout_p": torch.zeros(2, 5),
    }  # fmt: skip
    for name, value in options.items():
        assert torch.equal(full, flash_attention(q, k, v, **{name: value})), name
    x = packed()
    cu = cu_seqlens([2, 3])
    assert torch.equal(
        flash_attention(*x, cu_seqlens_q=cu), flash_attention(*x, cu_seqlens_q=cu, cu_seqlens_k=cu)
    )


def test_lengths_of_any_integer_type():
    q, k, v = tensors()
    results = [
        flash_attention(q, k, v, lengths_k=torch.tensor([7, 3], dtype=dtype))
        for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
    ]
    assert all(torch.equal(results[0], other) for other in results)


EMPTY = {
    "no_batch": ((0, 5, 4, 8), (0, 7, 2, 8)),
    "no_query": ((2, 0, 4, 8), (2, 7, 2, 8)),
    "no_key": ((2, 5, 4, 8), (2, 0, 2, 8)),
    "nothing": ((2, 0, 4, 8), (2, 0, 2, 8)),
    "no_head": ((2, 5, 0, 8), (2, 7, 0, 8)),
    "no_query_head": ((2, 5, 0, 8), (2, 7, 2, 8)),
    "no_dim": ((2, 5, 4, 0), (2, 7, 2, 0)),
}


def test_kernels_refuse_a_head_of_no_dimension():
    with pytest.raises(UnsupportedAttention, match="D = 0 is not within 1"):
        flash_attention(*tensors((2, 5, 4, 0), (2, 7, 2, 0)), backend="triton")


EMPTY_CALLS = [(name, b, p) for name in EMPTY for b in ("tiled", "triton") for p in (0.0, 0.5)]


@pytest.mark.parametrize(
    ("name", "backend", "dropout_p"),
    [call for call in EMPTY_CALLS if call[:2] != ("no_dim", "triton")],
)
def test_empty_tensors(name, backend, dropout_p):
    q, k = EMPTY[name]
    inputs = [x.requires_grad_() for x in tensors(q, k, (*k[:3], 3))]
    mask = Mask(causal=True, align="top_left")
    out, lse = flash_attention(
        *inputs, mask=mask, dropout_p=dropout_p, return_lse=True, backend=backend
    )
    assert out.shape == (*q[:3], 3) and lse.shape == (q[0], q[2], q[1])
    (out.sum() + torch.where(lse.isfinite(), lse, 0.0).sum()).backward()
    assert all(x.grad.shape == x.shape and x.grad.isfinite().all() for x in inputs)
    if not k[1]:
        assert (out == 0).all() and (lse == -math.inf).all()
    if not q[3] and not dropout_p:
        truth = reference_attention(*inputs, mask=mask, return_lse=False)
        torch.testing.assert_close(out, truth)


@pytest.mark.parametrize("backend", ["tiled", "triton"])
@pytest.mark.parametrize("name", [name for name in EMPTY if name != "no_dim"])
def test_empty_tensors_with_scores(name, backend):
    """Gradients of a bias and a sink where there is little to add up; a sink needs no key."""
    q, k = EMPTY[name]
    shapes = {"attn_mask": (q[0], q[2], q[1], k[1]), "learnable_sink": q[2:3]}
    leaves = [*tensors(q, k, (*k[:3], 3)), *(torch.randn(x) for x in shapes.values())]
    kwargs = {"alibi_slopes": torch.ones(q[2]), "softcap": 2.0, "return_lse": True}
    kwargs |= {"dropout_p": torch.full(q[:2], 0.5), "dropout_seed": 3}

    def run(attention, leaves, **options):
        leaves = [x.requires_grad_() for x in leaves]
        scores = dict(zip(shapes, leaves[3:], strict=True))
        results = attention(*leaves[:3], **scores, **kwargs, **options)
        loss = sum(x.sin().sum() for x in results)
        if loss.requires_grad:  # the definition of no sequence depends on nothing
            loss.backward()
        return [*results, *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]

    wide = run(reference_attention, [x.double() for x in leaves])
    for x, y in zip(run(flash_attention, leaves, backend=backend), wide, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["tiled", "triton"])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("slack", [0, 4])
def test_no_sequence_or_only_empty_ones(lengths, slack, backend):
    inputs = [x.requires_grad_() for x in packed(slack)]
    out, lse = flash_attention(
        *inputs, cu_seqlens_q=cu_seqlens(lengths), dropout_p=0.5, return_lse=True, backend=backend
    )
    assert (out == 0).all() and (lse == -math.inf).all() and out.shape == (slack, 2, 8)
    out.sum().backward()
    assert all((x.grad == 0).all() for x in inputs)


@pytest.mark.parametrize("backend", ["tiled", "triton"])
@pytest.mark.parametrize("scale", [0.0, -0.5, 3])
def test_any_scale(scale, backend):
    q, k, v = (x.requires_grad_() for x in tensors())
    ours = flash_attention(q, k, v, softmax_scale=scale, backend=backend)
    truth = reference_attention(q, k, v, softmax_scale=scale, return_lse=False)
    torch.testing.assert_close(ours, truth)
    if scale == 0:
        mean = v.mean(1, keepdim=True).repeat_interleave(2, 2)
        torch.testing.assert_close(ours, mean.expand_as(ours))
    grads = [torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (ours, truth)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("backend", ["tiled", "triton"])
def test_dropout_of_everything_gives_zeros(backend):
    q, k, v = (x.requires_grad_() for x in tensors())
    out, lse = flash_attention(q, k, v, dropout_p=1.0, return_lse=True, backend=backend)
    assert (out == 0).all()
    torch.testing.assert_close(lse, flash_attention(q, k, v, return_lse=True)[1])
    out.sum().backward()
    assert all((x.grad == 0).all() for x in (q, k, v))


def test_dropout_close_to_one_keeps_some_and_rescales():
    q = k = torch.zeros(1, 64, 1, 4)
    out = flash_attention(q, k, torch.ones(1, 64, 1, 4), dropout_p=0.99, dropout_seed=0)
    kept = out[0, :, 0, 0] * 64 * (65536 - round(0.99 * 65536)) / 65536
    torch.testing.assert_close(kept, kept.round(), atol=1e-4, rtol=0)
    assert 10 < kept.sum() < 80


def test_dropout_seed_as_int_or_tensor():
    q, k, v = tensors()
    one = flash_attention(q, k, v, dropout_p=0.5, dropout_seed=-7)
    two = flash_attention(q, k, v, dropout_p=0.5, dropout_seed=torch.tensor(-7))
    assert torch.equal(one, two)
    assert not torch.equal(one, flash_attention(q, k, v, dropout_p=0.5, dropout_seed=7))


def test_dropout_zero_draws_no_seed():
    state = torch.get_rng_state()
    flash_attention(*tensors_without_rng(), dropout_p=0.0)
    assert torch.equal(state, torch.get_rng_state())
    flash_attention(*tensors_without_rng(), dropout_p=0.5)
    assert not torch.equal(state, torch.get_rng_state())


def tensors_without_rng():
    return [torch.ones(1, 3, 1, 4)] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_to_its_dtype(dtype):
    q, k, v = (x.requires_grad_() for x in tensors())
    with torch.autocast("cpu", dtype=dtype):
        out = flash_attention(q, k.to(dtype), v)
    assert out.dtype == dtype
    assert torch.equal(out, flash_attention(*(x.to(dtype) for x in (q, k, v))))
    with torch.autocast("cpu", dtype=dtype):  # also around the backward pass
        out.float().sin().sum().backward()
    twins = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    flash_attention(*twins).float().sin().sum().backward()
    for x, twin in zip((q, k, v), twins, strict=True):
        assert torch.equal(x.grad.to(dtype), twin.grad)
    assert q.grad.dtype == v.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype):
        assert flash_attention(*tensors(dtype=torch.float64)).dtype == torch.float64


def test_gradients_that_are_not_asked_for():
    q, k, v = tensors()
    assert not flash_attention(q, k, v).requires_grad
    k.requires_grad_()
    _, lse = flash_attention(q, k, v, return_lse=True)
    lse.sum().backward()  # lse alone: out has no gradient
    assert k.grad.shape == k.shape and q.grad is None
    with torch.inference_mode():
        assert flash_attention(q, k, v).is_inference()


def test_meta_and_fake_tensors_give_shapes():
    q, k, v = (x.to("meta") for x in tensors(v=(2, 7, 2, 3)))
    out, lse = flash_attention(q, k, v, mask=Mask(causal=True), return_lse=True)
    assert (out.device.type, out.shape, lse.shape) == ("meta", (2, 5, 4, 3), (2, 4, 5))
    with FakeTensorMode():
        module = FlashMultiheadAttention(16, 2, batch_first=True)
        hidden = torch.zeros(2, 5, dtype=torch.bool)
        assert module(torch.empty(2, 5, 16), key_padding_mask=hidden)[0].shape == (2, 5, 16)


@pytest.mark.parametrize("kwargs", [{"window": ([1, -1], None)}, {"prefix_len": [0, -4]}])
def test_a_negative_limit_stops_a_device_too(kwargs):
    q, k, _, call = prepare(*tensors(), mask=Mask(**kwargs))
    with pytest.raises(RuntimeError, match="limits"):  # the host knows no values of a device
        check_contents(call, q.to("meta"), k.to("meta"))


def test_what_only_values_tell_stops_a_device_too():
    """As the host would refuse it, but without the values."""
    x = packed()
    wide = prepare(*x, cu_seqlens_q=cu_seqlens([2, 3]), attn_mask=torch.zeros(2, 1, 2, 3))
    calls = {
        "dropout_p must lie": prepare(*tensors(), dropout_p=rates(1.5)),
        "attn_mask covers too few queries": wide,
    }
    for words, (q, k, _, call) in calls.items():
        with pytest.raises(RuntimeError, match=words):
            check_contents(call, q.to("meta"), k.to("meta"))


BAD_LABELS = {
    "without_fn": ({"labels": (torch.zeros(5), torch.zeros(5))}, ValueError, "labels were given without fn, which alone reads them"),
    "one": ({"fn": same_document, "labels": torch.zeros(5)}, TypeError, "labels must be a pair of integer tensors"),
    "three": ({"fn": same_document, "labels": (torch.zeros(5),) * 3}, TypeError, "labels must be a pair of integer tensors"),
    "lists": ({"fn": same_document, "labels": ([1], [1])}, TypeError, "labels must be a pair of integer tensors"),
    "missing": ({"fn": same_document}, ValueError, "(batch, head, q_idx, kv_idx, *labels, *fn_args), here 4 arguments, got (batch, head, q_idx, kv_idx, q_label, kv_label)"),
    "unread": ({"fn": by_head, "labels": (torch.zeros(5), torch.zeros(5))}, ValueError, "here 6 arguments, got (batch, head, q_idx, kv_idx)"),
}  # fmt: skip


@pytest.mark.parametrize(("kwargs", "kind", "message"), BAD_LABELS.values(), ids=BAD_LABELS)
def test_labels_need_a_function_that_takes_them(kwargs, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        Mask(**kwargs)


def test_labels_of_any_integer_type_and_layout():
    q, k, v = tensors()
    q_labels, kv_labels = torch.randint(2, (2, 5)), torch.randint(2, (2, 7))
    results = [
        flash_attention(q, k, v, mask=Mask(fn=same_document, labels=(a, b)))
        for a, b in (
            (q_labels, kv_labels),
            (q_labels.to(torch.uint8), kv_labels.to(INT)),
            (q_labels.bool(), kv_labels.bool()),
            (q_labels.T.contiguous().T, kv_labels.repeat_interleave(2, 1)[:, ::2]),
        )
    ]
    assert all(torch.equal(results[0], other) for other in results)
    assert not torch.equal(results[0], flash_attention(q, k, v))
