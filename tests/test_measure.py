"""Watching a model: what is captured, that it is repeated exactly, that nothing else changes."""

import contextlib
import functools
import gc
import inspect
import logging
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from flashmod import FlashMultiheadAttention, Mask, baselines, flash_attention, measure
from flashmod.functional import prepare
from flashmod.measure import routing
from flashmod.measure.capture import Captured
from flashmod.measure.oracle import Oracle
from flashmod.reference import dense_attention

ERRORS = [f"grad_error/{name}" for name in ("out", "dq", "dk", "dv")]
METRICS = {
    *(f"memory/{name}_peak_mib" for name in ("attention", "dense_attention", "step", "dense_step")),
    *ERRORS,
    "grad_error/coverage",
    "throughput/tokens_per_s",
    "throughput/padding_saved",
}
CU = torch.tensor([0, 5, 5, 12, 20], dtype=torch.int32)
SDPA = F.scaled_dot_product_attention
FLASH = inspect.unwrap(flash_attention)  # not to be watched or routed


class Net(nn.Module):
    """Two attention layers; ``attend`` takes q, k, v (B, S, H, D)."""

    def __init__(self, attend, heads=2):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.attend, self.heads = attend, heads

    def forward(self, x):
        for qkv in self.qkv:
            q, k, v = qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
            x = x + self.attend(q, k, v).flatten(-2)
        return x


def torch_sdpa(q, k, v, **kwargs):
    return F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), **kwargs
    ).mT.mT.transpose(1, 2)


def train(net, x, steps=1):
    for _ in range(steps):
        net(x).square().sum().backward()


def call(q, k, v, run=FLASH, **kwargs):
    return Captured("flash", run, q, k, v, kwargs)


def qkv(*rows, heads=2, kv_heads=2, dim=8):
    return torch.randn(*rows, heads, dim), *torch.randn(2, *rows, kv_heads, dim)


@pytest.mark.parametrize(
    "attend",
    [
        flash_attention,
        lambda q, k, v: flash_attention(q, k, v, mask=Mask(causal=True), dropout_p=0.2),
        lambda q, k, v: flash_attention(q, k, v, return_lse=True)[0],
        baselines.dense,
        baselines.sdpa,
        torch_sdpa,
        lambda q, k, v: torch_sdpa(q, k, v, is_causal=True, scale=0.3),
        lambda q, k, v: torch_sdpa(q, k[:, :, :1], v[:, :, :1], enable_gqa=True),
    ],
    ids=["flash", "dropout", "lse", "dense", "sdpa", "torch", "torch_causal", "torch_grouped"],
)
def test_summary_of_any_model(attend):
    net, x = Net(attend), torch.randn(2, 20, 16)
    with measure.track(net, clock=iter(range(100)).__next__) as m:
        train(net, x)
        m.step(tokens=40)
    summary = m.summary()
    assert set(summary) == METRICS
    assert summary["grad_error/coverage"] == 1.0
    assert all(0 < summary[name] < 1e-5 for name in ERRORS)
    assert summary["memory/attention_peak_mib"] > 0
    assert summary["memory/dense_attention_peak_mib"] > 0
    assert summary["throughput/tokens_per_s"] == 40
    assert m.predicted == set()


@pytest.mark.parametrize("module", [FlashMultiheadAttention, nn.MultiheadAttention])
def test_attention_modules_are_seen(module):
    layer, x = module(16, 2, batch_first=True), torch.randn(2, 9, 16)
    with measure.track(layer) as m:
        layer(x, x, x, need_weights=False)[0].sum().backward()
    assert m.captured.q.shape == (2, 9, 2, 8)
    assert all(m.summary()[name] < 1e-5 for name in ERRORS)


def test_gradient_of_the_output_is_the_one_backward_sent():
    q, k, v = qkv(2, 7)
    weight = torch.randn(2, 7, 2, 8)
    with measure.track() as m:
        (flash_attention(q.requires_grad_(), k, v) * weight).sum().backward()
    assert torch.equal(m.captured.grad_out, weight)
    heads_first = q.detach().transpose(1, 2).requires_grad_()
    with measure.track() as m:
        (
            F.scaled_dot_product_attention(heads_first, heads_first, heads_first).mT * 2.0
        ).sum().backward()
    assert torch.equal(m.captured.grad_out, torch.full((2, 7, 2, 8), 2.0))


def test_the_chosen_layer_of_the_latest_pass_is_kept():
    net = Net(flash_attention)
    for layer in (0, 1):
        seen = []
        net.attend = lambda q, k, v, seen=seen: flash_attention(seen.append(q) or q, k, v)
        with measure.track(net, layer=layer) as m:
            train(net, torch.randn(1, 4, 16), steps=3)
        assert torch.equal(m.captured.q, seen[4 + layer])


def test_steps_tell_passes_apart_where_forward_is_not_called():
    net, seen = Net(flash_attention), []
    net.attend = lambda q, k, v: flash_attention(seen.append(q) or q, k, v)
    with measure.track(net) as m:
        for _ in range(2):
            Net.forward(net, torch.randn(1, 4, 16)).sum().backward()
            m.step(tokens=4)
    assert torch.equal(m.captured.q, seen[2])


def test_evaluation_does_not_replace_a_training_call():
    net = Net(flash_attention)
    with measure.track(net) as m:
        train(net, torch.randn(1, 4, 16))
        with torch.no_grad():
            net(torch.randn(1, 6, 16))
    assert m.captured.q.shape[1] == 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_without_backward_gets_a_seeded_gradient(mode):
    net = Net(flash_attention)
    with measure.track(net, seed=5) as m, mode():
        net(torch.randn(1, 6, 16))
        summary = m.summary()
    assert all(0 < summary[name] < 1e-5 for name in ERRORS)
    assert torch.equal(m.captured.output_grad(5), m.captured.output_grad(5))
    assert not torch.equal(m.captured.output_grad(5), m.captured.output_grad(6))


def test_checkpointed_attention_is_seen():
    net = Net(lambda q, k, v: checkpoint(flash_attention, q, k, v, use_reentrant=False))
    with measure.track(net) as m:
        train(net, torch.randn(1, 6, 16))
    assert all(0 < m.summary()[name] < 1e-5 for name in ERRORS)


def test_autocast_is_repeated():
    net, x = Net(flash_attention), torch.randn(1, 8, 16)
    with measure.track(net) as m, torch.autocast("cpu", torch.bfloat16):
        train(net, x)
    assert m.captured.autocast == torch.bfloat16
    out = m.captured.repeat(m.captured.leaves(), m.captured.output_grad()).out
    assert out.dtype == torch.bfloat16
    assert all(0 < m.summary()[name] < 2e-2 for name in ERRORS)


@pytest.mark.parametrize("attend", [flash_attention, baselines.dense, baselines.sdpa, torch_sdpa])
def test_a_watched_run_is_the_same_run(attend):
    def run(watch):
        torch.manual_seed(3)
        net = Net(lambda q, k, v: attend(q, k, v, dropout_p=0.3))
        x = torch.randn(2, 9, 16)
        if watch:
            with measure.track(net) as m:
                train(net, x, steps=2)
                m.step(tokens=18)
                m.summary()
                train(net, x)
        else:
            train(net, x, steps=3)
        return [p.grad for p in net.parameters()], torch.get_rng_state(), net

    grads, state, _ = run(False)
    watched, watched_state, net = run(True)
    for mine, right in zip(watched, grads, strict=True):
        assert torch.equal(mine, right)
    assert torch.equal(watched_state, state)
    assert F.scaled_dot_product_attention is SDPA and not net._forward_pre_hooks and net.training


@pytest.mark.parametrize("attend", [flash_attention, baselines.sdpa, torch_sdpa])
def test_a_call_with_dropout_is_repeated_bit_for_bit(attend):
    outs = []
    net = Net(lambda q, k, v: outs.append(attend(q, k, v, dropout_p=0.5)) or outs[-1])
    with measure.track(net) as m:
        train(net, torch.randn(2, 9, 16))
    torch.rand(100)
    for _ in range(2):
        again = m.captured.repeat(m.captured.leaves(), m.captured.output_grad())
        assert torch.equal(again.out, outs[0])


def test_everything_is_restored_when_the_body_raises():
    net = Net(flash_attention)
    with pytest.raises(KeyError), measure.track(net) as m:
        train(net, torch.randn(1, 4, 16))
        raise KeyError
    assert F.scaled_dot_product_attention is SDPA and not net._forward_pre_hooks
    captured = m.captured
    train(net, torch.randn(1, 5, 16))
    assert m.captured is captured
    assert all(m.summary()[name] < 1e-5 for name in ERRORS)


def test_no_copies_are_kept_and_all_is_freed_with_the_tracker():
    q, k, v = qkv(1, 6)
    with measure.track() as m:
        flash_attention(q, k, v)
    assert m.captured.q.data_ptr() == q.data_ptr()
    alive = weakref.ref(m.captured)
    m.summary()
    del m
    gc.collect()
    assert alive() is None


def test_nothing_seen_is_said_once_and_gives_none(caplog):
    with measure.track(nn.Linear(2, 2)) as m:
        pass
    summary = m.summary()
    assert set(summary) == METRICS and set(summary.values()) == {None}
    assert "no attention call was seen" in caplog.text
    with pytest.raises(ValueError, match="tokens"):
        m.step()


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (lambda q, k, v: torch_sdpa(q, k, v, dropout_p=0.5), "dropout"),
        (lambda q, k, v: baselines.sdpa(q, k, v, dropout_p=0.5), "dropout"),
    ],
)
def test_what_has_no_reference_has_memory_only(attend, reason, caplog):
    net = Net(attend)
    with measure.track(net) as m, caplog.at_level(logging.WARNING):
        train(net, torch.randn(1, 6, 16))
        summary = m.summary()
    assert all(summary[name] is None for name in (*ERRORS, "grad_error/coverage"))
    assert summary["memory/attention_peak_mib"] > 0
    assert summary["memory/dense_attention_peak_mib"] > 0
    assert reason in caplog.text
    assert m.predicted == set()


def test_inputs_that_were_overwritten_are_not_measured(caplog):
    q, k, v = qkv(1, 6)
    with measure.track() as m:
        flash_attention(q, k, v)
    q.add_(1)
    assert m.summary()["grad_error/out"] is None
    assert "overwritten" in caplog.text


def test_a_mask_that_was_overwritten_is_not_measured(caplog):
    mask, labels = torch.zeros(6, 6), torch.arange(6)[None] // 3
    for buffer in (mask, labels):
        with measure.track() as m:
            options = {"attn_mask": mask + 0.0 if buffer is labels else mask}
            rule = Mask(fn=same_label, labels=(labels, labels))
            flash_attention(*qkv(1, 6), mask=rule, **options)
        buffer.add_(1)
        caplog.clear()
        assert m.summary()["grad_error/out"] is None
        assert "a mask or a bias was overwritten" in caplog.text


def test_a_parameter_may_be_trained_after_its_call():
    """Sinks and learned biases are overwritten by every step of an optimizer."""
    parameters = [torch.randn(2, requires_grad=True), torch.randn(6, 6, requires_grad=True)]
    with measure.track() as m:
        q = qkv(1, 6)[0].requires_grad_()
        out = flash_attention(q, q, q, learnable_sink=parameters[0], attn_mask=parameters[1])
        out.square().sum().backward()
    grads = [p.grad.clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.sub_(p.grad)
    again = m.captured.repeat(m.captured.leaves(), m.captured.output_grad())
    assert torch.equal(again.out, out)
    assert all(m.summary()[name] < 1e-5 for name in ERRORS)
    for p, grad in zip(parameters, grads, strict=True):
        assert torch.equal(p.grad, grad)


def test_attention_memory_counts_the_gradient_of_a_bias():
    bias = torch.randn(1, 2, 64, 64)
    fixed, learned = (
        measure.attention_peak(call(*qkv(1, 64), attn_mask=x))
        for x in (bias, bias.clone().requires_grad_())
    )
    assert learned >= fixed + 0.9 * bias.numel() * 4 / 2**20


def test_statistics_and_rates_of_tokens_are_watched():
    q, k, v = qkv(2, 7)
    with measure.track() as m:
        flash_attention(q, k, v, dropout_p=torch.rand(2, 7) * 0.9, return_stats=True)
    assert m.captured.kwargs["dropout_seed"] is not None
    assert all(0 < m.summary()[name] < 1e-5 for name in ERRORS)


def same_label(batch, head, q_idx, kv_idx, q_label, kv_label):
    return q_label == kv_label


SEEDED = torch.Generator().manual_seed(0)
rand, randn = (functools.partial(fn, generator=SEEDED) for fn in (torch.rand, torch.randn))


def scored(*tokens):
    """Every argument that changes a score, learned where it can be."""
    labels = torch.randint(3, tokens, generator=SEEDED)
    return {
        "softcap": 1.5,
        "alibi_slopes": rand(4),
        "learnable_sink": randn(4, requires_grad=True),
        "mask": Mask(fn=same_label, labels=(labels, labels)),
        "dropout_p": rand(tokens) * 0.5,
        "dropout_seed": 4,
    }


CALLS = {
    "padded": (
        (3, 7),
        {"lengths_q": torch.tensor([7, 0, 4]), "lengths_k": torch.tensor([7, 3, 0])},
    ),
    "padding_mask": ((2, 7), {"attn_mask": torch.tensor([[True] * 7, [False] * 7])[:, None, None]}),
    "packed": ((23,), {"cu_seqlens_q": CU, "mask": Mask(causal=True)}),
    "window": ((23,), {"cu_seqlens_q": CU, "mask": Mask(window=(2, 0))}),
    "dropout": ((23,), {"cu_seqlens_q": CU, "dropout_p": 0.3, "dropout_seed": 4}),
    "nothing": ((2, 0), {}),
    "bool": ((2, 7), {"attn_mask": rand(2, 1, 7, 7) > 0.4}),
    "bias": ((2, 7), {"attn_mask": randn(4, 7, 7, requires_grad=True)}),
    "bias_hides": ((23,), {"cu_seqlens_q": CU, "attn_mask": randn(4, 1, 9, 8).log()}),
    "bias_of_keys": ((23,), {"cu_seqlens_q": CU, "attn_mask": randn(4, 1, 1, 8).log()}),
    "scored": ((2, 7), scored(2, 7)),
    "scored_packed": (
        (23,),
        {"cu_seqlens_q": CU, "attn_mask": randn(4, 8, 9, requires_grad=True), **scored(23)},
    ),
}
for masked in CALLS.values():  # log gives NaN for negative numbers: hidden
    if masked[1].get("attn_mask") is not None and masked[1]["attn_mask"].isnan().any():
        masked[1]["attn_mask"].nan_to_num_(nan=-torch.inf)


@pytest.mark.parametrize("block", [1, 1 << 22])
@pytest.mark.parametrize("name", CALLS)
def test_the_oracle_is_dense_float64_attention(monkeypatch, name, block):
    monkeypatch.setattr("flashmod.measure.oracle._BLOCK_SCORES", block)
    rows, kwargs = CALLS[name]
    q, k, v = (x.double().requires_grad_() for x in qkv(*rows, heads=4))
    ready = prepare(q, k, v, **kwargs)
    grad = torch.randn(ready.q.shape, dtype=torch.float64)
    out, _ = dense_attention(*ready)
    expected = (out, *torch.autograd.grad(out, ready[:3], grad))
    oracle = Oracle(ready, grad)
    oracle.affordable_share(1e9)
    results, _ = oracle.run(oracle.sample(1.0, 0))
    for mine, right in zip(results, expected, strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("limit", [1e9, 0.0], ids=["all_rows", "sample"])
@pytest.mark.parametrize("name", CALLS)
def test_errors_of_every_layout(name, limit):
    rows, kwargs = CALLS[name]
    errors, coverage = measure.gradient_error(call(*qkv(*rows, heads=4), **kwargs), limit)
    if name != "nothing":
        assert coverage == 1.0 if limit else coverage < 0.5
    assert all(0 <= x < 1e-6 for x in errors)


@pytest.mark.parametrize(
    "changed", ["attn_mask", "learnable_sink", "alibi_slopes", "softcap", "mask", "dropout_p"]
)
def test_a_forgotten_argument_is_found(changed):
    """The oracle reads every argument: attention without it is wrong."""
    rows, kwargs = CALLS["scored_packed"]

    def run(q, k, v, **kwargs):
        return flash_attention(q, k, v, **{n: x for n, x in kwargs.items() if n != changed})

    inputs = qkv(*rows, heads=4)
    unused = {n: x.detach() if torch.is_tensor(x) else x for n, x in kwargs.items()}
    errors, _ = measure.gradient_error(call(*inputs, run=run, **unused), 1e9)
    assert max(errors) > 1e-3


def wrong(name):
    """Attention with one result of four off by a hundredth of its largest entry."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad + 1e-2 * grad.abs().max() * (torch.rand_like(grad) > 0.5)

    def run(q, k, v, **kwargs):
        q = Wrong.apply(q) if name == "dq" else q
        k = Wrong.apply(k) if name == "dk" else k
        v = Wrong.apply(v) if name == "dv" else v
        out = flash_attention(q, k, v, **kwargs)
        return out * 1.01 if name == "out" else out

    return run


@pytest.mark.parametrize("limit", [1e9, 0.0], ids=["all_rows", "sample"])
@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_a_wrong_result_is_found(name, limit):
    inputs = qkv(2, 64)
    good, coverage = measure.gradient_error(call(*inputs), limit)
    bad, _ = measure.gradient_error(call(*inputs, run=wrong(name)), limit)
    assert coverage == 1.0 if limit else coverage < 0.05
    assert all(x < 1e-6 for x in good)
    assert getattr(bad, name) > 1e-5
    if name != "out":  # out's factor reaches every gradient
        assert [x < 1e-6 for x in bad] == [field != name for field in bad._fields]


def test_a_sample_is_seeded_and_covers_every_sequence():
    q, k, v = qkv(20)
    oracle = Oracle(prepare(q, k, v, cu_seqlens_q=CU), torch.randn(1, 20, 2, 8))
    rows = oracle.sample(0.25, seed=1)
    assert [len(r) for r in rows] == [1, 2, 2]  # of 5, 7 and 8 rows; the empty one is left out
    assert all(torch.equal(a, b) for a, b in zip(rows, oracle.sample(0.25, seed=1), strict=True))
    assert any(
        not torch.equal(a, b) for a, b in zip(rows, oracle.sample(0.25, seed=2), strict=True)
    )
    assert [r.tolist() for r in oracle.sample(1.0, 0)] == [[*range(5)], [*range(7)], [*range(8)]]


def test_sampled_gradients_are_exact_on_the_sample():
    q, k, v = (x.double().requires_grad_() for x in qkv(2, 16))
    grad = torch.randn(2, 16, 2, 8, dtype=torch.float64)
    oracle = Oracle(prepare(q, k, v), grad)
    chosen = oracle.sample(0.25, 0)
    results, unit = oracle.run(chosen)
    masked = torch.zeros_like(grad)
    for n, rows in enumerate(chosen):
        masked[n, rows] = grad[n, rows]
    out = baselines.dense(q, k, v)
    expected = torch.autograd.grad(out, (q, k, v), masked)
    for mine, right in zip(results[1:], expected, strict=True):
        torch.testing.assert_close(mine, right)
    assert unit.dv == masked.abs().max()


def test_slack_and_poison_do_not_reach_the_error():
    q, k, v = qkv(23)
    for x in (q, k, v):
        x[20:] = torch.nan
    errors, coverage = measure.gradient_error(call(q, k, v, cu_seqlens_q=CU), 1e9)
    assert coverage == 1.0 and all(x < 1e-6 for x in errors)
    leaky = lambda *a, **kw: flash_attention(*a, **kw) + 1e-3  # noqa: E731
    assert measure.gradient_error(call(q, k, v, run=leaky, cu_seqlens_q=CU), 1e9).errors.out > 1e-4


def test_throughput_counts_real_tokens_of_ragged_steps():
    ticks = iter(range(100))
    throughput = measure.Throughput(clock=ticks.__next__)
    totals = []
    for tokens in (5, 3, 7, 2, 9):
        throughput.step(tokens, padded=10)
        totals.append(throughput.tokens)
    assert totals == [5, 8, 15, 17, 26]
    assert throughput.tokens_per_s == 26 / 5
    assert throughput.padding_saved == 1 - 26 / 50


def test_time_spent_measuring_does_not_count():
    now = [0.0]
    throughput = measure.Throughput(clock=lambda: now[0])
    now[0] = 2.0
    with throughput.paused():
        now[0] = 100.0
    now[0] = 101.0
    throughput.step(6)
    assert throughput.tokens_per_s == 2.0


def test_tokens_are_read_from_the_attention_call():
    q, k, v = qkv(23)
    with measure.track(clock=iter(range(9)).__next__) as m:
        flash_attention(q, k, v, cu_seqlens_q=CU)
        m.step()
    assert m.throughput.tokens == 20
    assert m.summary()["throughput/padding_saved"] == pytest.approx(1 - 20 / (4 * 8))
    keys = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    keys[0, ..., 4:] = False
    numbers = torch.zeros(keys.shape).masked_fill(~keys, -torch.inf)
    for mask in (keys, numbers, numbers.expand(2, 2, 1, 7).contiguous()):  # the last is nn.MHA's
        assert measure.count_tokens(call(*qkv(2, 7), attn_mask=mask)) == (11, 14)
    one_head = keys.repeat(1, 2, 1, 1)
    one_head[:, 0, :, :2] = False  # the other head sees these keys: they are tokens
    assert measure.count_tokens(call(*qkv(2, 7), attn_mask=one_head)) == (11, 14)
    shorter = {"lengths_q": torch.tensor([7, 5]), "lengths_k": torch.tensor([7, 5])}
    assert measure.count_tokens(call(*qkv(2, 7), attn_mask=keys, **shorter)) == (9, 14)
    bias = {"attn_mask": torch.randn(2, 1, 1, 7)}
    assert measure.count_tokens(call(*qkv(2, 7), **bias)) == (14, 14)
    cross = call(qkv(2, 3)[0], *qkv(2, 7)[1:], attn_mask=keys)
    assert measure.count_tokens(cross) == (6, 6)
    ragged = call(*qkv(23), cu_seqlens_q=CU, attn_mask=torch.arange(8)[None, None, None] < 6)
    assert measure.count_tokens(ragged) == (5 + 6 + 6, 4 * 8)


@pytest.mark.parametrize("kind", ["flash", "dense", "sdpa"])
@pytest.mark.parametrize("source", ["flash", "dense", "sdpa", "torch"])
def test_use_routes_every_kind_to_every_other(monkeypatch, source, kind):
    functions = {"flash": flash_attention, "dense": baselines.dense, "sdpa": baselines.sdpa}
    ran, own = [], routing.implementation
    monkeypatch.setattr(
        routing,
        "implementation",
        lambda name: lambda *a, **kw: ran.append(name) or own(name)(*a, **kw),
    )
    q, k, v = qkv(2, 7)
    attend = functions.get(source, torch_sdpa)
    expected = attend(q, k, v)
    with measure.use(kind):
        out = attend(q, k, v)
    torch.testing.assert_close(out, expected)
    assert ran == ([] if (source, kind) == ("torch", "sdpa") else [kind])
    assert F.scaled_dot_product_attention is SDPA


SDPA_MASKS = {
    "bool": rand(2, 1, 7, 7) > 0.4,
    "shared": rand(7, 7) > 0.4,
    "keys": rand(2, 1, 1, 7) > 0.4,
    "bias": randn(2, 2, 7, 7),
    "hides": torch.zeros(2, 1, 7, 7).masked_fill(rand(2, 1, 7, 7) > 0.6, -torch.inf),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SDPA_MASKS)
def test_torch_sdpa_with_a_mask_has_an_exact_reference(name, causal):
    net = Net(lambda q, k, v: torch_sdpa(q, k, v, attn_mask=SDPA_MASKS[name], is_causal=causal))
    x = torch.randn(2, 7, 16)
    expected = net(x)
    with measure.track(net) as m:
        train(net, x)
    assert m.captured.unknown is None and m.predicted == set()
    summary = m.summary()
    assert all(0 < summary[error] < 1e-5 for error in ERRORS)
    assert summary["memory/dense_attention_peak_mib"] > 0
    for kind in ("flash", "dense"):
        with measure.use(kind):
            torch.testing.assert_close(net(x), expected)


@pytest.mark.parametrize("kind", ["flash", "dense"])
def test_torch_modules_with_masks_are_routed(kind):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x, causal = torch.randn(2, 9, 16), torch.ones(9, 9).triu(1).bool()
    padding = torch.arange(9)[None] >= torch.tensor([[9], [6]])
    options = {"src_mask": causal, "src_key_padding_mask": padding}
    expected = layer(x, **options)
    with measure.use(kind):
        torch.testing.assert_close(layer(x, **options), expected)
    with measure.track(layer) as m:
        layer(x, **options).square().sum().backward()
    assert all(0 < m.summary()[name] < 1e-5 for name in ERRORS)


def test_a_learned_bias_of_torchs_sdpa_gets_its_gradient():
    bias = torch.randn(2, 7, 7, requires_grad=True)
    q = torch.randn(3, 2, 7, 8)
    weight = torch.randn(3, 2, 7, 8)
    grads = []
    for kind in (None, "flash", "dense"):
        bias.grad = None
        with contextlib.nullcontext() if kind is None else measure.use(kind):
            (F.scaled_dot_product_attention(q, q, q, attn_mask=bias) * weight).sum().backward()
        grads.append(bias.grad)
    torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(grads[2], grads[0])


def test_use_drops_what_only_flash_reads():
    q, k, v = qkv(2, 7)
    with measure.use("dense"):
        out = flash_attention(q, k, v, backend="tiled", tiles=(16, 16))
    torch.testing.assert_close(out, baselines.dense(q, k, v))


def test_use_runs_a_whole_model_dense():
    layer, x = FlashMultiheadAttention(16, 2, batch_first=True), torch.randn(2, 64, 16)
    expected = layer(x, x, x, need_weights=False)[0]
    with measure.use("dense"):
        torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], expected)
    with pytest.raises(ValueError, match="nonsense"), measure.use("nonsense"):
        pass


def test_torch_sdpa_of_three_and_five_axes():
    masks = {
        3: (None, torch.rand(7, 7) > 0.3, torch.randn(3, 7, 7)),
        5: (None, torch.randn(7, 7), torch.rand(2, 1, 7, 7) > 0.3, torch.randn(4, 1, 3, 7, 7)),
    }
    for shape in ((3, 7, 8), (4, 2, 3, 7, 8)):
        x = torch.randn(shape, requires_grad=True)
        for mask in masks[len(shape)]:
            with measure.track() as m:
                F.scaled_dot_product_attention(x, x, x, mask).square().sum().backward()
            assert all(m.summary()[name] < 1e-5 for name in ERRORS)
            with measure.use("dense"):
                out = F.scaled_dot_product_attention(x, x, x, mask)
            torch.testing.assert_close(out, SDPA(x, x, x, mask))


def test_torch_sdpa_is_causal_from_the_top_left():
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    with measure.track() as m:
        expected = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    assert m.summary()["grad_error/out"] < 1e-5
    with measure.use("dense"):
        out = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    torch.testing.assert_close(out, expected)


def test_steps_are_measured_into_the_summary():
    net, x = Net(flash_attention), torch.randn(1, 128, 16)
    with measure.track(net) as m:
        train(net, x)
        captured = m.captured
        m.measure_step(lambda: train(net, x))
    assert m.captured is captured
    summary = m.summary()
    assert 0 < summary["memory/step_peak_mib"] < summary["memory/dense_step_peak_mib"]


def test_only_what_is_asked_for_is_measured():
    inputs = qkv(1, 6)
    measured = measure.measure_call(call(*inputs), memory=False)
    assert set(measured.values) == {*ERRORS, "grad_error/coverage"}
    measured = measure.measure_call(call(*inputs), grad_error=False)
    assert set(measured.values) == {
        "memory/attention_peak_mib",
        "memory/dense_attention_peak_mib",
    }


def test_the_rate_leaves_first_steps_out_once_others_have_ended():
    now = [0.0]
    throughput = measure.Throughput(clock=lambda: now[0], skip_steps=1)
    now[0] = 50.0  # the first step compiles
    throughput.step(tokens=10)
    assert throughput.tokens_per_s == 10 / 50
    now[0] = 52.0
    throughput.step(tokens=10)
    assert throughput.tokens_per_s == 5 and throughput.tokens == 20


def test_padding_inside_a_mask_tensor_is_said_not_to_be_counted(caplog):
    x = torch.randn(1, 2, 6, 8)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    with measure.track() as m:
        F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        m.step()
        m.step()
    assert caplog.text.count("step(tokens=...)") == 1


@pytest.mark.parametrize(
    "mask",
    [torch.randn(2, 1, 6, 6), torch.ones(6, 6).tril().bool(), torch.ones(2, 1, 1, 6).bool()],
    ids=["bias", "shared", "keys"],
)
def test_a_mask_without_room_for_padding_needs_no_warning(mask, caplog):
    with measure.track() as m:
        flash_attention(*qkv(2, 6), attn_mask=mask)
        m.step()
    assert m.throughput.tokens == 12 and not caplog.text
