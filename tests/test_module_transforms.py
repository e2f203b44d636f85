"""The module under torch.compile, torch.export, both checkpoints and torch.func."""

import copy

import pytest
import torch
from cases import cu_seqlens
from small_models import padded_encoder
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from flashmod import FlashMultiheadAttention, Mask, swap_attention

# Dynamo's own way of tracing any autograd Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*not be instantiated:DeprecationWarning")

E, H = 12, 2
F, T = False, True
BATCHES = ([3, 5], [1, 7], [3, 3, 2], [1, 2, 2, 3], [4, 4])


@pytest.mark.parametrize("dynamic", [None, T])
@pytest.mark.parametrize("kwargs", [{}, {"add_bias_kv": T, "alibi": T, "sink": T}], ids=str)
def test_compilations_of_ragged_batches(dynamic, kwargs):
    """One for lengths, one more when the number of sequences changes; one in all if dynamic."""
    counter = CompileCounterWithBackend("aot_eager")
    module = FlashMultiheadAttention(E, H, mask=Mask(causal=T), **kwargs)
    twin = copy.deepcopy(module)
    compiled = torch.compile(
        lambda x, cu: module(x, cu_seqlens=cu)[0], fullgraph=T, backend=counter, dynamic=dynamic
    )
    x, counts = torch.randn(8, E), []
    for lengths in BATCHES:
        module.zero_grad(), twin.zero_grad()
        cu = cu_seqlens(lengths)
        ours, eager = compiled(x, cu), twin(x, cu_seqlens=cu)[0]
        torch.testing.assert_close(ours, eager)
        ours.square().sum().backward(), eager.square().sum().backward()
        for mine, right in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, right.grad)
        counts.append(counter.frame_count)
    assert counts == ([1] * 5 if dynamic else [1, 1, 2, 2, 2])


def test_dropout_that_changes_is_seen_by_compiled_code():
    module = FlashMultiheadAttention(E, H, batch_first=T)
    compiled = torch.compile(module, fullgraph=T, backend="aot_eager")
    x = torch.randn(2, 5, E)
    plain = compiled(x, need_weights=F)[0]
    torch.testing.assert_close(plain, module(x, need_weights=F)[0])
    module.dropout = 0.5
    assert not torch.allclose(compiled(x, need_weights=F)[0], plain)
    module.dropout = 0.0
    assert torch.equal(compiled(x, need_weights=F)[0], plain)


class Padded(nn.Module):
    """Self-attention as a model calls it."""

    def __init__(self, need_weights, **kwargs):
        super().__init__()
        self.attention = FlashMultiheadAttention(E, H, batch_first=T, **kwargs)
        self.need_weights = need_weights

    def forward(self, x, padding):
        return self.attention(x, x, x, key_padding_mask=padding, need_weights=self.need_weights)


@pytest.mark.parametrize("need_weights", [F, T])
@pytest.mark.parametrize("kwargs", [{}, {"add_bias_kv": T, "alibi": T, "sink": T}], ids=str)
def test_exports_for_any_length(need_weights, kwargs):
    model = Padded(need_weights, **kwargs).eval()
    rows = torch.export.Dim("rows", min=2)
    inputs = torch.randn(2, 5, E), torch.arange(5).expand(2, 5) > 3
    program = torch.export.export(model, inputs, dynamic_shapes=({1: rows}, {1: rows}))
    longer = torch.randn(2, 9, E), torch.arange(9).expand(2, 9) > 6
    for given in (inputs, longer):
        for mine, right in zip(program.module()(*given), model(*given), strict=True):
            assert (mine is None) == (right is None)
            assert mine is None or torch.equal(mine, right)


def test_exports_by_itself():
    module, x = FlashMultiheadAttention(E, H).eval(), torch.randn(5, 2, E)
    program = torch.export.export(module, (x, x, x), {"need_weights": F})
    assert torch.equal(program.module()(x, x, x, need_weights=F)[0], module(x)[0])


@pytest.mark.parametrize("reentrant", [F, T])
def test_checkpointed_layers_of_a_swapped_encoder(reentrant):
    """Dropout in attention and around it falls as it fell."""
    model, (tokens, hidden) = padded_encoder(dropout=0.3)
    swap_attention(model)
    layers, x = model.encoder.layers, model.embed(tokens).detach().requires_grad_()
    gradients = []
    for checkpointed in (F, T):
        model.zero_grad()
        torch.manual_seed(1)
        out = x
        for layer in layers:

            def block(out, layer=layer):
                return layer(out, src_key_padding_mask=hidden)

            out = checkpoint(block, out, use_reentrant=reentrant) if checkpointed else block(out)
        torch.randn(3)  # the generator moves on before the backward pass
        out.square().sum().backward()
        gradients.append([x.grad.clone(), *(p.grad.clone() for p in layers.parameters())])
        x.grad = None
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("need_weights", [F, T])
@pytest.mark.parametrize("kwargs", [{}, {"add_bias_kv": T, "add_zero_attn": T}], ids=str)
def test_per_sample_gradients(need_weights, kwargs):
    """vmap(grad) gives what one sample at a time gives."""
    module = FlashMultiheadAttention(E, H, batch_first=T, **kwargs)
    x, parameters = torch.randn(3, 5, E), dict(module.named_parameters())
    padding = torch.arange(5) > torch.tensor([[4], [2], [3]])

    def loss(parameters, x, padding):
        options = {"key_padding_mask": padding[None], "need_weights": need_weights}
        out, weights = functional_call(module, parameters, (x[None],), options)
        return out.sin().sum() + (0 if weights is None else weights.cos().sum())

    got = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, padding)
    for n in range(3):
        module.zero_grad()
        loss(parameters, x[n], padding[n]).backward()
        for name, p in parameters.items():
            torch.testing.assert_close(got[name][n], p.grad, rtol=1e-4, atol=1e-5)
