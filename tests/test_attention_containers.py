"""The module inside torch's machinery: containers, compile, checkpoint, func, autocast."""

import copy

import pytest
import torch
from cases import cu_seqlens
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from flashmod import FlashMultiheadAttention, Mask

# Dynamo's own way of tracing any autograd Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

E, H = 8, 2
WINDOW = Mask(window=(1, 1))


def encoder_layer(**kwargs):
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True, dropout=0.0)
    attention = FlashMultiheadAttention(E, H, batch_first=True, **kwargs)
    if not kwargs.get("num_kv_heads"):
        attention.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = attention
    return layer


@pytest.fixture
def calls(monkeypatch):
    """How often the module's own forward ran."""
    counted = []
    forward = FlashMultiheadAttention.forward

    def counting(self, *args, **kwargs):
        counted.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(FlashMultiheadAttention, "forward", counting)
    return counted


@pytest.mark.parametrize(
    "kwargs", [{"mask": WINDOW}, {"num_kv_heads": 1}], ids=["window", "grouped"]
)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_module_that_does_more_than_torch_is_always_called(kwargs, stacked, calls):
    layer = encoder_layer(**kwargs)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False) if stacked else layer
    x, per_run = torch.randn(2, 5, E), 2 if stacked else 1
    outputs = []
    for mode in ("train", "eval", "no_grad", "frozen", "inference"):
        model.train(mode == "train")
        model.requires_grad_(mode != "frozen")
        with torch.set_grad_enabled(mode != "no_grad"), torch.inference_mode(mode == "inference"):
            outputs.append(model(x).clone())
        assert len(calls) == per_run, mode
        calls.clear()
    for other in outputs[1:]:
        torch.testing.assert_close(outputs[0].detach(), other.detach())


def test_a_plain_module_gives_the_same_whether_torch_calls_it_or_not(calls):
    layer = encoder_layer()
    x = torch.randn(2, 5, E)
    trained = layer(x)
    assert len(calls) == 1
    layer.eval()
    with torch.no_grad():  # torch's fused path reads our weights
        torch.testing.assert_close(layer(x), trained.detach())


def test_encoder_with_causal_mask_and_padding_equals_torch():
    ours = encoder_layer()
    theirs = nn.TransformerEncoderLayer(E, H, 16, batch_first=True, dropout=0.0)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, E)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    torch.testing.assert_close(ours(x, causal, is_causal=True), theirs(x, causal, is_causal=True))
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    torch.testing.assert_close(
        ours(x, src_key_padding_mask=padding), theirs(x, src_key_padding_mask=padding)
    )


def test_decoder_calls_both_attentions(calls):
    theirs = nn.TransformerDecoderLayer(E, H, 16, batch_first=True, dropout=0.0)
    ours = copy.deepcopy(theirs)
    for name in ("self_attn", "multihead_attn"):
        attention = FlashMultiheadAttention(E, H, batch_first=True)
        attention.load_state_dict(getattr(ours, name).state_dict())
        setattr(ours, name, attention)
    x, memory = torch.randn(2, 5, E), torch.randn(2, 7, E)
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    for training in (True, False):
        results = [
            m.train(training)(x, memory, memory_key_padding_mask=padding) for m in (ours, theirs)
        ]
        torch.testing.assert_close(*results)
    assert len(calls) == 4


CAUSAL = torch.ones(5, 5).triu(1).bool()
MASKS = {
    "bool": CAUSAL,
    "numbers": nn.Transformer.generate_square_subsequent_mask(5),
    "by_head": CAUSAL.expand(2 * H, 5, 5),
    "bias": torch.linspace(-1, 1, 25).view(5, 5),
}
HINTS = {"bool": (None, False, True), "numbers": (None, False, True)}


def swapped(model):
    """A copy with our modules in place of torch's."""
    ours = copy.deepcopy(model)
    for parent in list(ours.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.MultiheadAttention:
                attention = FlashMultiheadAttention(E, H, batch_first=True)
                attention.load_state_dict(child.state_dict())
                setattr(parent, name, attention)
    return ours


def agree(theirs, ours, *inputs, **kwargs):
    """Outputs and all gradients of two models."""
    results = []
    for model in (theirs, ours):
        model.zero_grad()
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = model(*leaves, **kwargs)
        out.sin().sum().backward()
        results.append([out, *(x.grad for x in (*leaves, *model.parameters()))])
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
@pytest.mark.parametrize("mask", MASKS)
def test_an_encoder_takes_every_mask_with_padding_and_any_hint(mask, calls):
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True, dropout=0.0)
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    ours, x = swapped(theirs), torch.randn(2, 5, E)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for hint in HINTS.get(mask, (None, False)):
        for keys in (None, padding):
            options = {"mask": MASKS[mask], "src_key_padding_mask": keys, "is_causal": hint}
            agree(theirs, ours, x, **options)
            assert len(calls) == 2
            calls.clear()


@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
@pytest.mark.parametrize("mask", MASKS)
def test_a_decoder_takes_every_mask_with_padding_and_any_hint(mask, calls):
    layer = nn.TransformerDecoderLayer(E, H, 16, batch_first=True, dropout=0.0)
    theirs = nn.TransformerDecoder(layer, 2)
    ours, x, memory = swapped(theirs), torch.randn(2, 5, E), torch.randn(2, 7, E)
    keys = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    memory_keys = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    memory_mask = torch.arange(35).view(5, 7) % 5 == 4
    for hint in HINTS.get(mask, (None, False)):
        for options in ({}, {"tgt_key_padding_mask": keys, "memory_mask": memory_mask}):
            options = {"tgt_is_causal": hint, "memory_key_padding_mask": memory_keys, **options}
            agree(theirs, ours, x, memory, tgt_mask=MASKS[mask], **options)
            assert len(calls) == 4
            calls.clear()


def test_a_whole_transformer_takes_all_masks_at_once():
    theirs = nn.Transformer(E, H, 1, 1, 16, dropout=0.0, batch_first=True)
    ours, x, y = swapped(theirs), torch.randn(2, 7, E), torch.randn(2, 5, E)
    keys = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    options = {
        "src_mask": torch.ones(7, 7).triu(1).bool(),
        "tgt_mask": CAUSAL,
        "memory_mask": torch.arange(35).view(5, 7) % 5 == 4,
        "src_key_padding_mask": keys,
        "tgt_key_padding_mask": keys[:, 2:],
        "memory_key_padding_mask": keys,
    }
    agree(theirs, ours, x, y, **options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kwargs", [{}, {"mask": WINDOW}, {"num_kv_heads": 1}], ids=str)
def test_the_nested_tensor_of_an_encoder_is_ragged_self_attention(kwargs, calls):
    model = nn.TransformerEncoder(encoder_layer(**kwargs), 2)
    x, padding = torch.randn(2, 5, E), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    trained = model(x, src_key_padding_mask=padding)
    calls.clear()
    with torch.no_grad():
        nested = model.eval()(x, src_key_padding_mask=padding)
    assert len(calls) == (2 if kwargs else 0)
    torch.testing.assert_close(nested[~padding], trained[~padding].detach())
    assert (nested[padding] == 0).all()  # as in torch


def test_compiles_without_a_break_and_once_for_all_lengths():
    counter = CompileCounterWithBackend("aot_eager")
    module = FlashMultiheadAttention(E, H, mask=Mask(causal=True))
    twin = copy.deepcopy(module)
    compiled = torch.compile(
        lambda x, cu: module(x, cu_seqlens=cu)[0], fullgraph=True, backend=counter
    )
    x = torch.randn(8, E)
    for lengths in ([3, 5], [1, 7], [8, 0]):
        module.zero_grad(), twin.zero_grad()
        cu = cu_seqlens(lengths)
        ours, eager = compiled(x, cu), twin(x, cu_seqlens=cu)[0]
        torch.testing.assert_close(ours, eager)
        ours.square().sum().backward(), eager.square().sum().backward()
        torch.testing.assert_close(module.in_proj_weight.grad, twin.in_proj_weight.grad)
    assert counter.frame_count == 1
    for tokens in (9, 12, 31):  # one more graph, for any number of tokens
        compiled(torch.randn(tokens, E), cu_seqlens([4, tokens - 4])).sum().backward()
    assert counter.frame_count == 2


@pytest.mark.parametrize("mode", ["no_grad", "inference", "frozen"])
def test_compiles_where_nothing_needs_a_gradient(mode):
    module = FlashMultiheadAttention(E, H, mask=Mask(causal=True)).eval()
    module.requires_grad_(mode != "frozen")
    compiled = torch.compile(
        lambda x: module(x, need_weights=False)[0], fullgraph=True, backend="aot_eager"
    )
    with torch.set_grad_enabled(mode != "no_grad"), torch.inference_mode(mode == "inference"):
        for length in (5, 7):
            x = torch.randn(length, 2, E)
            torch.testing.assert_close(compiled(x), module(x, need_weights=False)[0])


@pytest.mark.parametrize("need_weights", [False, True])
def test_compiles_with_padding(need_weights):
    module = FlashMultiheadAttention(E, H, batch_first=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, padding = torch.randn(1, 3, E), torch.tensor([[False, True, False]])
    options = {"key_padding_mask": padding, "need_weights": need_weights}
    for ours, eager in zip(compiled(x, **options), module(x, **options), strict=True):
        torch.testing.assert_close(ours, eager)
    options["key_padding_mask"] = torch.zeros(1, 3).masked_fill(padding, -torch.inf)
    torch.testing.assert_close(compiled(x, **options)[0], module(x, **options)[0])
    options["key_padding_mask"] = torch.randn(1, 3)
    torch.testing.assert_close(compiled(x, **options)[0], module(x, **options)[0])


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("numbers", [False, True])
def test_compiles_with_both_masks(numbers, need_weights):
    module = FlashMultiheadAttention(E, H, batch_first=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, padding = torch.randn(2, 4, E), torch.tensor([[False] * 4, [False] * 3 + [True]])
    mask = torch.ones(4, 4).triu(1).bool()
    results = []
    for call in (compiled, module):
        bias = torch.zeros(4, 4).masked_fill(mask, -torch.inf).requires_grad_()
        options = {"attn_mask": bias if numbers else mask, "key_padding_mask": padding}
        module.zero_grad()
        out, weights = call(x, need_weights=need_weights, **options)
        loss = out.sin().sum() + (0 if weights is None else weights.cos().sum())
        loss.backward()
        learned = [bias.grad] if numbers else []
        results.append([out, *learned, *(p.grad for p in module.parameters())])
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right)


def test_compiled_dropout_is_new_every_call_and_repeatable():
    module = FlashMultiheadAttention(E, H, dropout=0.5)
    compiled = torch.compile(
        lambda x: module(x, need_weights=False)[0], fullgraph=True, backend="aot_eager"
    )
    x = torch.randn(9, 2, E)

    def outputs():
        torch.manual_seed(2)
        return [compiled(x) for _ in range(2)]

    first, second = outputs()
    assert not torch.equal(first, second)
    assert all(map(torch.equal, outputs(), (first, second)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_replays_dropout(reentrant):
    module = FlashMultiheadAttention(E, H, dropout=0.5)
    x = torch.randn(9, 2, E, requires_grad=True)

    def gradients(call):
        module.zero_grad()
        torch.manual_seed(4)
        out = call(lambda x: module(x, need_weights=False)[0], x)
        torch.randn(3)  # the generator moves on before the backward pass
        out.square().sum().backward()
        result = [out.detach(), x.grad.clone(), module.in_proj_weight.grad.clone()]
        x.grad = None
        return result

    plain = gradients(lambda f, x: f(x))
    again = gradients(lambda f, x: checkpoint(f, x, use_reentrant=reentrant))
    assert all(map(torch.equal, plain, again))


def test_functional_call_and_per_parameter_gradients():
    module = FlashMultiheadAttention(E, H, batch_first=True)
    other = FlashMultiheadAttention(E, H, batch_first=True)
    x = torch.randn(2, 5, E)
    out = torch.func.functional_call(
        module, dict(other.named_parameters()), (x,), {"need_weights": False}
    )[0]
    assert torch.equal(out, other(x, need_weights=False)[0])

    def loss(parameters):
        return (
            torch.func.functional_call(module, parameters, (x,), {"need_weights": False})[0]
            .square()
            .sum()
        )

    grads = torch.func.grad(loss)(dict(other.named_parameters()))
    other(x, need_weights=False)[0].square().sum().backward()
    for name, p in other.named_parameters():
        torch.testing.assert_close(grads[name], p.grad)


def test_autocast_gives_its_dtype_and_float32_gradients():
    module = FlashMultiheadAttention(E, H, batch_first=True)
    x = torch.randn(2, 5, E)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, weights = module(x)
    assert out.dtype == weights.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), module(x)[0], atol=3e-2, rtol=0)
    out.float().sum().backward()
    assert module.in_proj_weight.grad.dtype == torch.float32


def test_a_hook_or_a_parametrisation_works():
    module = FlashMultiheadAttention(E, H, batch_first=True)
    seen = []
    module.register_forward_hook(lambda m, args, out: seen.append(out[0].shape))
    nn.utils.parametrizations.weight_norm(module.out_proj)
    module(torch.randn(2, 5, E))[0].sum().backward()
    assert seen == [(2, 5, E)]
    assert module.out_proj.parametrizations.weight.original1.grad is not None


def test_a_subclass_may_replace_the_attention_itself():
    class Doubled(FlashMultiheadAttention):
        def attend(self, q, k, v, **arguments):
            return 2 * super().attend(q, k, v, **arguments)

    module = Doubled(E, H, bias=False)
    plain = FlashMultiheadAttention(E, H, bias=False)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(5, 2, E)
    torch.testing.assert_close(module(x)[0], 2 * plain(x)[0])
