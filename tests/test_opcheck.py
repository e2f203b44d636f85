"""``torch.library.opcheck`` on every op, with every argument of a call."""

import pytest
import torch
from cases import SEED, cu_seqlens

from flashmod import Mask, TileConfig
from flashmod.functional import prepare
from flashmod.spec import AttentionCall

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

OPS = torch.ops.flashmod
UTILS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
B, S, S_KV, H, H_KV, D, D_V = 2, 5, 7, 4, 2, 8, 6


def near(batch, head, q_idx, kv_idx, q_label, kv_label, reach):
    return (q_idx - kv_idx < reach) & (q_label >= kv_label)


def bias(*shape):
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)


LABELS = (torch.arange(B * S).view(B, S), torch.arange(B * S_KV).view(B, S_KV))
ARGUMENTS = {
    "bias, sink": {"attn_mask": bias(B, H, S, S_KV), "learnable_sink": bias(H)},
    "bias of heads, slopes": {"attn_mask": bias(H, S, S_KV), "alibi_slopes": bias(H)},
    "bias of keys, softcap": {"attn_mask": bias(B, 1, 1, S_KV), "softcap": 2.0},
    "expanded bias, slopes of sequences": {
        "attn_mask": bias(1, S_KV).expand(B, H, S, S_KV),
        "alibi_slopes": bias(B, H),
    },
    "bias of another dtype, scale": {
        "attn_mask": bias(H, 1, S_KV).double(),
        "softmax_scale": 0.0,
    },
    "bool, rates": {
        "attn_mask": bias(B, 1, S, S_KV) > 0,
        "dropout_p": bias(B, S).abs(),
        "dropout_seed": SEED,
    },
    "padding, dropout, ids": {
        "attn_mask": bias(B, 1, 1, S_KV) > -0.5,
        "sequence_ids": torch.tensor([4, 2]),
        "dropout_p": 0.5,
        "dropout_seed": SEED,
    },
    "labels": {"mask": Mask(fn=near, fn_args=(3,), labels=LABELS)},
    "limits, lengths": {
        "mask": Mask(causal=torch.tensor([True, False]), window=(3, None)),
        "lengths_q": torch.tensor([5, 0]),
        "lengths_k": torch.tensor([2, 7]),
    },
    "prefix": {"mask": Mask(causal=True, prefix_len=torch.tensor([3, 0]), align="top_left")},
}


def tensors(dtype=torch.float32, packed=False):
    lead = (lambda rows: (B * rows,)) if packed else (lambda rows: (B, rows))
    shapes = ((*lead(S), H, D), (*lead(S_KV), H_KV, D), (*lead(S_KV), H_KV, D_V))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def check(ready, mask_grad, utils=UTILS):
    q, k, v, call = ready
    forward = (q, k, v, *call)
    torch.library.opcheck(OPS.attention_forward.default, forward, test_utils=utils)
    out, lse, saved, *_ = OPS.attention_forward(*forward)
    grads = torch.randn_like(out), torch.randn_like(lse).masked_fill(lse == -torch.inf, 0.0)
    backward = (*grads, q, k, v, out, saved, mask_grad, *call)
    torch.library.opcheck(OPS.attention_backward.default, backward, test_utils=utils)


def is_bias(kwargs):
    mask = kwargs.get("attn_mask")
    return mask is not None and mask.is_floating_point()


@pytest.mark.parametrize("kwargs", ARGUMENTS.values(), ids=ARGUMENTS)
def test_every_argument(kwargs):
    ready = prepare(*tensors(), tiles=TileConfig(4, 4), **kwargs)
    check(ready, is_bias(kwargs))


def test_the_kernels():
    """One call with everything: the interpreter is slow."""
    kwargs = {"attn_mask": bias(H_KV, 3, 4), "learnable_sink": bias(H_KV), "softcap": 2.0}
    q, k, v = torch.randn(1, 3, H_KV, D), torch.randn(1, 4, 1, D), torch.randn(1, 4, 1, D)
    ready = prepare(q, k, v, tiles=TileConfig(16, 16), backend="triton", **kwargs)
    check(ready, mask_grad=True, utils=("test_schema", "test_faketensor"))


def test_a_bias_whose_gradient_nobody_wants():
    check(prepare(*tensors(), tiles=TileConfig(4, 4), **ARGUMENTS["bias, sink"]), mask_grad=False)


def test_packed_sequences():
    ready = prepare(
        *tensors(torch.bfloat16, packed=True), cu_seqlens_q=cu_seqlens([3, 0, 5]),
        cu_seqlens_k=cu_seqlens([6, 1, 7]), attn_mask=bias(H, 5, 7), learnable_sink=bias(H),
        mask=Mask(causal=True), tiles=TileConfig(4, 4),
    )  # fmt: skip
    check(ready, mask_grad=True)


def test_statistics_have_a_schema_but_no_fake():
    """How many tiles there are depends on values, so that only eager code has statistics."""
    q, k, v, call = prepare(*tensors(), return_stats=True, tiles=TileConfig(4, 4))
    op = OPS.attention_forward.default
    torch.library.opcheck(op, (q, k, v, *call), test_utils=("test_schema",))
    meta = [x.to("meta") for x in (q, k, v)]
    with pytest.raises(NotImplementedError, match="return_stats"):
        op(*meta, *(x.to("meta") if isinstance(x, torch.Tensor) else x for x in call))


def test_the_seed():
    torch.library.opcheck(
        OPS.seed.default,
        (torch.device("cpu"),),
        test_utils=("test_schema", "test_autograd_registration"),
    )


def test_nothing_is_left_out():
    """A new op, or a new field of a call, needs a line here."""
    from flashmod import dispatch

    for name in dispatch.NAMES:
        dispatch.load(name)
    ops = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("flashmod::")}
    names = ("attention_forward", "attention_backward", "seed")
    assert ops == {f"flashmod::{name}" for name in names}
    plain = prepare(*tensors()).call
    changed = {"backend", "tiles", "q_starts", "kv_starts", "collect_stats"}
    for kwargs in ARGUMENTS.values():
        call = prepare(*tensors(), **kwargs).call
        for field, a, b in zip(AttentionCall._fields, plain, call, strict=True):
            same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b or a == b
            changed |= set() if same else {field}
    assert changed == set(AttentionCall._fields)
