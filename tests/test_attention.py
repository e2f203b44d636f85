"""FlashMultiheadAttention against nn.MultiheadAttention, and what it adds."""

import copy
import itertools
import logging
import pickle

import pytest
import torch
from cases import cu_seqlens
from module_pairs import E, H, as_numbers, compare, hiding, pair, with_gradient
from torch import nn

from flashmod import FlashMultiheadAttention, Mask, TileConfig, attention

F, T = False, True


EXTRA = ("add_bias_kv", "add_zero_attn")
CONSTRUCTORS = [
    dict(zip(("bias", "batch_first", "kdim", "vdim", *EXTRA), row, strict=True))
    for row in itertools.product((T, F), (T, F), (None, 5), (None, 7), (T, F), (T, F))
]


@pytest.mark.parametrize("kwargs", CONSTRUCTORS, ids=str)
def test_parameters_and_initial_values_are_torchs(kwargs):
    modules = []
    for kind in (nn.MultiheadAttention, FlashMultiheadAttention):
        torch.manual_seed(5)
        modules.append(kind(E, H, **kwargs))
    theirs, ours = modules
    assert isinstance(ours, nn.MultiheadAttention)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert all(map(torch.equal, theirs.state_dict().values(), ours.state_dict().values()))
    names = "embed_dim kdim vdim num_heads head_dim dropout batch_first add_zero_attn"
    names = [*names.split(), "_qkv_same_embed_dim"]
    assert all(getattr(theirs, name) == getattr(ours, name) for name in names)
    assert [n for n, _ in theirs.named_buffers()] == [n for n, _ in ours.named_buffers()] == []
    assert type(theirs.out_proj) is type(ours.out_proj)


@pytest.mark.parametrize("need_weights", [F, T])
@pytest.mark.parametrize("kwargs", CONSTRUCTORS, ids=str)
def test_cross_attention_equals_torch(kwargs, need_weights):
    theirs, ours = pair(**kwargs)
    shapes = ((2, 5, E), (2, 7, kwargs["kdim"] or E), (2, 7, kwargs["vdim"] or E))
    inputs = [torch.randn(shape) for shape in shapes]
    inputs = inputs if kwargs["batch_first"] else [x.transpose(0, 1) for x in inputs]
    padding = torch.tensor([[F, F, T, F, F, F, T], [T, F, F, F, F, F, F]])
    for mask in (None, padding, torch.zeros(2, 7).masked_fill(padding, -torch.inf)):
        compare(theirs, ours, *inputs, key_padding_mask=mask, need_weights=need_weights)


ATTN_MASKS = {
    "none": lambda n, q, k: None,
    "bool": lambda n, q, k: hiding(q, k),
    "bool_heads": lambda n, q, k: hiding(n * H, q, k),
    "numbers": lambda n, q, k: as_numbers(hiding(q, k)),
    "bias": lambda n, q, k: torch.randn(q, k),
    "bias_heads": lambda n, q, k: torch.randn(n * H, q, k).masked_fill(hiding(q, k), -torch.inf),
}
PADDINGS = {
    "none": lambda n, k: None,
    "bool": lambda n, k: hiding(n, k),
    "numbers": lambda n, k: as_numbers(hiding(n, k)),
    "bias": lambda n, k: torch.randn(n, k),
}


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")
@pytest.mark.parametrize("need_weights", [F, T])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("attn_mask", ATTN_MASKS)
def test_masks_equal_torchs(attn_mask, padding, need_weights):
    """Outputs, weights, all gradients, those of float masks too, in every layout."""
    for layout in ("batch_first", "sequence_first", "unbatched"):
        theirs, ours = pair(batch_first=layout == "batch_first")
        batch = 1 if layout == "unbatched" else 2
        inputs = [torch.randn(batch, n, E) for n in (5, 7, 7)]
        keys = PADDINGS[padding](batch, 7)
        if layout == "unbatched":
            inputs, keys = [x[0] for x in inputs], None if keys is None else keys[0]
        elif layout == "sequence_first":
            inputs = [x.transpose(0, 1) for x in inputs]
        options = {"attn_mask": ATTN_MASKS[attn_mask](batch, 5, 7), "key_padding_mask": keys}
        compare(theirs, ours, *inputs, need_weights=need_weights, **options)


@pytest.mark.parametrize("average", [F, T])
@pytest.mark.parametrize("batch_first", [F, T])
def test_unbatched_equals_torch(batch_first, average):
    theirs, ours = pair(batch_first=batch_first)
    inputs = [torch.randn(n, E) for n in (5, 7, 7)]
    options = {"average_attn_weights": average}
    compare(theirs, ours, *inputs, **options)
    compare(theirs, ours, *inputs, key_padding_mask=torch.arange(7) > 4, **options)
    theirs, ours = pair(batch_first=batch_first)
    compare(theirs, ours, *[torch.randn(2, 5, E)] * 3, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    theirs, ours = (m.to(dtype) for m in pair(batch_first=True))
    x = torch.randn(2, 5, E, dtype=dtype)
    (a, wa), (b, wb) = (m(x, x, x) for m in (theirs, ours))
    assert b.dtype == wb.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(b, a, atol=tolerance, rtol=0)
    torch.testing.assert_close(wb, wa, atol=tolerance, rtol=0)


def test_same_object_or_equal_ones_give_the_same():
    _, ours = pair(batch_first=True)
    x = torch.randn(2, 5, E)
    torch.testing.assert_close(ours(x, x, x)[0], ours(x, x.clone(), x.clone())[0])
    torch.testing.assert_close(ours(x, x.clone(), x)[0], ours(x)[0])
    assert torch.equal(ours(x, x, x)[0], ours(x)[0])


def test_parameters_are_read_at_every_call():
    theirs, ours = pair(batch_first=True)
    weight, bias = torch.randn(3 * E, E), torch.randn(3 * E)
    for module in (theirs, ours):
        module.in_proj_weight, module.in_proj_bias = nn.Parameter(weight), nn.Parameter(bias)
    compare(theirs, ours, *[torch.randn(2, 5, E)] * 3)


def test_is_causal_is_top_left_and_reads_no_mask_as_in_torch():
    theirs, ours = pair(batch_first=True)
    inputs = [torch.randn(2, n, E) for n in (5, 7, 7)]
    mask = torch.ones(5, 7).triu(1).bool()
    compare(theirs, ours, *inputs, attn_mask=mask, is_causal=True, need_weights=False)
    wrong = torch.zeros(2, 2).bool()  # torch does not look at it either
    compare(theirs, ours, *inputs, attn_mask=wrong, is_causal=True, need_weights=False)


@pytest.mark.parametrize("other", ["need_weights", "padding"])
def test_the_mask_decides_beside_is_causal_as_in_torch(other):
    """With weights or padding torch reads the mask, causal or not, and the hint no more."""
    theirs, ours = pair(batch_first=True)
    inputs = [torch.randn(2, n, E) for n in (5, 7, 7)]
    options = {"need_weights": other == "need_weights", "is_causal": T}
    if other == "padding":
        options["key_padding_mask"] = hiding(2, 7)
    for mask in (hiding(5, 7), hiding(2 * H, 5, 7)):
        compare(theirs, ours, *inputs, attn_mask=mask, **options)


def test_the_mask_decides_beside_is_causal_and_lengths():
    _, ours = pair(batch_first=True)
    x, mask = torch.randn(2, 5, E), hiding(5, 5)
    options = {"attn_mask": mask, "lengths": torch.tensor([5, 3]), "need_weights": F}
    assert torch.equal(ours(x, is_causal=T, **options)[0], ours(x, **options)[0])


@pytest.mark.parametrize("kind", ["bool", "bool_heads", "bias", "bias_heads"])
def test_attn_mask_of_ragged_input_goes_by_positions(kind):
    _, ours = pair(batch_first=True)
    lengths = (3, 0, 6, 1)
    mask, x = ATTN_MASKS[kind](len(lengths), 6, 6), torch.randn(sum(lengths), E)
    if mask.dtype == torch.bool:
        mask[..., range(6), range(6)] = False
    else:
        mask[..., range(6), range(6)] = 0.0
    parts, alone = x.split(lengths), []
    for n, part in enumerate(parts):
        own = (mask if mask.dim() == 2 else mask.view(-1, H, 6, 6)[n])[
            ..., : len(part), : len(part)
        ]
        alone.append(ours(part, attn_mask=own, need_weights=False)[0])
    packed = ours(x, attn_mask=mask, cu_seqlens=cu_seqlens(lengths))[0]
    torch.testing.assert_close(packed, torch.cat(alone))
    padded = nn.utils.rnn.pad_sequence(parts, batch_first=True)
    for need_weights in (F, T):
        options = {"lengths": torch.tensor(lengths), "need_weights": need_weights}
        out, weights = ours(padded, attn_mask=mask, **options)
        torch.testing.assert_close(out[padded.any(-1)], torch.cat(alone))
        assert weights is None or (weights.sum(-1)[padded.any(-1)] - 1).abs().max() < 1e-5


def test_attn_mask_beside_the_modules_own_mask():
    x, mask = torch.randn(2, 6, E), hiding(6, 6)
    both = FlashMultiheadAttention(E, H, batch_first=True, mask=Mask(causal=True))
    plain = FlashMultiheadAttention(E, H, batch_first=True)
    plain.load_state_dict(both.state_dict())
    causal = torch.ones(6, 6).triu(1).bool()
    for mine, right in zip(both(x, attn_mask=mask), plain(x, attn_mask=mask | causal), strict=True):
        torch.testing.assert_close(mine, right)


def test_masks_are_not_expanded_beyond_their_broadcast():
    """A shared mask and padding make N masks, not N * H; alone, each stays as small as it is."""
    shapes, attend = [], FlashMultiheadAttention.attend

    class Watched(FlashMultiheadAttention):
        def attend(self, q, k, v, **arguments):
            shapes.append(tuple(arguments["attn_mask"].shape))
            return attend(self, q, k, v, **arguments)

    module, x = Watched(E, H, batch_first=True), torch.randn(2, 6, E)
    pairs, keys = hiding(6, 6), hiding(2, 6)
    for options in (
        {"attn_mask": pairs},
        {"key_padding_mask": keys},
        {"attn_mask": pairs, "key_padding_mask": keys},
        {"attn_mask": as_numbers(pairs), "key_padding_mask": keys},
    ):
        module(x, need_weights=False, **options)
    assert shapes == [(1, 1, 6, 6), (2, 1, 1, 6), (2, 1, 6, 6), (2, 1, 6, 6)]


@pytest.mark.parametrize("need_weights", [F, T])
def test_is_causal_with_padding_is_both(need_weights):
    """torch raises; the explicit mask is what is meant."""
    theirs, ours = pair(batch_first=True)
    x, padding = torch.randn(2, 5, E), torch.tensor([[F, F, F, F, T], [F, T, F, F, F]])
    causal = torch.ones(5, 5).triu(1).bool()
    options = {"key_padding_mask": padding, "need_weights": need_weights}
    theirs_out, theirs_weights = theirs(x, x, x, attn_mask=causal, **options)
    out, weights = ours(x, x, x, is_causal=True, **options)
    torch.testing.assert_close(out, theirs_out)
    torch.testing.assert_close(weights, theirs_weights)


def test_is_causal_beside_the_modules_own_mask():
    x = torch.randn(1, 6, E)
    plain = FlashMultiheadAttention(E, H, batch_first=True, mask=Mask(causal=True, window=(2, 0)))
    hinted = FlashMultiheadAttention(E, H, batch_first=True, mask=Mask(window=(2, 3)))
    hinted.load_state_dict(plain.state_dict())
    padding = torch.zeros(1, 6, dtype=torch.bool)
    torch.testing.assert_close(hinted(x, key_padding_mask=padding, is_causal=True), plain(x))
    with pytest.raises(ValueError, match=r"top-left.*bottom-right.*6 queries meet 4 keys"):
        hinted(x, x[:, :4], x[:, :4], key_padding_mask=padding[:, :4], is_causal=True)


@pytest.mark.parametrize("need_weights", [F, T])
def test_rows_that_see_no_key_give_the_bias(need_weights):
    """torch gives NaN, or NaN gradients."""
    _, ours = pair(batch_first=True)
    x = torch.randn(2, 3, E)
    for hidden in (torch.tensor([[F, F, F], [T, T, T]]), torch.tensor([[F, F, F], [T, F, F]])):
        mask = Mask(causal=True, align="top_left")
        ours.mask = mask
        out, weights = ours(x, key_padding_mask=hidden, need_weights=need_weights)
        assert torch.equal(out[1, 0], ours.out_proj.bias) and out.isfinite().all()
        if need_weights:
            assert (weights[1, 0] == 0).all() and weights.isfinite().all()
        ours.zero_grad()
        out[0].sum().backward()
        both = ours.in_proj_weight.grad.clone()
        ours.zero_grad()
        ours(x[:1], need_weights=False)[0].sum().backward()
        torch.testing.assert_close(both, ours.in_proj_weight.grad)


@pytest.mark.parametrize("need_weights", [F, T])
@pytest.mark.parametrize("numbers", [F, T])
def test_rows_that_attn_mask_hides_whole_give_the_bias(numbers, need_weights):
    """torch gives NaN with weights; no gradient comes from such a row."""
    _, ours = pair(batch_first=True)
    x, hidden = torch.randn(2, 3, E, requires_grad=True), torch.zeros(3, 3).bool()
    hidden[1] = True
    mask = with_gradient(as_numbers(hidden)) if numbers else hidden
    out, weights = ours(x, attn_mask=mask, need_weights=need_weights)
    assert torch.equal(out[:, 1], ours.out_proj.bias.expand(2, E)) and out.isfinite().all()
    assert weights is None or ((weights[:, 1] == 0).all() and weights.isfinite().all())
    out[:, 1].sum().backward()
    assert (x.grad == 0).all() and (ours.in_proj_weight.grad == 0).all()
    assert not numbers or (mask.grad == 0).all()


@pytest.mark.parametrize("average", [F, T])
def test_weights_are_those_that_made_the_output(average):
    """Also under dropout: with identity projections the output is weights @ x."""
    module = FlashMultiheadAttention(4, 1 if average else 2, dropout=0.5, batch_first=True)
    with torch.no_grad():
        for w in (*module.in_proj_weight.split(4), module.out_proj.weight):
            w.copy_(torch.eye(4))
    x = torch.randn(2, 9, 4)
    options = {"average_attn_weights": average, "attn_mask": torch.randn(9, 9)}
    out, weights = module(x, **options)
    values = x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
    per_head = weights[:, None] if average else weights
    torch.testing.assert_close(out, (per_head @ values).transpose(1, 2).flatten(2))
    dropped = (per_head == 0).double().mean()
    assert 0.3 < dropped < 0.7
    kept = per_head[per_head > 0]
    module.eval()
    whole = module(x, **options)[1]
    whole = whole[:, None] if average else whole
    torch.testing.assert_close(kept, whole[per_head > 0] * 2)


def test_need_weights_warns_once(caplog, monkeypatch):
    monkeypatch.setattr(attention, "_warned", set())
    ours, x = FlashMultiheadAttention(E, H), torch.randn(5, 2, E)
    with caplog.at_level(logging.WARNING, "flashmod"):
        for _ in range(2):
            ours(x)
            ours(x, need_weights=False)
    assert [r.message for r in caplog.records if "quadratic" in r.message] == [
        caplog.records[0].message
    ]


def test_dropout_is_off_in_eval_and_new_every_call_in_training():
    ours, x = FlashMultiheadAttention(E, H, dropout=0.5), torch.randn(5, 2, E)
    a, b = (ours(x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(a, b)
    torch.manual_seed(1)
    a = ours(x, need_weights=False)[0]
    torch.manual_seed(1)
    assert torch.equal(a, ours(x, need_weights=False)[0])
    ours.eval()
    plain = FlashMultiheadAttention(E, H)
    plain.load_state_dict(ours.state_dict())
    assert torch.equal(ours(x)[0], ours(x)[0]) and torch.equal(ours(x)[0], plain(x)[0])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads_equal_repeated_ones(kv_heads):
    grouped = FlashMultiheadAttention(16, 4, batch_first=True, num_kv_heads=kv_heads)
    nn.init.normal_(grouped.in_proj_bias)
    assert grouped.in_proj_weight.shape == (16 + 2 * kv_heads * 4, 16)
    full = FlashMultiheadAttention(16, 4, batch_first=True)
    state = grouped.state_dict()
    for name in ("in_proj_weight", "in_proj_bias"):
        q, k, v = state[name].split([16, kv_heads * 4, kv_heads * 4])
        k, v = (
            x.unflatten(0, (kv_heads, 4)).repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
            for x in (k, v)
        )
        state[name] = torch.cat([q, k, v])
    full.load_state_dict(state)
    for inputs in ([torch.randn(2, 5, 16)] * 3, [torch.randn(2, n, 16) for n in (5, 7, 7)]):
        for a, b in zip(grouped(*inputs), full(*inputs), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "mask",
    [Mask(causal=True), Mask(window=(2, 1)), Mask(causal=True, prefix_len=2)],
    ids=["causal", "window", "prefix"],
)
def test_packed_and_padded_equal_each_sequence_alone(mask):
    ours = FlashMultiheadAttention(E, H, batch_first=True, mask=mask, tiles=TileConfig(4, 4))
    lengths = (3, 0, 6, 1)
    x, cu = torch.randn(sum(lengths) + 2, E), cu_seqlens(lengths)
    parts = x.split([*lengths, 2])
    alone = torch.cat([ours(part, need_weights=False)[0] for part in parts[:-1]])
    out, weights = ours(x, cu_seqlens=cu)
    assert weights is None
    torch.testing.assert_close(out[:-2], alone)
    assert (out[-2:] == 0).all()
    padded = nn.utils.rnn.pad_sequence(parts[:-1], batch_first=True)
    out = ours(padded, lengths=torch.tensor(lengths), need_weights=False)[0]
    torch.testing.assert_close(
        torch.cat([row[:n] for row, n in zip(out, lengths, strict=True)]), alone
    )
    assert all((row[n:] == 0).all() for row, n in zip(out, lengths, strict=True))


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_slack_does_not_reach_any_gradient(layout):
    def gradients(fill):
        ours.zero_grad()
        x = tokens.clone()
        if layout == "packed":
            x[5:] = fill
            options = {"cu_seqlens": cu_seqlens([2, 3])}
        else:
            x[0, 2:], x[1, 5:] = fill, fill
            options = {"lengths": torch.tensor([2, 5]), "need_weights": False}
        x.requires_grad_()
        out = ours(x, **options)[0]
        out.square().sum().backward()
        return [out, x.grad, *(p.grad for p in ours.parameters())]

    ours = FlashMultiheadAttention(E, H, batch_first=True, dropout=0.0)
    tokens = torch.randn(*((7,) if layout == "packed" else (2, 6)), E)
    clean = gradients(0.0)
    for fill in (float("nan"), float("inf"), 1e30):
        assert all(torch.equal(a, b) for a, b in zip(clean, gradients(fill), strict=True))
    assert (clean[1][5:] == 0).all() if layout == "packed" else (clean[1][0, 2:] == 0).all()


def test_copies_and_pickles():
    ours = FlashMultiheadAttention(
        E, H, batch_first=True, num_kv_heads=1, mask=Mask(window=(1, 1)), dropout=0.25
    )
    x = torch.randn(2, 5, E)
    ours.eval()
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(twin(x)[0], ours(x)[0])
        assert (twin.num_kv_heads, twin.mask.window, len(twin._forward_pre_hooks)) == (1, (1, 1), 1)
        with torch.no_grad():
            twin.in_proj_weight.zero_()
        assert not torch.equal(twin(x)[0], ours(x)[0])
