"""The custom ops of attention (fakes, the seed) and the autograd Function around them.

``flashmod::attention_forward`` and ``flashmod::attention_backward`` are opaque to the compiler, so
a model with them compiles without a graph break whatever backend runs. The Function, rather than
``register_autograd``, is what makes ``torch.func.grad`` work and forward-mode AD raise instead of
returning a silent zero.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .contents import check_contents
from .dispatch import choose_backend
from .flops import register_flops
from .spec import AttentionCall

_CALL_SCHEMA = (
    "Tensor q_starts, Tensor q_lengths, Tensor kv_starts, Tensor kv_lengths, Tensor sequence_ids, "
    "Tensor limits, Tensor? key_mask, Tensor? dropout_seed, int dropout_threshold, int align, "
    "str mask_fn, Scalar[] mask_args, "
    "float scale, str backend, int[] tiles"
)


@torch.library.custom_op(
    "flashmod::attention_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_CALL_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def attention_forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, S, H, D_v), lse (B, H, S) and saved row statistics (2, B, H, S) of one call."""
    request = AttentionCall(*call)
    check_contents(request, q, k)
    with _own_precision(q.device):
        return choose_backend(q, k, v, request).forward(q, k, v, request)


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty(batch, rows, heads, v.shape[-1])
    lse = q.new_empty(batch, heads, rows, dtype=accumulate)
    return out, lse, q.new_empty(2, batch, heads, rows, dtype=accumulate)


@torch.library.custom_op(
    "flashmod::attention_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, "
        f"Tensor stats, {_CALL_SCHEMA}) -> (Tensor, Tensor, Tensor)"
    ),
)
def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    *call: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of one call, contiguous, in the dtypes of q, k, v."""
    request = AttentionCall(*call)
    backend = choose_backend(q, k, v, request)
    with _own_precision(q.device):
        return backend.backward(grad_out, grad_lse, q, k, v, out, stats, request)


def _own_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast acts on what enters an op; inside, backends choose their precision themselves."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@attention_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op(
    "flashmod::seed",
    mutates_args=(),
    schema="(Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
def draw_seed(device: torch.device) -> Tensor:
    """A fresh 0-d int64 dropout seed, repeatable under ``torch.manual_seed``."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)


@draw_seed.register_fake
def _(device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        grad_out: Tensor,
        grad_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        stats: Tensor,
        call: Any,
    ) -> Any:
        return torch.ops.flashmod.attention_backward(grad_out, grad_lse, q, k, v, out, stats, *call)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "flash attention has no double backward: it keeps no attention matrix to differentiate "
            "twice; use flashmod.reference.dense_attention where second derivatives are needed"
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, q_lengths: Tensor, kv_starts: Tensor,
        kv_lengths: Tensor, sequence_ids: Tensor, limits: Tensor, key_mask: Tensor | None,
        dropout_seed: Tensor | None, dropout_threshold: int, align: int, mask_fn: str,
        mask_args: tuple[float, ...], scale: float, backend: str, tiles: tuple[int, ...],
    ) -> Any:  # fmt: skip
        # Not `*call`: where nothing requires grad, torch.compile tells by the number of parameters
        # whether the first one is a context.
        return torch.ops.flashmod.attention_forward(
            q, k, v, q_starts, q_lengths, kv_starts, kv_lengths, sequence_ids, limits, key_mask,
            dropout_seed, dropout_threshold, align, mask_fn, mask_args, scale, backend, tiles,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        out, _, stats = output
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        tensors = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        ctx.tensor_places = tensors
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(out, stats, *(inputs[i] for i in tensors))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> Any:
        out, stats, *tensors = ctx.saved_tensors
        inputs = list(ctx.numbers)
        for place, tensor in zip(ctx.tensor_places, tensors, strict=True):
            inputs[place] = tensor
        if grad_out is None and grad_lse is None:
            return (None,) * len(inputs)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        q, k, v, *call = inputs
        grads = _AttentionBackward.apply(grad_out, grad_lse, q, k, v, out, stats, tuple(call))
        return *grads, *(None for _ in call)


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Differentiable attention of one call: out (B, S, H, D_v) and lse (B, H, S).

    Double backward raises RuntimeError; forward-mode AD raises NotImplementedError.
    """
    out, lse, _ = _Attention.apply(q, k, v, *call)
    return out, lse


register_flops()
