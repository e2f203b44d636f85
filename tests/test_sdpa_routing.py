"""Routing existing SDPA calls: which are caught, what is restored, what is recomputed."""

import gc
import sys
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpointing
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

import flashmod
from flashmod import disable_sdpa, enable_sdpa, measure, route_sdpa
from flashmod.integrations import sdpa_arguments
from flashmod.integrations.sdpa_routing import routed_sdpa

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
STOCK = {"sdpa": F.scaled_dot_product_attention}  # in a dict, where no search for names looks
PATCHED = (
    (F, "scaled_dot_product_attention"),
    (checkpointing.CheckpointFunction, "forward"),
    (checkpointing.CheckpointFunction, "backward"),
    (checkpointing, "_checkpoint_without_reentrant_generator"),
)
BEFORE = [vars(owner)[name] for owner, name in PATCHED]


def assert_restored():
    assert [vars(owner)[name] for owner, name in PATCHED] == BEFORE


@pytest.fixture(autouse=True)
def restored():
    yield
    disable_sdpa()
    assert_restored()


@pytest.fixture
def flash_calls(monkeypatch):
    """The number of calls that reached flash attention, whoever made them."""
    from flashmod.integrations import sdpa

    calls = []
    real = sdpa.flash_attention

    def counted(*args, **kwargs):
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(sdpa, "flash_attention", counted)
    return calls


def call(x, **kwargs):
    return F.scaled_dot_product_attention(x, x, x, **kwargs)


def heads():
    return torch.randn(2, 2, 5, 8)


def early_importer():
    """A module that said ``from torch.nn.functional import scaled_dot_product_attention``."""
    module = types.ModuleType("early_importer")
    module.sdpa = STOCK["sdpa"]
    module.block = lambda x: module.sdpa(x, x, x, is_causal=True)
    return module


class Fused(nn.Module):
    """timm's block: keywords, and dropout without a flag."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, attn_mask=None):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=0.1 if self.training else 0.0
        )
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class Causal(nn.Module):
    """nanoGPT's block."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (y.view(b, t, 2, c // 2).transpose(1, 2) for y in self.c_attn(x).split(c, dim=2))
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


def test_the_attribute_is_routed_and_restored(flash_calls):
    x = heads()
    with route_sdpa() as routing:
        assert F.scaled_dot_product_attention is routed_sdpa
        torch.testing.assert_close(call(x), STOCK["sdpa"](x, x, x))
    assert len(flash_calls) == routing.calls == 1 and not routing.left_to_torch
    call(x)
    assert len(flash_calls) == routing.calls == 1


def test_restored_after_an_exception():
    with pytest.raises(KeyError), route_sdpa(early_imports=True):
        raise KeyError


@pytest.mark.parametrize("early_imports", [False, True])
def test_names_imported_early(monkeypatch, flash_calls, early_imports):
    module = early_importer()
    monkeypatch.setitem(sys.modules, "early_importer", module)
    x = heads()
    with route_sdpa(early_imports=early_imports):
        module.block(x)
    assert len(flash_calls) == early_imports
    assert module.sdpa is STOCK["sdpa"]
    assert torch._C._nn.scaled_dot_product_attention is STOCK["sdpa"]


def test_names_imported_early_and_nested_contexts(monkeypatch, flash_calls):
    module = early_importer()
    monkeypatch.setitem(sys.modules, "early_importer", module)
    outer, inner = route_sdpa(early_imports=True), route_sdpa(early_imports=True)
    x = heads()
    enable_sdpa()
    module.block(x)
    assert not flash_calls
    enable_sdpa(early_imports=True)
    module.block(x)
    with outer:
        disable_sdpa()
        module.block(x)
        with inner:
            module.block(x)
        module.block(x)
    assert len(flash_calls) == 4 and module.sdpa is STOCK["sdpa"]


def test_names_bound_while_routing_run_torch_afterwards(flash_calls):
    with route_sdpa():
        late = F.scaled_dot_product_attention
    x = heads()
    assert torch.equal(late(x, x, x), STOCK["sdpa"](x, x, x))
    assert not flash_calls


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("model", [Fused, Causal])
def test_models_that_call_the_attribute(model, train, flash_calls):
    torch.manual_seed(0)
    net, x = model().train(train), torch.randn(2, 6, 16, requires_grad=True)
    with route_sdpa():
        out = net(x)
        out.sum().backward()
    assert len(flash_calls) == 1 and x.grad.isfinite().all()
    if not (train and model is Fused):
        torch.testing.assert_close(out, net(x))


def test_multihead_attention(flash_calls):
    """Its fused eval path without gradients is torch's own, as the docstring says."""
    net, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected, _ = net(x, x, x, key_padding_mask=padding, need_weights=False)
    with route_sdpa():
        out, _ = net(x, x, x, key_padding_mask=padding, need_weights=False)
        assert len(flash_calls) == 1
        net.eval()(x, x, x, need_weights=False)
        assert len(flash_calls) == 2
        with torch.no_grad():
            net(x, x, x, need_weights=False)
        assert len(flash_calls) == 2
    torch.testing.assert_close(out, expected)


def test_other_threads_are_routed(flash_calls):
    x = heads()
    with route_sdpa(), ThreadPoolExecutor(1) as pool:
        pool.submit(call, x).result()
    assert len(flash_calls) == 1


def test_threads_may_enter_and_leave_at_will():
    x = heads()
    barrier = threading.Barrier(4)

    def work(_):
        barrier.wait()
        for _ in range(20):
            with route_sdpa():
                assert F.scaled_dot_product_attention is routed_sdpa
                call(x)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert_restored()


def test_contexts_nest_and_count_apart():
    x = heads()
    with route_sdpa() as outer:
        call(x)
        with route_sdpa() as inner:
            call(x)
        call(x)
    assert (outer.calls, inner.calls) == (3, 1)


def test_enabling_lasts_until_disabling():
    x = heads()
    first = enable_sdpa()
    assert enable_sdpa() is first
    with route_sdpa() as routing:
        disable_sdpa()
        call(x)  # the context is still active
    assert (first.calls, routing.calls) == (0, 1)
    assert_restored()
    disable_sdpa()
    with route_sdpa():
        enable_sdpa()
    call(x)
    assert enable_sdpa().calls == 1


def test_foreign_patches_above_and_below(monkeypatch, flash_calls):
    x, seen = heads(), []

    def below(*args, **kwargs):
        seen.append("below")
        return STOCK["sdpa"](*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", below)
        with route_sdpa():
            call(x)
        call(x)
        assert F.scaled_dot_product_attention is below and seen == ["below"]

    enable_sdpa()
    routed = F.scaled_dot_product_attention

    def above(*args, **kwargs):
        seen.append("above")
        return routed(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", above)
        disable_sdpa()
        call(x)
        assert seen == ["below", "above"] and len(flash_calls) == 1
    with route_sdpa():  # the leftover is passed over
        call(x)
    assert len(flash_calls) == 2


@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning")
def test_what_torch_runs_is_counted_by_reason():
    x = torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (3, 5)])
    with route_sdpa() as routing:
        assert call(x).is_nested
        with pytest.raises(RuntimeError, match="Int"):
            call(torch.ones(1, 1, 2, 2).int())
    assert routing.calls == 0
    assert [*routing.left_to_torch.values()] == [1, 1]
    assert "strided layout" in next(iter(routing.left_to_torch))


def test_every_reason_names_its_cause():
    def reason(x):
        given = sdpa_arguments.SdpaArguments(x, x, x, None, 0.0, False, None, False)
        return sdpa_arguments.left_to_torch(given)

    class DTensor(torch.Tensor):
        pass

    assert reason(heads()) is None
    assert "sparse" in reason(torch.eye(3).to_sparse())
    assert "complex64" in reason(torch.ones(2, 2, dtype=torch.complex64))
    assert "DTensor" in reason(torch.ones(2, 2).as_subclass(DTensor))


def test_traced_modules_hold_torchs_function():
    x = heads()
    with route_sdpa() as routing:
        traced = torch.jit.trace(lambda x: call(x), (x,))
    assert any("trace" in reason for reason in routing.left_to_torch)
    assert "aten::scaled_dot_product_attention" in str(traced.graph)
    torch.testing.assert_close(traced(x), call(x))


def test_causal_bias_is_routed(flash_calls):
    x, y = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 6, 8)
    bias = causal_lower_right(3, 6)
    expected = F.scaled_dot_product_attention(x, y, y, bias)
    with route_sdpa(), torch.device("cpu"):
        torch.testing.assert_close(F.scaled_dot_product_attention(x, y, y, bias), expected)
    assert len(flash_calls) == 1


def test_compiled_code_follows_the_switch():
    x, graphs = torch.randn(2, 2, 5, 8, requires_grad=True), []

    def backend(graph, _):
        graphs.append("flashmod" in graph.print_readable(print_output=False))
        return graph

    torch._dynamo.reset()
    step = torch.compile(lambda x: call(x, is_causal=True).sin(), backend=backend, fullgraph=True)
    expected = call(x, is_causal=True).sin()
    for _ in range(2):
        torch.testing.assert_close(step(x), expected)
        with route_sdpa():
            out = step(x)
            torch.testing.assert_close(out, expected)
            out.sum().backward()
    assert graphs == [False, True]


def test_export_holds_our_op():
    with route_sdpa():
        program = torch.export.export(Causal(), (torch.randn(2, 6, 16),))
    names = [str(node.target) for node in program.graph.nodes]
    assert sum("flashmod.attention_forward" in name for name in names) == 1


def block(x):
    return call(x * 2, dropout_p=0.5).sin()


def gradient(x, run):
    torch.manual_seed(5)
    x.grad = None
    run(x)
    return x.grad


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_checkpoints_recompute_what_was_routed(reentrant, inside, flash_calls):
    """With dropout: a recomputation by torch would draw other weights, in silence if reentrant."""
    x = torch.randn(1, 2, 5, 8, requires_grad=True)

    def run(x):
        with route_sdpa() as routing:
            out = checkpoint(block, x, use_reentrant=reentrant)
            if inside:
                out.sum().backward()
        if not inside:
            assert F.scaled_dot_product_attention is STOCK["sdpa"]
            out.sum().backward()
        assert routing.calls == len(flash_calls) == 2

    def plain(x):
        with route_sdpa():
            block(x).sum().backward()

    ours = gradient(x, run)
    assert torch.equal(ours, gradient(x, plain))
    assert_restored()


def test_reentrant_checkpoints_from_before_stay_torchs(flash_calls):
    x = torch.randn(1, 2, 5, 8, requires_grad=True)

    def run(x):
        out = checkpoint(lambda x: checkpoint(block, x, use_reentrant=True), x, use_reentrant=True)
        with route_sdpa():
            out.sum().backward()

    assert torch.equal(gradient(x, run), gradient(x, lambda x: block(x).sum().backward()))
    assert not flash_calls


def test_other_checkpoints_from_before_raise():
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    out = checkpoint(block, x, use_reentrant=False)
    with route_sdpa(), pytest.raises(checkpointing.CheckpointError):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_recompute_names_imported_early(monkeypatch, reentrant, flash_calls):
    module = early_importer()
    monkeypatch.setitem(sys.modules, "early_importer", module)
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    with route_sdpa(early_imports=True):
        out = checkpoint(lambda x: module.block(x).sin(), x, use_reentrant=reentrant)
    assert module.sdpa is STOCK["sdpa"]
    out.sum().backward()
    assert len(flash_calls) == 2 and module.sdpa is STOCK["sdpa"]


def test_checkpointed_functions_are_freed():
    class Net(nn.Module):
        def forward(self, x):
            return call(x).sin()

    net, x = Net(), torch.randn(1, 2, 5, 8, requires_grad=True)
    gone = weakref.ref(net)
    with route_sdpa():
        checkpoint(net, x, use_reentrant=False).sum().backward()
    del net
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("measure_first", [True, False])
@pytest.mark.parametrize("leave_first", [True, False])
def test_measuring_sees_routed_calls_once(measure_first, leave_first):
    """Whichever context comes first or goes first."""
    net, x = Causal(), torch.randn(2, 6, 16)
    route, track = route_sdpa(), measure.track(net)
    contexts = (track, route) if measure_first else (route, track)
    entered = {one: one.__enter__() for one in contexts}
    net(x).sum().backward()
    assert entered[route].calls == 1
    captured = entered[track].captured
    assert captured.kind == "flash" and captured.grad_out is not None
    for one in contexts if leave_first else reversed(contexts):
        one.__exit__(None, None, None)
    assert_restored()
    assert entered[track].summary()["grad_error/dq"] < 1e-5


@pytest.mark.parametrize("kind", ["flash", "dense", "sdpa"])
@pytest.mark.parametrize("measure_first", [True, False])
def test_measures_other_attentions_run_routed_models(kind, measure_first):
    net, x = Causal(), torch.randn(2, 6, 16)
    expected = net(x)
    route, use = route_sdpa(), measure.use(kind)
    first, second = (use, route) if measure_first else (route, use)
    with first, second:
        torch.testing.assert_close(net(x), expected)


def test_the_sdpa_baseline_is_torchs_own(flash_calls):
    from flashmod import baselines

    x = torch.randn(2, 5, 2, 8)
    with route_sdpa():
        baselines.sdpa(x, x, x)
        flashmod.flash_attention(x, x, x)
    assert not flash_calls
