"""Jagged NestedTensors in and out of ``flash_attention``."""

import pytest
import torch
import torch.nn.functional as F
from torch.nested import nested_tensor_from_jagged
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashmod import Mask, flash_attention
from flashmod.functional import explain
from flashmod.intercept import intercepting

# torch's own: NestedTensor is a tensor subclass that traces itself.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

LENGTHS, KV_LENGTHS = (3, 0, 6, 1), (4, 2, 5, 0)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def jagged(lengths, heads=2, dim=4, ends=None, **kwargs):
    ends = offsets(lengths) if ends is None else ends
    return nested_tensor_from_jagged(torch.randn(sum(lengths), heads, dim, **kwargs), offsets=ends)


def qkv(heads=(2, 2), value_dim=4, dtype=torch.float32):
    """Self-attention: the three share their offsets."""
    ends = offsets(LENGTHS)
    shapes = ((heads[0], 4), (heads[1], 4), (heads[1], value_dim))
    return [jagged(LENGTHS, *shape, ends=ends, dtype=dtype) for shape in shapes]


def dense(q, k, v, causal=False):
    """One sequence in float64: q (S, H, D), k and v (S_kv, H_kv, .)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), k.double()) / q.shape[-1] ** 0.5
    if causal:
        shift = k.shape[0] - q.shape[0]
        scores = scores.masked_fill(torch.ones_like(scores).triu(shift + 1) > 0, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("hij,jhd->ihd", weights, v.double())


@pytest.mark.parametrize("backend", ["tiled", "triton"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_every_sequence_is_dense_attention(backend, causal, cross):
    q, k, v = qkv(heads=(2, 1), value_dim=3)
    if cross:
        ends = offsets(KV_LENGTHS)
        k, v = (jagged(KV_LENGTHS, 1, dim, ends) for dim in (4, 3))
    leaves = [x.values().requires_grad_() for x in (q, k, v)]
    inputs = [
        nested_tensor_from_jagged(x, offsets=y.offsets())
        for x, y in zip(leaves, (q, k, v), strict=True)
    ]
    out = flash_attention(*inputs, mask=Mask(causal=causal), backend=backend)
    rows = [dense(*one, causal=causal) for one in zip(*(x.unbind() for x in inputs), strict=True)]
    wanted = torch.cat(rows)
    torch.testing.assert_close(out.values().double(), wanted, rtol=1e-5, atol=1e-5)
    cotangent = torch.randn_like(wanted)
    grads = torch.autograd.grad(out.values(), leaves, cotangent.float(), retain_graph=True)
    for got, good in zip(grads, torch.autograd.grad(wanted, leaves, cotangent), strict=True):
        torch.testing.assert_close(got, good, rtol=1e-5, atol=1e-5)


def test_equals_torchs_own_attention_of_nested_tensors():
    ends = offsets((3, 6, 1))
    q, k, v = (jagged((3, 6, 1), ends=ends) for _ in range(3))
    mine = flash_attention(q, k, v)
    with sdpa_kernel(SDPBackend.MATH):  # the only one of torch's on a CPU, and not causal
        theirs = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    theirs = theirs.transpose(1, 2)
    assert mine.shape == theirs.shape
    torch.testing.assert_close(mine.values(), theirs.values(), rtol=1e-5, atol=1e-5)


def test_the_result_joins_its_inputs():
    """Same offsets object, so that a residual connection works; lse stays packed."""
    q, k, v = qkv()
    out, lse = flash_attention(q, k, v, return_lse=True, cu_seqlens_q=None, lengths_k=None)
    assert out.offsets() is q.offsets()
    assert (out + q).shape == q.shape
    assert lse.shape == (2, sum(LENGTHS))
    packed = flash_attention(
        *(x.values() for x in (q, k, v)), cu_seqlens_q=offsets(LENGTHS).int(), return_lse=True
    )
    assert torch.equal(out.values(), packed[0]) and torch.equal(lse, packed[1])


def test_heads_before_rows_come_in_by_a_transpose():
    q, k, v = qkv()
    ends = q.offsets()
    heads_first = [
        nested_tensor_from_jagged(
            x.values().transpose(0, 1).contiguous(), offsets=ends, jagged_dim=2
        )
        for x in (q, k, v)
    ]
    with pytest.raises(ValueError, match=r"transpose\(1, 2\)"):
        flash_attention(*heads_first)
    out = flash_attention(*(x.transpose(1, 2) for x in heads_first))
    assert torch.equal(out.values(), flash_attention(q, k, v).values())


def test_other_arguments_work_as_for_packed_tokens():
    q, k, v = qkv()
    bias = torch.randn(4, 1, 6, 6, requires_grad=True)
    options = {
        "attn_mask": bias, "dropout_p": torch.linspace(0, 0.9, sum(LENGTHS)), "dropout_seed": 2,
        "mask": Mask(causal=[True, False, False, True]), "sequence_ids": torch.arange(4) + 5,
    }  # fmt: skip
    out = flash_attention(q, k, v, **options)
    packed = flash_attention(
        *(x.values() for x in (q, k, v)), cu_seqlens_q=offsets(LENGTHS).int(), **options
    )
    assert torch.equal(out.values(), packed)
    out.values().sum().backward()
    assert bias.grad.abs().sum() > 0


def test_statistics_follow_the_output():
    out, lse, stats = flash_attention(*qkv(), return_lse=True, return_stats=True)
    assert out.is_nested and lse.shape == stats.entropy.shape
    assert len(stats.sequences) == len(LENGTHS)


def test_explain_and_measurements_see_packed_tokens():
    q, k, v = qkv()
    assert explain(q, k, v).startswith("backend: tiled")
    seen = []

    def handler(request):
        seen.append(request.q.shape)
        return request.run(request.q, request.k, request.v, **request.kwargs)

    with intercepting(handler):
        assert flash_attention(q, k, v).is_nested
    assert seen == [(sum(LENGTHS), 2, 4)]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_in_one_graph():
    def block(q, k, v):
        return flash_attention(q, k, v, mask=Mask(causal=True)) + q

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    inputs = qkv()
    torch.testing.assert_close(compiled(*inputs).values(), block(*inputs).values())


def test_equal_offsets_of_keys_and_values_need_not_be_one_object():
    q, k, v = qkv()
    twin = nested_tensor_from_jagged(v.values(), offsets=v.offsets().clone())
    assert torch.equal(flash_attention(q, k, twin).values(), flash_attention(q, k, v).values())
    other = jagged((2, 1, 6, 1))
    with pytest.raises(ValueError, match="offsets differ"):
        flash_attention(q, k, other)


def holes():
    padded = torch.randn(3, 6, 2, 4)
    starts, lengths = torch.zeros(3, dtype=torch.int64), torch.tensor([2, 6, 1])
    return torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)


def test_holes_are_refused_with_a_way_out():
    x = holes()
    with pytest.raises(NotImplementedError, match=r"q.contiguous\(\)"):
        flash_attention(x, x, x)
    assert flash_attention(*(x.contiguous() for _ in range(3))).values().shape == (9, 2, 4)


REFUSALS = {
    "strided": (
        lambda q: (torch.nested.nested_tensor([x.clone() for x in q.unbind()]),) * 3, {},
        NotImplementedError, "layout=torch.jagged",
    ),
    "one_is_not": (lambda q: (q, q.values(), q), {}, TypeError, "k is not"),
    "only_one_is": (lambda q: (q.values(), q, q), {}, TypeError, "q is not"),
    "cu_seqlens": (
        lambda q: (q, q, q), {"cu_seqlens_q": offsets(LENGTHS).int()}, ValueError, "cu_seqlens_q"
    ),
    "lengths": (lambda q: (q, q, q), {"lengths_k": torch.tensor([1])}, ValueError, "lengths_k"),
    "three_axes": (
        lambda q: (nested_tensor_from_jagged(q.values()[:, 0], offsets=q.offsets()),) * 3, {},
        ValueError, r"\(B, j, H, D\)",
    ),
    "counts": (lambda q: (q, jagged((4, 6)), jagged((4, 6))), {}, ValueError, "sequences"),
    "count_of_values": (lambda q: (q, q, jagged((4, 6))), {}, ValueError, "sequences"),
    "nested_mask": (
        lambda q: (q, q, q), {"attn_mask": jagged(LENGTHS)}, TypeError, "attn_mask"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_what_to_do(name):
    build, kwargs, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        flash_attention(*build(jagged(LENGTHS)), **kwargs)


def test_a_nested_mask_beside_dense_tokens():
    with pytest.raises(TypeError, match="q is not"):
        flash_attention(*torch.randn(3, 1, 4, 2, 4), attn_mask=jagged((4, 2)))
