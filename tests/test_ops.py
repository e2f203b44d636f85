"""The custom ops and the autograd Function: torch's own checks, func, FLOPs, checkpointing."""

from functools import partial

import pytest
import torch
from cases import SEED, cu_seqlens
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from flashmod import Mask, TileConfig, flash_attention
from flashmod.functional import prepare

# torch's own forward-mode machinery.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

OPS = torch.ops.flashmod
UTILS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def same_label(batch, head, q_idx, kv_idx, q_label, kv_label):
    return q_label == kv_label


def call_arguments(layout="contiguous", **kwargs):
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 6)
    if layout == "transposed":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    ready = prepare(q, k, v, tiles=TileConfig(4, 4), **kwargs)
    return (ready.q, ready.k, ready.v), tuple(ready.call)


CALLS = {
    "plain": {},
    "transposed": {"layout": "transposed", "mask": Mask(causal=True)},
    "dropout": {"dropout_p": 0.5, "dropout_seed": SEED, "softmax_scale": 0.3},
    "padding": {"attn_mask": torch.ones(2, 1, 1, 7).bool(), "lengths_q": torch.tensor([5, 2])},
    "scores": {
        "attn_mask": torch.linspace(-1, 1, 28).view(1, 4, 1, 7),
        "softcap": 3.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]),
        "learnable_sink": torch.tensor([0.5, -1.0, 0.0, 2.0]),
    },
    "per_token": {
        "mask": Mask(
            fn=same_label, labels=(torch.arange(10).view(2, 5), torch.arange(14).view(2, 7))
        ),
        "dropout_p": torch.linspace(0, 1, 10).view(2, 5),
        "dropout_seed": SEED,
    },
}


@pytest.mark.parametrize("kwargs", CALLS.values(), ids=CALLS)
def test_opcheck_of_forward_and_backward(kwargs):
    (q, k, v), call = call_arguments(**kwargs)
    torch.library.opcheck(OPS.attention_forward.default, (q, k, v, *call), test_utils=UTILS)
    out, lse, saved, *_ = OPS.attention_forward(q, k, v, *call)
    mask_grad = "attn_mask" in kwargs and kwargs["attn_mask"].is_floating_point()
    for grad_out, grad_lse in (
        (torch.randn_like(out), None),
        (torch.ones(()).expand_as(out), torch.randn_like(lse)),
    ):
        arguments = (grad_out, grad_lse, q, k, v, out, saved, mask_grad, *call)
        torch.library.opcheck(OPS.attention_backward.default, arguments, test_utils=UTILS)


def test_opcheck_of_the_seed():
    torch.library.opcheck(
        OPS.seed.default,
        (torch.device("cpu"),),
        test_utils=("test_schema", "test_autograd_registration"),
    )
    assert torch.Tag.nondeterministic_seeded in OPS.seed.default.tags


@pytest.mark.parametrize("backend", ["tiled", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mask_grad", [False, True])
def test_fakes_promise_what_the_backends_give(backend, dtype, mask_grad):
    q, k, v = (torch.randn(2, n, 2, 8, dtype=dtype) for n in (3, 5, 5))
    bias, sink = torch.randn(1, 2, 1, 5), torch.randn(2, dtype=torch.float64)
    options = {"attn_mask": bias, "learnable_sink": sink} if mask_grad else {}
    ready = prepare(q, k, v, backend=backend, **options)
    real = OPS.attention_forward(*ready[:3], *ready.call)
    grads = OPS.attention_backward(
        real[0], real[1], *ready[:3], real[0], real[2], mask_grad, *ready.call
    )
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, k, v = (mode.from_tensor(x) for x in ready[:3])
        fake = OPS.attention_forward(q, k, v, *ready.call)
        fake_grads = OPS.attention_backward(
            fake[0], fake[1], q, k, v, fake[0], fake[2], mask_grad, *ready.call
        )
    for a, b in [*zip(real, fake, strict=True), *zip(grads, fake_grads, strict=True)]:
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def loss(q, k, v, **kwargs):
    out, lse = flash_attention(q, k, v, return_lse=True, mask=Mask(causal=True), **kwargs)
    return out.sin().sum() + lse.cos().sum()


def qkv(**kwargs):
    return [torch.randn(1, 5, 2, 4, **kwargs) for _ in range(3)]


def test_func_grad_equals_backward():
    inputs = qkv(requires_grad=True)
    loss(*inputs).backward()
    grads = torch.func.grad(loss, argnums=(0, 1, 2))(*(x.detach() for x in inputs))
    for x, grad in zip(inputs, grads, strict=True):
        assert torch.equal(x.grad, grad)
    _, pullback = torch.func.vjp(lambda q: flash_attention(q, *inputs[1:]), inputs[0].detach())
    assert pullback(torch.ones(1, 5, 2, 4))[0].shape == (1, 5, 2, 4)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_double_backward_raises(which):
    inputs = qkv(requires_grad=True)
    (grad,) = torch.autograd.grad(loss(*inputs), inputs[which], create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        grad.square().sum().backward()
    gradient = torch.func.grad(loss, argnums=which)
    with pytest.raises(RuntimeError, match="no double backward"):
        torch.func.grad(lambda *x: gradient(*x).sum(), argnums=which)(*(x.detach() for x in inputs))


def test_forward_mode_raises_rather_than_giving_zero():
    q, k, v = qkv()
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.func.jvp(lambda q: flash_attention(q, k, v), (q,), (torch.ones_like(q),))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("grad", [True, False])
def test_compiles_with_every_gradient_in_one_graph(grad):
    bias, sink = torch.randn(2, 5, 1, requires_grad=grad), torch.randn(2, requires_grad=grad)
    inputs = (*qkv(requires_grad=grad), bias, sink)

    def call(q, k, v, bias, sink):
        return flash_attention(
            q, k, v, attn_mask=bias, learnable_sink=sink, dropout_p=0.3, dropout_seed=1
        )

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, wanted = compiled(*inputs), call(*inputs)
    assert torch.equal(got, wanted)
    if grad:
        got, wanted = (torch.autograd.grad(x.sin().sum(), inputs) for x in (got, wanted))
        assert all(map(torch.equal, got, wanted))


def test_flop_counts():
    """Pairs of real tokens, as torch's own formulas: a mask does not lower the count."""
    q, k, v = (torch.randn(8, h, d, requires_grad=True) for h, d in ((4, 8), (2, 8), (2, 6)))
    pairs = 3 * 3 + 4 * 4
    for mask in (None, Mask(causal=True)):
        with FlopCounterMode(display=False) as counter:
            out = flash_attention(q, k, v, cu_seqlens_q=cu_seqlens([3, 4]), mask=mask)
        assert counter.get_total_flops() == 2 * pairs * 4 * (8 + 6)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert counter.get_total_flops() == 2 * pairs * 4 * (3 * 8 + 2 * 6)


def test_flops_of_dense_input():
    q, k, v = (torch.randn(2, n, 2, 8) for n in (3, 5, 5))
    with FlopCounterMode(display=False) as counter:
        flash_attention(q, k, v)
    assert counter.get_total_flops() == 2 * (2 * 3 * 5) * 2 * 16


def policy(ctx, op, *args, **kwargs):
    kept = op is OPS.attention_forward.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
def test_checkpoint_replays_dropout(selective):
    """Also where only the attention is saved and its seed is drawn again."""

    def block(q, k, v):
        q = q * 2
        return flash_attention(q, k, v, dropout_p=0.5).sin()

    inputs = qkv(requires_grad=True)
    contexts = (
        {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if selective else {}
    )
    results = []
    for call in (block, partial(checkpoint, block, use_reentrant=False, **contexts)):
        torch.manual_seed(1)
        out = call(*inputs)
        torch.randn(5)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    assert all(map(torch.equal, *results))


def test_selective_checkpoint_runs_the_forward_once(monkeypatch):
    from flashmod.backends import tiled

    runs = []
    forward = tiled.forward
    monkeypatch.setattr(tiled, "forward", lambda *args: runs.append(1) or forward(*args))
    contexts = partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(
        flash_attention, *qkv(requires_grad=True), use_reentrant=False, context_fn=contexts
    )
    out.sum().backward()
    assert len(runs) == 1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_exports_as_one_op():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attention(q, k, v, mask=Mask(causal=True))

    inputs = tuple(qkv())
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Attention(), inputs, dynamic_shapes=[{1: rows}] * 3)
    calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert calls.count(OPS.attention_forward.default) == 1
    longer = [torch.randn(1, 9, 2, 4) for _ in range(3)]
    torch.testing.assert_close(program.module()(*longer), Attention()(*longer))


def test_a_gradient_of_none_and_inference():
    q, k, v = qkv(requires_grad=True)
    out, lse = flash_attention(q, k, v, return_lse=True)
    assert torch.autograd.grad(lse.sum(), v)[0].abs().max() == 0
    with torch.no_grad():
        assert not flash_attention(q, k, v).requires_grad
    assert out.requires_grad
