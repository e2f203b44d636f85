"""torch's module and ours with the same weights, and whether they agree."""

import torch
from torch import nn

from flashmod import FlashMultiheadAttention

E, H = 12, 3


def pair(**kwargs):
    """torch's module and ours, dropout off."""
    theirs = nn.MultiheadAttention(E, H, **kwargs)
    for name, p in theirs.named_parameters():
        if "bias" in name:
            nn.init.normal_(p)
    ours = FlashMultiheadAttention(E, H, **kwargs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return theirs, ours


def compare(theirs, ours, *inputs, atol=2e-6, **kwargs):
    """Outputs, weights and all gradients agree."""
    results = []
    for module in (theirs, ours):
        module.zero_grad()
        leaves = [x.detach().requires_grad_() for x in inputs]
        options = {name: with_gradient(x) for name, x in kwargs.items()}
        out, weights = module(*leaves, **options)
        loss = out.sin().sum() + (0 if weights is None else weights.cos().sum())
        loss.backward()
        masks = [x for x in options.values() if isinstance(x, torch.Tensor)]
        learned = (*leaves, *module.parameters(), *masks)
        results.append((out, weights, *(x.grad for x in learned)))
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape and a.dtype == b.dtype
            largest = float(a.detach().abs().max()) if a.numel() else 0.0
            torch.testing.assert_close(b, a, rtol=1e-5, atol=max(atol, 2e-6 * largest))


def with_gradient(x):
    """A float mask as a leaf of its own; anything else as it is."""
    floating = isinstance(x, torch.Tensor) and x.is_floating_point()
    return x.detach().clone().requires_grad_() if floating else x


def hiding(*shape):
    """bool, True = hidden; every row keeps its first key."""
    hidden = torch.rand(shape) > 0.5
    hidden[..., 0] = False
    return hidden


def as_numbers(hidden):
    return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
