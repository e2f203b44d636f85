"""What FlashMultiheadAttention takes beyond torch, and torch's state around it."""

import copy
import pickle

import pytest
import torch
from cases import cu_seqlens
from module_pairs import E, H, compare, pair
from torch import nn

from flashmod import FlashMultiheadAttention, Mask, TileConfig
from flashmod.options import Options, standard_slopes

F, T = False, True
SLOPES = torch.tensor([0.5, 0.3, 0.1])


def test_standard_slopes_are_those_of_the_paper():
    """Press et al.'s own code, for a power of two and for another number."""
    powers = [2.0**-i for i in range(1, 9)]
    torch.testing.assert_close(standard_slopes(8), torch.tensor(powers))
    torch.testing.assert_close(standard_slopes(1), torch.tensor([2.0**-8]))
    between = [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    torch.testing.assert_close(standard_slopes(12), torch.tensor(powers + between))


def test_alibi_true_is_the_standard_slopes():
    x = torch.randn(2, 6, E)
    named = FlashMultiheadAttention(E, H, batch_first=T, alibi=T)
    given = FlashMultiheadAttention(E, H, batch_first=T, alibi=standard_slopes(H))
    given.load_state_dict(named.state_dict(), strict=T)
    for mine, right in zip(named(x), given(x), strict=True):
        assert torch.equal(mine, right)
    plain = FlashMultiheadAttention(E, H, batch_first=T)
    plain.load_state_dict(named.state_dict(), strict=T)
    assert not torch.allclose(plain(x)[0], named(x)[0])


@pytest.mark.parametrize("kwargs", [{}, {"alibi": T}, {"alibi": SLOPES}, {"softcap": 2.0}], ids=str)
def test_state_dicts_stay_torchs(kwargs):
    theirs, ours = nn.MultiheadAttention(E, H), FlashMultiheadAttention(E, H, **kwargs)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert ours.beyond_torch() is None


def test_a_sink_is_one_parameter_more():
    ours = FlashMultiheadAttention(E, H, batch_first=T, sink=T)
    state = ours.state_dict()
    assert ours.sink.shape == (H,) and state.pop("sink").count_nonzero() == 0
    assert list(state) == list(nn.MultiheadAttention(E, H).state_dict())
    assert ours.beyond_torch() == "sink"
    out, weights = ours(torch.randn(2, 5, E), average_attn_weights=F)
    (out.sum() + weights.sin().sum()).backward()
    assert (weights.sum(-1) < 1).all() and (ours.sink.grad != 0).all()
    with torch.no_grad():
        ours.sink.fill_(3.0)
    ours._reset_parameters()
    assert ours.sink.count_nonzero() == 0


def test_slopes_go_where_the_module_goes():
    ours = FlashMultiheadAttention(E, H, alibi=SLOPES).double()
    x = torch.randn(5, 2, E).double()
    assert ours.alibi_slopes.dtype == ours(x, need_weights=F)[0].dtype == torch.float64
    assert ours.to("meta").alibi_slopes.is_meta
    assert ours.alibi_slopes.data_ptr() != SLOPES.data_ptr()


def test_grouped_heads_with_a_bias_key_each():
    ours = FlashMultiheadAttention(8, 4, num_kv_heads=2, add_bias_kv=T, batch_first=T)
    assert ours.bias_k.shape == ours.bias_v.shape == (1, 1, 4)
    full = FlashMultiheadAttention(8, 4, add_bias_kv=T, batch_first=T)
    state = ours.state_dict()
    for name, x in state.items():
        if "bias_" in name:
            state[name] = x.view(1, 1, 2, 2).repeat_interleave(2, 2).flatten(2)
        elif "in_proj" in name:
            q, k, v = x.split([8, 4, 4])
            k, v = (y.unflatten(0, (2, 2)).repeat_interleave(2, 0).flatten(0, 1) for y in (k, v))
            state[name] = torch.cat([q, k, v])
    full.load_state_dict(state)
    x = torch.randn(2, 5, 8)
    for mine, right in zip(ours(x), full(x), strict=True):
        torch.testing.assert_close(mine, right)


DIFFERENT = {
    "mask": Mask(causal=T),
    "softcap": 2.0,
    "always_call": T,
    "backend": "tiled",
    "tiles": TileConfig(16, 16),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_module_is_always_called_while_it_differs(name):
    """Also when an attribute is set later."""
    ours = FlashMultiheadAttention(E, H)
    stock = getattr(ours, name)
    for _ in range(2):
        assert not ours.always_called
        setattr(ours, name, DIFFERENT[name])
        assert ours.always_called and len(ours._forward_pre_hooks) == 1
        setattr(ours, name, DIFFERENT[name])
        assert len(ours._forward_pre_hooks) == 1
        setattr(ours, name, stock)
    ours.register_forward_pre_hook(print)
    setattr(ours, name, DIFFERENT[name])
    setattr(ours, name, stock)
    assert list(ours._forward_pre_hooks.values()) == [print]


@pytest.mark.parametrize(
    "kwargs",
    [{"alibi": T}, {"alibi": SLOPES}, {"sink": T}, {"num_kv_heads": 1}, {"add_bias_kv": T},
     {"add_zero_attn": T}, *({name: x} for name, x in DIFFERENT.items() if name != "always_call")],
    ids=lambda kwargs: next(iter(kwargs)),
)  # fmt: skip
def test_a_module_built_to_differ_is_always_called(kwargs):
    for module in (
        ours := FlashMultiheadAttention(E, H, **kwargs),
        copy.deepcopy(ours),
        pickle.loads(pickle.dumps(ours)),
    ):
        assert module.always_called and len(module._forward_pre_hooks) == 1


def test_options_come_off_and_leave_torchs_state():
    theirs, ours = nn.MultiheadAttention(E, H), FlashMultiheadAttention(E, H)
    ours.configure(Options(mask=Mask(causal=T), softcap=2.0, alibi=SLOPES, always_call=T))
    ours.unconfigure()
    ours.__class__ = nn.MultiheadAttention
    assert ours.__dict__.keys() == theirs.__dict__.keys()
    for name in ("_parameters", "_buffers", "_modules", "_forward_pre_hooks"):
        assert getattr(ours, name).keys() == getattr(theirs, name).keys()
    assert ours._non_persistent_buffers_set == theirs._non_persistent_buffers_set


def test_need_weights_false_of_the_module_is_final():
    ours = FlashMultiheadAttention(E, H, batch_first=T)
    ours.need_weights = F
    x = torch.randn(2, 5, E)
    assert ours(x)[1] is None and ours(x, need_weights=T)[1] is None
    assert ours(x[0], cu_seqlens=cu_seqlens([2, 3]), need_weights=T)[1] is None


@pytest.mark.parametrize("kdim", [None, 5])
def test_a_half_bias_on_a_double_module(kdim):
    """torch's own fused path takes it, and its tests check that."""
    theirs, ours = pair(batch_first=T, kdim=kdim, dtype=torch.float64)
    half = theirs.in_proj_bias.detach().half()
    theirs.in_proj_bias = nn.Parameter(half.double())
    ours.in_proj_bias = nn.Parameter(half)
    inputs = [torch.randn(2, 5, n).double() for n in (E, kdim or E, E)]
    torch.testing.assert_close(ours(*inputs)[0], theirs(*inputs)[0])


def test_states_of_old_torch_load():
    """Before torch 1.2 modules had no ``_qkv_same_embed_dim``."""
    ours, x = FlashMultiheadAttention(E, H), torch.randn(5, 2, E)
    state = ours.__dict__.copy()
    del state["_qkv_same_embed_dim"]
    old = FlashMultiheadAttention.__new__(FlashMultiheadAttention)
    old.__setstate__(state)
    assert torch.equal(old(x)[0], ours(x)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("extra", [F, T])
def test_autocast_gives_the_users_dtype(dtype, extra):
    theirs, ours = pair(batch_first=T, add_bias_kv=extra)
    x = torch.randn(2, 5, E)
    mask = torch.randn(5, 5)
    for need_weights in (F, T):
        with torch.autocast("cpu", dtype=dtype):
            results = [
                m(x, x, x, attn_mask=mask, need_weights=need_weights) for m in (theirs, ours)
            ]
        for right, mine in zip(*results, strict=True):
            assert (mine is None) == (right is None)
            if mine is not None:
                assert mine.dtype == right.dtype == dtype
                torch.testing.assert_close(mine, right, atol=3e-2, rtol=0)


@pytest.mark.parametrize("extra", [F, T])
def test_float64_gradients(extra):
    module = FlashMultiheadAttention(4, 2, add_bias_kv=extra, add_zero_attn=extra, sink=T).double()
    names = [name for name, _ in module.named_parameters()]

    def call(x, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(module, given, (x,), {"need_weights": T})

    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (x, *module.parameters()))


def test_jagged_input_is_ragged_attention():
    ours = FlashMultiheadAttention(E, H, mask=Mask(causal=T), add_bias_kv=T)
    parts = [torch.randn(n, E) for n in (3, 0, 5)]
    keys = [torch.randn(n, E) for n in (4, 2, 7)]
    x, kv = (
        torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=T)
        for rows in (parts, keys)
    )
    for nested, alone in (
        (ours(x), [ours(part, need_weights=F)[0] for part in parts]),
        (ours(x, kv, kv), [ours(*qk, need_weights=F)[0] for qk in zip(parts, keys, strict=True)]),
    ):
        out, weights = nested
        assert weights is None and out.offsets() is x.offsets()
        torch.testing.assert_close(out.values(), torch.cat(alone))
    (ours(x)[0] + x).values().sum().backward()
    assert x.grad.is_nested


def test_masks_equal_torchs_with_every_option_off():
    """A configured module whose options are torch's defaults is torch's module."""
    theirs, ours = pair(batch_first=T)
    ours.configure(Options())
    inputs = [torch.randn(2, n, E) for n in (5, 7, 7)]
    compare(theirs, ours, *inputs, attn_mask=torch.randn(5, 7))
