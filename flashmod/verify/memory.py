"""Memory of one causal float64 head, forward and backward: how much, and how it grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import flash_attention
from ..dispatch import load
from ..functional import prepare
from ..masks import Mask
from ..measure.memory import peak_mib
from .context import Context
from .rows import Row, Target

OURS, DENSE = Target("<", 64, " MB"), Target(">", 400, " MB")
OUR_GROWTH, DENSE_GROWTH = Target("<=", 8.5, "x"), Target(">=", 50, "x")
SAME = Target("=", 1.0, "x")
LENGTHS, QUICK_LENGTHS = (512, 1024, 2048, 4096), (256, 512, 1024, 2048)
DIM = 64
_MB_PER_MIB = (1 << 20) / 1e6
_NARROW = 8  # an axis of row statistics or limits; a tile of scores is wider on both
_UNLIKE_TILES = 56  # a head dimension that no tile size equals, to tell scores from rows


def run(context: Context) -> Iterator[Row]:
    """Peaks beyond the inputs at the longest length, their growth, and the largest score tensor."""
    lengths = QUICK_LENGTHS if context.quick else LENGTHS
    ours, dense = [], []
    for number, length in enumerate(lengths):
        ours.append(_peak(attend_flash, length))
        dense.append(_peak(attend_dense, length))
        context.tick(number + 1, len(lengths))
    peak = f"peak at {lengths[-1]} tokens, d = {DIM}, causal, fp64"
    # The matrices of dense attention are smaller where --quick stops earlier.
    target = DENSE._replace(bound=DENSE.bound * (lengths[-1] / 4096) ** 2)
    yield Row(f"{peak}: torch tiles", OURS, ours[-1], "forward and backward, beyond the inputs")
    yield Row(f"{peak}: dense", target, dense[-1], f"{dense[-1] / ours[-1]:.0f}x ours")
    growth = f"growth of the peak, {lengths[0]} to {lengths[-1]} tokens"
    data = {"lengths": list(lengths), "flash": ours, "dense": dense}
    yield Row(f"{growth}: torch tiles", OUR_GROWTH, ours[-1] / ours[0], _listed(ours), data)
    yield Row(f"{growth}: dense", DENSE_GROWTH, dense[-1] / dense[0], _listed(dense))
    yield _largest_scores(lengths[-2:])


def _listed(peaks: list[float]) -> str:
    return "MB: " + ", ".join(f"{peak:.3g}" for peak in peaks)


def attend_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = flash_attention(q, k, v, mask=Mask(causal=True), backend="tiled")
    return out


def attend_dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as it is written in a few lines, with no matrix more than it takes."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores.masked_fill_(future, float("-inf"))
    weights = scores.softmax(-1)
    del scores
    return (weights @ v).transpose(1, 2)


def _peak(attend: Callable[..., Tensor], length: int) -> float:
    """Megabytes beyond q, k, v and the gradient of the output."""
    q, k, v, grad = _inputs(length, DIM)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> Any:
        return torch.autograd.grad(attend(*leaves), leaves, grad)

    return peak_mib(step) * _MB_PER_MIB


def _inputs(length: int, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    size = (1, length, 1, dim)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(4)]


def _largest_scores(lengths: tuple[int, ...]) -> Row:
    """The largest tensor with an axis of queries and one of keys, at two lengths."""
    largest = [_score_entries(length) for length in lengths]
    growth = largest[1] / largest[0] if largest[0] else math.nan
    name = f"growth of the largest score tensor, {lengths[0]} to {lengths[1]}"
    detail = "entries: {} and {}, forward and backward of the torch tiles".format(*largest)
    return Row(name, SAME, growth, detail)


def _score_entries(length: int) -> int:
    """Entries of the largest result, of any operator inside, with two axes that count tokens.

    One head and one sequence: such an axis is wider than row statistics and not the head dimension.
    """
    q, k, v, grad = _inputs(length, _UNLIKE_TILES)
    ready = prepare(q, k, v, mask=Mask(causal=True), backend="tiled")
    backend = load("tiled")
    with torch.no_grad(), _Watch() as watch:
        forward = backend.forward(*ready)
        backend.backward(
            grad, None, *ready[:3], forward.out, forward.saved, ready.call, mask_grad=False
        )
    return watch.largest


class _Watch(TorchDispatchMode):
    """Sees the result of every operator."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                axes = [size for size in x.shape if size > _NARROW and size != _UNLIKE_TILES]
                if len(axes) >= 2:
                    self.largest = max(self.largest, x.numel())
        return result
