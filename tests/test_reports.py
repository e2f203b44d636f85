"""Faults that people hit in systems like this one, each with the right result worked out by hand.

Every test names the report it comes from. Where q = 0 every visible key weighs the same, so the
results are plain means.
"""

import math

import pytest
import torch
from cases import cu_seqlens
from torch._dynamo.testing import CompileCounterWithBackend

from flashmod import FlashMultiheadAttention, Mask, TileConfig, flash_attention

BACKENDS = ("tiled", "triton")
backends = pytest.mark.parametrize("backend", BACKENDS)
F, T = False, True


def col(*values, dim=16):
    """(1, n, 1, D) with the values in channel 0."""
    v = torch.zeros(1, len(values), 1, dim)
    v[0, :, 0, 0] = torch.tensor(values, dtype=torch.float32)
    return v.requires_grad_()


def close(x, values):
    torch.testing.assert_close(
        x.detach().flatten(), torch.tensor(values).float(), rtol=1e-5, atol=1e-5
    )


def small(q_len, kv_len, dim=16):
    """q = 0 and random keys, one head."""
    return torch.zeros(1, q_len, 1, dim), torch.randn(1, kv_len, 1, dim)


@pytest.fixture
def poisoned():
    junk = torch.full((1 << 20,), math.nan)
    del junk


@backends
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_flash_attention_2562_empty_query_segments(backend, dim, poisoned):
    q, k = torch.zeros(5, 1, dim), torch.randn(8, 1, dim, requires_grad=True)
    v = col(*range(8), dim=dim)[0].detach().requires_grad_()
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 3, 5, 5], [0, 2, 4, 6, 8]))
    out = flash_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend=backend)
    out[:, 0, 0].sum().backward()
    close(out[:, 0, 0], [2.5, 2.5, 2.5, 4.5, 4.5])
    close(v.grad[:, 0, 0], [0, 0, 1.5, 1.5, 1, 1, 0, 0])
    assert (k.grad[[0, 1, 6, 7]] == 0).all()


@pytest.mark.parametrize("n", [1, 2, 10, 17, 20])
def test_xformers_1122_lengths_beyond_the_keys(n):
    q, k = torch.rand(10, 4, 16), torch.rand(n, 4, 16)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 10], [0, 20]))
    for backend in BACKENDS:
        if n == 20:
            assert (
                flash_attention(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend=backend)
                .isfinite()
                .all()
            )
            continue
        with pytest.raises(ValueError, match=rf"row 20, but k has {n} rows"):
            flash_attention(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend=backend)


ALIGNMENTS = [
    ("top_left", (2, 5), [1, 1.5], [1.5, 0.5, 0, 0, 0]),
    ("top_left", (5, 2), [1, 1.5, 1.5, 1.5, 1.5], [3, 2]),
    ("bottom_right", (2, 5), [2.5, 3], [0.45, 0.45, 0.45, 0.45, 0.2]),
    ("bottom_right", (5, 2), [0, 0, 0, 1, 1.5], [1.5, 0.5]),
]


@backends
@pytest.mark.parametrize("packed", [F, T])
@pytest.mark.parametrize(("align", "lengths", "means", "gradient"), ALIGNMENTS)
def test_pytorch_108108_causal_alignment(backend, packed, align, lengths, means, gradient):
    (q, k), v = small(*lengths), col(*range(1, lengths[1] + 1))
    options = {"mask": Mask(causal=True, align=align), "backend": backend}
    if packed:
        cu = {f"cu_seqlens_{x}": cu_seqlens([n]) for x, n in zip("qk", lengths, strict=True)}
        out = flash_attention(q[0], k[0], v[0], **cu, **options)
    else:
        out = flash_attention(q, k, v, **options)
    out[..., 0].sum().backward()
    close(out[..., 0], means)
    close(v.grad[..., 0], gradient)


@backends
@pytest.mark.parametrize(
    ("mask", "means"),
    [
        (Mask(causal=True, window=(1, None)), [0, 0.5, 1.5, 2.5]),  # two tokens, itself included
        (Mask(window=(1, 0)), [0, 0.5, 1.5, 2.5]),
        (Mask(window=(2, 0)), [0, 0.5, 1, 2]),
    ],
)
def test_transformers_39408_a_window_looks_back_besides_the_token_itself(backend, mask, means):
    out = flash_attention(*small(4, 4), col(0, 1, 2, 3), mask=mask, backend=backend)
    close(out[..., 0], means)


@pytest.mark.parametrize(
    "tiles", [None, TileConfig(16, 16), TileConfig(5, 3), TileConfig(64, 32), TileConfig(7, 128)]
)
@pytest.mark.parametrize("kv_len", [1, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129])
def test_tokamax_316_lengths_that_do_not_fill_a_tile(kv_len, tiles):
    ones_give_ones(kv_len, backend="tiled", tiles=tiles)


@pytest.mark.parametrize("kv_len", [1, 15, 16, 17, 33, 65])
def test_tokamax_316_in_kernels(kv_len):
    ones_give_ones(kv_len, backend="triton", tiles=TileConfig(16, 32))


def ones_give_ones(kv_len, **options):
    for q_len in (kv_len, kv_len + 1):
        q, k, v = (torch.ones(1, n, 1, 16, requires_grad=True) for n in (q_len, kv_len, kv_len))
        out = flash_attention(q, k, v, **options)
        out.backward(torch.ones_like(out))
        for x, value in ((out, 1), (q.grad, 0), (k.grad, 0), (v.grad, q_len / kv_len)):
            torch.testing.assert_close(x, torch.full_like(x, value), atol=1e-5, rtol=1e-5)


@backends
def test_levanter_449_gradients_of_shared_heads_are_summed(backend):
    q, k = torch.zeros(1, 2, 4, 16), torch.randn(1, 2, 2, 16, requires_grad=True)
    v = torch.zeros(1, 2, 2, 16)
    v[:, :, 0, 0], v[:, :, 1, 0] = 10, 20
    v.requires_grad_()
    out = flash_attention(q, k, v, backend=backend)
    out[..., 0].sum().backward()
    assert v.grad.shape == k.grad.shape == (1, 2, 2, 16)
    assert (v.grad[..., 0] == 2).all() and (v.grad[..., 1:] == 0).all()
    close(out[..., 0], [10, 10, 20, 20] * 2)
    assert (k.grad == 0).all()


@backends
def test_flash_attention_355_strided_and_expanded_output_gradients(backend):
    q, k, v = (torch.randn(2, 5, 2, 16, requires_grad=True) for _ in range(3))
    out = flash_attention(q, k, v, backend=backend)
    strided = torch.randn(2, 2, 5, 16).transpose(1, 2)
    ones = torch.ones(2, 5, 2, 16)

    def grads(loss, grad=None):
        return torch.autograd.grad(loss, (q, k, v), grad, retain_graph=True)

    assert all(map(torch.equal, grads(out, strided), grads(out, strided.contiguous())))
    assert all(map(torch.equal, grads(out.sum()), grads(out, ones)))
    dense = ((q.transpose(1, 2) @ k.transpose(1, 2).mT) / 4).softmax(-1) @ v.transpose(1, 2)
    for a, b in zip(grads(out, strided), grads(dense.transpose(1, 2), strided), strict=True):
        torch.testing.assert_close(a, b)


def first_or_own(batch, head, q_idx, kv_idx):
    return (kv_idx == 0) | (kv_idx == q_idx)


@backends
@pytest.mark.parametrize("packed", [F, T])
def test_flash_attention_2424_the_backward_knows_the_mask_function(backend, packed):
    (q, k), v = small(4, 4), col(0, 1, 2, 3)
    options = {"mask": Mask(fn=first_or_own), "backend": backend}
    if packed:
        out = flash_attention(q[0], k[0], v[0], cu_seqlens_q=cu_seqlens([4]), **options)
    else:
        out = flash_attention(q, k, v, **options)
    out[..., 0].sum().backward()
    close(out[..., 0], [0, 0.5, 1, 1.5])
    close(v.grad[..., 0], [2.5, 0.5, 0.5, 0.5])


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pytorch_121558_large_inputs_give_no_nan(backend, dtype):
    x = [torch.full((1, 1, 1, 64), 133120.0, dtype=dtype, requires_grad=True) for _ in range(3)]
    out = flash_attention(*x, backend=backend)
    out.sum().backward()
    assert (out == 133120).all() and (x[2].grad == 1).all()
    assert (x[0].grad == 0).all() and (x[1].grad == 0).all()
    five = [x[0], *(y.detach().expand(1, 5, 1, 64).clone().requires_grad_() for y in x[1:])]
    out = flash_attention(*five, backend=backend)
    out.sum().backward()
    torch.testing.assert_close(out, torch.full_like(out, 133120))
    assert all(y.grad.isfinite().all() for y in five)
    share = torch.full_like(five[2], 0.2)
    torch.testing.assert_close(five[2].grad, share, rtol=torch.finfo(dtype).eps, atol=0)


def test_pytorch_190857_row_offsets_beyond_32_bits(monkeypatch):
    """Row 2 starts at element 2**31 of a buffer whose pages are never touched."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", F)
    base = [torch.empty(2 * 2**30 + 4096, dtype=torch.float16) for _ in range(2)]
    far = [x.as_strided((1, 3, 1, 16), (0, 2**30, 0, 1)) for x in base]
    for x in far:
        x.copy_(torch.randn(1, 3, 1, 16))
    q = torch.randn(1, 3, 1, 16, dtype=torch.float16)
    for tensors in ((q, *far), (far[0], far[1], q)):
        results = []
        for inputs in (tensors, [x.contiguous() for x in tensors]):
            leaves = [x.detach().requires_grad_() for x in inputs]
            out = flash_attention(*leaves, backend="triton")
            results.append((out, *torch.autograd.grad(out.sum(), leaves)))
        assert all(map(torch.equal, *results))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_diffusers_11957_lengths_do_not_break_the_graph():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v, cu: flash_attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu),
        fullgraph=T, backend=counter,
    )  # fmt: skip
    inputs = [torch.randn(8, 2, 4, requires_grad=True) for _ in range(3)]
    for lengths in ([3, 5], [1, 7]):
        cu = cu_seqlens(lengths)
        results = []
        for call in (compiled(*inputs, cu), flash_attention(*inputs, cu_seqlens_q=cu)):
            results.append((call, *torch.autograd.grad(call.square().sum(), inputs)))
        assert all(map(torch.equal, *results))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)]
)
def test_triton_11584_bfloat16_under_the_interpreter(dtype, tolerance):
    q, k, v, grad = (torch.randint(-2, 3, (1, 16, 1, 16)).to(dtype) for _ in range(4))
    results = []
    for inputs, backend in (((q, k, v), "triton"), ([x.double() for x in (q, k, v)], "tiled")):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = flash_attention(*leaves, backend=backend)
        results.append((out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))))
    for ours, truth in zip(*results, strict=True):
        limit = tolerance * max(1.0, float(truth.detach().abs().max()))
        torch.testing.assert_close(ours.double(), truth, atol=limit, rtol=0)


@backends
def test_linear_attention_838_boundaries_win_or_the_call_is_refused(backend):
    (q, k), v = small(5, 5), col(0, 1, 2, 3, 4)
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    options = {"cu_seqlens_q": cu, "mask": Mask(causal=T), "backend": backend}
    close(flash_attention(q[0], k[0], v[0], **options)[..., 0], [0, 0.5, 1, 3, 3.5])
    for keep in (torch.ones(1, 5).bool(), torch.tensor([[T, T, T, T, F]])):
        with pytest.raises(ValueError, match="has 5 keys, one for every packed token"):
            flash_attention(q[0], k[0], v[0], attn_mask=keep, **options)
    keep = torch.tensor([T, F, T])  # by positions within a sequence it is taken
    out = flash_attention(q[0], k[0], v[0], attn_mask=keep, **options)
    close(out[..., 0], [0, 0, 1, 3, 3])
    m, x = FlashMultiheadAttention(4, 1), torch.randn(5, 4)
    with pytest.raises(ValueError, match="one of key_padding_mask, cu_seqlens and lengths"):
        m(x, cu_seqlens=cu, key_padding_mask=torch.zeros(5).bool())
