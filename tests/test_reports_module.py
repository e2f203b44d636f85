"""Reports like those in ``test_reports.py`` that concern the module and torch's containers."""

import math

import pytest
import torch
from torch import nn

from flashmod import FlashMultiheadAttention, Mask

F, T = False, True


def close(x, values):
    torch.testing.assert_close(
        x.detach().flatten(), torch.tensor(values).float(), rtol=1e-5, atol=1e-5
    )


@pytest.fixture
def poisoned():
    junk = torch.full((1 << 20,), math.nan)
    del junk


def first_or_own(batch, head, q_idx, kv_idx):
    return (kv_idx == 0) | (kv_idx == q_idx)


@pytest.mark.parametrize("need_weights", [F, T])
def test_pytorch_41508_a_fully_masked_row_gives_no_nan(need_weights):
    m, x = FlashMultiheadAttention(4, 1, batch_first=True), torch.randn(2, 3, 4)
    nn.init.normal_(m.out_proj.bias)
    hidden = torch.tensor([[F, F, F], [T, T, T]])
    out, weights = m(x, x, x, key_padding_mask=hidden, need_weights=need_weights)
    out[0].sum().backward()
    assert out.isfinite().all() and (out[1] == m.out_proj.bias).all()
    assert weights is None or (weights[1] == 0).all()
    got = m.in_proj_weight.grad.clone()
    m.zero_grad()
    m(x[:1], x[:1], x[:1], need_weights=need_weights)[0].sum().backward()
    torch.testing.assert_close(got, m.in_proj_weight.grad)


def test_pytorch_188933_gradients_of_slack_rows_are_written(poisoned):
    m, cu = FlashMultiheadAttention(8, 2), torch.tensor([0, 2, 5], dtype=torch.int32)
    x = torch.randn(7, 8, requires_grad=True)

    def gradients(x):
        m.zero_grad()
        m(x, cu_seqlens=cu)[0][:5].sum().backward()
        return [p.grad.clone() for p in m.parameters()]

    runs = [gradients(x) for _ in range(2)]
    assert (x.grad[5:] == 0).all() and x.grad.isfinite().all()
    short = gradients(x.detach()[:5].requires_grad_())
    for first, second, alone in zip(*runs, short, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, alone)


def test_pytorch_108108_the_modules_hint_is_top_left():
    m, theirs = FlashMultiheadAttention(4, 1), nn.MultiheadAttention(4, 1)
    theirs.load_state_dict(m.state_dict())
    q, kv, mask = torch.randn(2, 1, 4), torch.randn(5, 1, 4), torch.ones(2, 5).triu(1).bool()
    options = {"attn_mask": mask, "is_causal": T, "need_weights": F}
    torch.testing.assert_close(m(q, kv, kv, **options)[0], theirs(q, kv, kv, **options)[0])


def test_pytorch_124464_dropout_is_off_in_eval():
    x = torch.randn(1, 4, 8)
    m = FlashMultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    plain = FlashMultiheadAttention(8, 2, batch_first=True)
    plain.load_state_dict(m.state_dict())
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    layer.self_attn = m
    m.eval()
    assert torch.equal(m(x)[0], m(x)[0]) and torch.equal(m(x)[0], plain(x)[0])
    m.train()
    assert not torch.equal(m(x)[0], m(x)[0])
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("need_weights", [F, T])
@pytest.mark.parametrize("training", [F, T])
def test_pytorch_100709_padding_and_causal_together(need_weights, training):
    m = FlashMultiheadAttention(1, 1, batch_first=True, bias=F).train(training)
    with torch.no_grad():
        m.in_proj_weight.copy_(torch.tensor([[0.0], [1.0], [1.0]]))  # q = 0, v = x
        m.out_proj.weight.fill_(1)
    x, padding = torch.tensor([[[0.0], [1.0], [2.0]]]), torch.tensor([[F, F, T]])
    theirs = nn.MultiheadAttention(1, 1, batch_first=True, bias=F)
    theirs.load_state_dict(m.state_dict())
    options = {"key_padding_mask": padding, "need_weights": need_weights}
    with torch.set_grad_enabled(training):
        out, weights = m(x, x, x, is_causal=T, **options)
        explicit, _ = theirs(x, x, x, attn_mask=torch.ones(3, 3).triu(1).bool(), **options)
    close(out, [0, 0.5, 0.5])
    torch.testing.assert_close(out, explicit)
    if need_weights:
        close(weights, [1, 0, 0, 0.5, 0.5, 0, 0.5, 0.5, 0])


def test_pytorch_128413_the_encoders_fast_path_does_not_skip_the_module(monkeypatch):
    calls = []
    forward = FlashMultiheadAttention.forward
    monkeypatch.setattr(
        FlashMultiheadAttention, "forward", lambda *a, **kw: calls.append(1) or forward(*a, **kw)
    )
    for mask in (Mask(window=(1, 1)), Mask(fn=first_or_own)):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        layer.self_attn = FlashMultiheadAttention(8, 2, batch_first=True, mask=mask)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=F)
        x = torch.randn(1, 5, 8)
        for model, per_run in ((layer, 1), (encoder, 2)):
            trained = model.train()(x)
            evaluated = model.eval()(x)
            with torch.no_grad():
                inferred = model(x)
            assert len(calls) == 3 * per_run
            calls.clear()
            torch.testing.assert_close(trained, evaluated)
            torch.testing.assert_close(trained, inferred)
