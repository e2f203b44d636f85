"""The dense definition against independent oracles: loops in NumPy, torch's SDPA and its module."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import (
    LAYOUTS,
    SEED,
    Case,
    build,
    covering_cases,
    cu_seqlens,
    expected,
    rate_of,
    reference_attention,
    run,
    same_document,
)
from oracle import attend, random_bits, sees
from spelling import rows_of, scores_of, visible_pairs

from flashmod import Mask, TileConfig, flash_attention


@pytest.mark.parametrize("case", covering_cases(), ids=lambda case: case.id)
def test_definition_equals_spelled_out_loops(case):
    inputs, result, layout = build(case).promoted(), expected(case), LAYOUTS[case.layout]
    out, lse = np.zeros(result.out.shape), np.full(result.lse.shape, -np.inf)
    for n in range(len(layout.q)):
        q_at, kv_at = rows_of(case, layout.q, n), rows_of(case, layout.kv, n)
        q, k, v = (x[at].numpy() for x, at in zip(inputs[:3], (q_at, kv_at, kv_at), strict=True))

        def weigh(h, i, j, n=n):
            rate = rate_of(case, n, i)
            threshold = 65536 if rate == 1 else round(rate * 65536)
            kept = threshold < 65536 and random_bits(SEED, n, h, i, j) >= threshold
            return 65536 / (65536 - threshold) if kept else 0.0

        seen, scores = visible_pairs(case, inputs, n), scores_of(case, inputs, n)
        out_n, lse_n = attend(q, k, v, seen, scores, weigh)
        out[q_at] = out_n
        lse[(*q_at[:-1], slice(None), q_at[-1])] = lse_n
    np.testing.assert_allclose(result.out.numpy(), out, atol=1e-12)
    np.testing.assert_allclose(result.lse.numpy(), lse, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (3, 9), (9, 3)])
def test_definition_equals_torch_sdpa(causal, q_len, kv_len):
    q, k, v = (torch.randn(2, n, 4, 5, dtype=torch.float64) for n in (q_len, kv_len, kv_len))
    q, k, v = (x.requires_grad_() for x in (q, k[:, :, :2], v[:, :, :2]))
    ours = reference_attention(
        q, k, v, mask=Mask(causal=causal, align="top_left"), return_lse=False
    )
    theirs = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn_like(ours)
    for a, b in zip(
        *(torch.autograd.grad(x, (q, k, v), grad) for x in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_definition_equals_torch_sdpa_under_any_interval_mask():
    q, k, v = (torch.randn(2, n, 2, 6, dtype=torch.float64) for n in (8, 11, 11))
    seen = torch.tensor(
        [[sees(i, j, (8, 11), left=4, right=1, prefix=3) for j in range(11)] for i in range(8)]
    )
    ours = reference_attention(q, k, v, mask=Mask(window=(4, 1), prefix_len=3), return_lse=False)
    theirs = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen)
    torch.testing.assert_close(ours, theirs.transpose(1, 2))


def test_definition_equals_torch_module():
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    padding = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 1], [1, 0, 0, 0, 0, 0]]).bool()
    qkv = F.linear(x, theirs.in_proj_weight, theirs.in_proj_bias).unflatten(-1, (3, 2, 4)).unbind(2)
    ours = reference_attention(*qkv, attn_mask=~padding[:, None, None], return_lse=False)
    expected_out = theirs(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    torch.testing.assert_close(theirs.out_proj(ours.flatten(-2)), expected_out)


def test_definition_in_float32_accumulates_in_float32():
    q, k, v = (torch.randn(1, 5, 2, 8, dtype=torch.bfloat16) for _ in range(3))
    out, lse = reference_attention(q, k, v, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    exact = reference_attention(*(x.float() for x in (q, k, v)), return_lse=False)
    torch.testing.assert_close(out, exact.bfloat16(), rtol=0, atol=0)


LABELS = torch.tensor([1, 2, 2, 1, 2, 3])  # the first query of sequence 1 sees some keys only
BIAS = torch.linspace(-2, 2, 24, dtype=torch.float64).cos().reshape(2, 1, 3, 4)
BIAS[0, 0, 0, 1] = -torch.inf
BIAS[1, 0, 2] = -torch.inf  # a row that sees nothing but the sink
GRADCHECKS = {
    "causal_gqa_dropout": {"mask": Mask(causal=True), "dropout_p": 0.3, "dropout_seed": 5},
    "window_prefix_scale": {"mask": Mask(window=(2, 1), prefix_len=2), "softmax_scale": -0.7},
    "everything": {
        "mask": Mask(fn=same_document, labels=(LABELS[:5], LABELS)),
        "attn_mask": BIAS.requires_grad_(),
        "softcap": 1.3,
        "alibi_slopes": torch.tensor([0.2, 0.7]),
        "learnable_sink": torch.tensor([-0.4, 1.1], dtype=torch.float64, requires_grad=True),
        "dropout_p": torch.tensor([0.0, 0.5, 0.3, 1.0, 0.1]),
        "dropout_seed": 5,
    },
}


@pytest.mark.parametrize("function", ["reference", "tiled"])
@pytest.mark.parametrize("kwargs", GRADCHECKS.values(), ids=GRADCHECKS)
def test_gradcheck(function, kwargs):
    """out and lse by finite differences, two sequences."""
    sequences = {"cu_seqlens_q": cu_seqlens((2, 3)), "cu_seqlens_k": cu_seqlens((2, 4))}
    check_gradients(
        function, [(5, 2, 3), (6, 1, 3), (6, 1, 2)], TileConfig(2, 3), **sequences, **kwargs
    )


@pytest.mark.parametrize("name", ["causal_gqa_dropout", "everything"])
def test_gradcheck_of_kernels(name):
    """One sequence, along random directions: the interpreter is slow."""
    kwargs, shapes = GRADCHECKS[name], [(3, 2, 2), (4, 1, 2), (4, 1, 2)]
    kwargs = kwargs | {"cu_seqlens_q": cu_seqlens((3,)), "cu_seqlens_k": cu_seqlens((4,))}
    if name == "everything":
        labels, bias = (LABELS[2:5], LABELS[2:]), BIAS[1:].detach().requires_grad_()
        kwargs |= {"mask": Mask(fn=same_document, labels=labels), "attn_mask": bias}
        kwargs["dropout_p"] = kwargs["dropout_p"][2:]
    check_gradients("triton", shapes, TileConfig(16, 16), fast_mode=True, **kwargs)


def check_gradients(function, shapes, tiles, fast_mode=False, **kwargs):
    options = {} if function == "reference" else {"backend": function, "tiles": tiles}
    attention = reference_attention if function == "reference" else flash_attention
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    scored = [name for name, x in kwargs.items() if getattr(x, "requires_grad", False)]

    def attend(q, k, v, *terms):
        named = dict(zip(scored, terms, strict=True))
        if "attn_mask" in named:  # a finite difference of -inf is none
            named["attn_mask"] = named["attn_mask"].where(
                kwargs["attn_mask"].isfinite(), -torch.inf
            )
        out, lse = attention(q, k, v, return_lse=True, **kwargs | named, **options)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    leaves = [kwargs[name].detach().nan_to_num(neginf=0.0).requires_grad_() for name in scored]
    assert torch.autograd.gradcheck(attend, [*inputs, *leaves], fast_mode=fast_mode)


def test_cases_run_through_their_own_harness():
    """A gradient into lse is part of what every case compares."""
    case = Case("dense", "causal", 0.0, "mha")
    inputs = build(case)
    without = run(inputs._replace(grad_lse=torch.zeros_like(inputs.grad_lse)), reference_attention)
    assert not torch.equal(without.dq, run(inputs, reference_attention).dq)
