"""``add_bias_kv`` and ``add_zero_attn``: keys beside those of the input, which no mask hides."""

import pytest
import torch
from cases import cu_seqlens
from module_pairs import E, H, as_numbers, compare, hiding, pair
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashmod import FlashMultiheadAttention, Mask

F, T = False, True
EXTRAS = [
    {"add_bias_kv": T},
    {"add_zero_attn": T},
    {"add_bias_kv": T, "add_zero_attn": T},
]
each_extra = pytest.mark.parametrize("extra", EXTRAS, ids=" ".join)


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")
@pytest.mark.parametrize("average", [F, T])
@each_extra
def test_masks_are_extended_as_torchs(extra, average):
    """In every layout; the weights have a column for each."""
    for layout in ("batch_first", "sequence_first", "unbatched"):
        theirs, ours = pair(batch_first=layout == "batch_first", **extra)
        batch = 1 if layout == "unbatched" else 2
        inputs = [torch.randn(batch, n, E) for n in (5, 7, 7)]
        keys, pairs = hiding(batch, 7), hiding(batch * H, 5, 7)
        if layout == "unbatched":
            inputs, keys = [x[0] for x in inputs], keys[0]
        elif layout == "sequence_first":
            inputs = [x.transpose(0, 1) for x in inputs]
        for options in (
            {"attn_mask": pairs, "key_padding_mask": keys},
            {"attn_mask": as_numbers(pairs)},
            {"key_padding_mask": torch.randn(keys.shape)},
        ):
            compare(theirs, ours, *inputs, average_attn_weights=average, **options)
            compare(theirs, ours, *inputs, need_weights=F, **options)


@each_extra
def test_is_causal_equals_the_explicit_mask(extra):
    """torch hides the extra key from early queries instead."""
    theirs, ours = pair(batch_first=T, **extra)
    x, mask = torch.randn(2, 6, E), torch.ones(6, 6).triu(1).bool()
    explicit = theirs(x, x, x, attn_mask=mask, need_weights=F)[0]
    hinted = ours(x, x, x, attn_mask=mask, is_causal=T, need_weights=F)[0]
    torch.testing.assert_close(hinted, explicit)
    stock = theirs(x, x, x, attn_mask=mask, is_causal=T, need_weights=F)[0]
    assert (stock - explicit).abs().max() > 0.01


@each_extra
def test_rows_that_see_no_other_key(extra):
    """They see the extra ones, as in torch, and no NaN arises in their gradients."""
    theirs, ours = pair(batch_first=T, **extra)
    hidden = torch.zeros(4, 4).bool()
    hidden[1] = True
    for mask in (hidden, as_numbers(hidden)):
        compare(theirs, ours, torch.randn(2, 4, E), *[torch.randn(2, 4, E)] * 2, attn_mask=mask)
    compare(theirs, ours, torch.randn(2, 4, E), *[torch.randn(2, 0, E)] * 2)


@pytest.mark.parametrize("groups", [1, H])
@each_extra
def test_ragged_input_has_them_in_every_sequence(extra, groups):
    """Beside a causal window; ALiBi gives them no distance, the cap holds for them too."""
    options = {"mask": Mask(causal=T, window=(2, 0)), "softcap": 2.0, "alibi": T, "sink": T}
    ours = FlashMultiheadAttention(E, H, batch_first=T, num_kv_heads=groups, **extra, **options)
    lengths = (3, 0, 6, 1)
    x = torch.randn(sum(lengths) + 2, E)
    parts = x.split([*lengths, 2])[:-1]
    alone = torch.cat([ours(part, need_weights=F)[0] for part in parts])
    packed = ours(x, cu_seqlens=cu_seqlens(lengths))[0]
    torch.testing.assert_close(packed[:-2], alone)
    assert (packed[-2:] == 0).all()
    padded = nn.utils.rnn.pad_sequence(parts, batch_first=T)
    out, weights = ours(padded, lengths=torch.tensor(lengths))
    valid = torch.arange(6) < torch.tensor(lengths)[:, None]
    torch.testing.assert_close(out[valid], alone)
    assert (out[~valid] == 0).all() and weights.shape == (4, 6, 6 + len(extra))


def dense(module, x):
    """float64, one sequence (L, E), every key written out; causal where the module is."""
    x, (wq, wk, wv) = x.double(), module.in_proj_weight.double().chunk(3)
    q, k, v = ((x @ w.T).view(len(x), H, -1).transpose(0, 1) for w in (wq, wk, wv))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    extra = [(module.bias_k, module.bias_v)] if module.bias_k is not None else []
    rows = [[x.double().view(H, 1, -1) for x in pair] for pair in extra]
    if module.add_zero_attn:
        rows.append([torch.zeros(H, 1, k.shape[-1]).double()] * 2)
    own = [q @ key.mT / q.shape[-1] ** 0.5 for key, _ in rows]
    cap = module.softcap or 1e9
    scores, *own = (cap * (s / cap).tanh() for s in (scores, *own))
    distance = (torch.arange(len(x))[:, None] - torch.arange(len(x))).abs()
    if module.alibi:
        scores = scores - module.slopes("cpu").double()[:, None, None] * distance
    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    sink = [] if module.sink is None else [module.sink.double().view(H, 1, 1).expand(H, len(x), 1)]
    weights = torch.cat([scores, *own, *sink], -1).softmax(-1)
    values = torch.cat([v, *(value for _, value in rows)], 1)
    out = (weights[..., : values.shape[1]] @ values).transpose(0, 1).flatten(1)
    return out @ module.out_proj.weight.double().T


@pytest.mark.parametrize("scored", [F, T])
@pytest.mark.parametrize("extra", [{}, *EXTRAS], ids=" ".join)
def test_they_join_every_score_feature(extra, scored):
    features = {"softcap": 1.5, "alibi": torch.tensor([0.5, 0.1, 0.0]), "sink": T} if scored else {}
    ours = FlashMultiheadAttention(E, H, bias=F, mask=Mask(causal=T), **extra, **features)
    if scored:
        nn.init.normal_(ours.sink)
    x = torch.randn(7, E)
    results = []
    for call in (lambda x: ours(x, need_weights=F)[0], lambda x: dense(ours, x)):
        ours.zero_grad()
        out = call(x)
        out.sin().sum().backward()
        results.append([out.double(), *(p.grad.double() for p in ours.parameters())])
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


@each_extra
def test_dropout_falls_on_them_too(extra):
    """The weights that come back are those that made the output."""
    module = FlashMultiheadAttention(4, 1, dropout=0.5, batch_first=T, bias=F, **extra)
    with torch.no_grad():
        for w in (*module.in_proj_weight.split(4), module.out_proj.weight):
            w.copy_(torch.eye(4))
    x = torch.randn(3, 40, 4)
    out, weights = module(x)
    count = len(extra)
    values = [x]
    if module.bias_v is not None:
        values.append(module.bias_v.expand(3, 1, 4))
    if module.add_zero_attn:
        values.append(torch.zeros(3, 1, 4))
    torch.testing.assert_close(out, weights @ torch.cat(values, 1))
    dropped = weights[..., -count:] == 0
    assert 0.3 < dropped.double().mean() < 0.7
    whole = module.eval()(x)[1][..., -count:]
    kept = weights[..., -count:]
    torch.testing.assert_close(kept[~dropped], 2 * whole[~dropped])


# Dynamo's own way of tracing any autograd Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@each_extra
def test_compiles(extra):
    module = FlashMultiheadAttention(E, H, batch_first=T, mask=Mask(causal=T), **extra)
    compiled = torch.compile(module, fullgraph=T, backend="aot_eager")
    x = torch.randn(2, 5, E)
    for need_weights in (F, T):
        for mine, eager in zip(compiled(x, need_weights=need_weights), module(x), strict=True):
            assert mine is None or torch.testing.assert_close(mine, eager) is None


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operator gives."""

    size = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.size = max(self.size, *sizes, 0)
        return result


def test_causal_attention_with_them_is_linear_in_memory():
    """No mask is written out, as one that hides later keys but no extra one would have to be."""
    extra = {"add_bias_kv": T, "add_zero_attn": T, "mask": Mask(causal=T)}
    module, sizes = FlashMultiheadAttention(E, H, batch_first=T, **extra), []
    for length in (128, 256):
        with Largest() as largest:
            module(torch.randn(1, length, E), need_weights=F)[0].sum().backward()
        sizes.append(largest.size)
    assert sizes[1] == 2 * sizes[0] < 256**2
