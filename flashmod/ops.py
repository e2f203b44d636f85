"""The custom ops of attention (fakes, the seed) and the autograd Function around them.

``flashmod::attention_forward`` and ``flashmod::attention_backward`` are opaque to the compiler, so
a model with them compiles without a graph break whatever backend runs. The Function, rather than
``register_autograd``, is what makes ``torch.func.grad`` work and forward-mode AD raise instead of
returning a silent zero.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .contents import check_contents
from .dispatch import choose_backend
from .flops import register_flops
from .folding import map_backward, map_forward
from .spec import AttentionCall, Forward

_CALL_SCHEMA = (
    "Tensor q_starts, Tensor q_lengths, Tensor kv_starts, Tensor kv_lengths, Tensor sequence_ids, "
    "Tensor limits, Tensor? attn_mask, Tensor? sink, Tensor? alibi_slopes, Tensor? q_labels, "
    "Tensor? kv_labels, Tensor? dropout_seed, Tensor? dropout_thresholds, int dropout_threshold, "
    "int align, str mask_fn, Scalar[] mask_args, float scale, float softcap, str backend, "
    "int[] tiles, bool collect_stats"
)


@torch.library.custom_op(
    "flashmod::attention_forward",
    mutates_args=(),
    schema=(
        f"(Tensor q, Tensor k, Tensor v, {_CALL_SCHEMA}) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def attention_forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, ...]:
    """The fields of :class:`flashmod.spec.Forward`; statistics that nobody wants are empty."""
    request = AttentionCall(*call)
    check_contents(request, q, k)
    with _own_precision(q.device):
        forward = choose_backend(q, k, v, request).forward(q, k, v, request)
    return tuple(q.new_empty(0) if x is None else x for x in forward)


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, ...]:
    if AttentionCall(*call).collect_stats:
        raise NotImplementedError(
            "return_stats: the number of tiles depends on the lengths' values, which a compiled "
            "graph does not have; call flash_attention outside torch.compile"
        )
    batch, rows, heads, _ = q.shape
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty(batch, rows, heads, v.shape[-1])
    lse = q.new_empty(batch, heads, rows, dtype=accumulate)
    saved = q.new_empty(batch, heads, 2, rows, dtype=accumulate)
    return out, lse, saved, q.new_empty(0), q.new_empty(0)


@torch.library.custom_op(
    "flashmod::attention_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, "
        f"Tensor saved, bool mask_grad, {_CALL_SCHEMA}) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    saved: Tensor,
    mask_grad: bool,
    *call: Any,
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, attn_mask and sink, contiguous, in their dtypes; else empty.

    Args:
        mask_grad: whether the gradient of ``attn_mask`` is wanted, which is work of its own.
    """
    request = AttentionCall(*call)
    backend = choose_backend(q, k, v, request)
    with _own_precision(q.device):
        grads = backend.backward(grad_out, grad_lse, q, k, v, out, saved, request, mask_grad)
    if grads.sink is not None and request.sink is not None:
        sink = grads.sink if request.sink.shape[0] != 1 else grads.sink.sum(0, keepdim=True)
        grads = grads._replace(sink=sink.to(request.sink.dtype))
    return tuple(q.new_empty(0) if x is None else x for x in grads)


def _own_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast acts on what enters an op; inside, backends choose their precision themselves."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@attention_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    _, _, mask_grad, *call = rest
    request = AttentionCall(*call)
    wanted = (q, k, v, request.attn_mask if mask_grad else None, request.sink)
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)


@torch.library.custom_op(
    "flashmod::seed",
    mutates_args=(),
    schema="(Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
def draw_seed(device: torch.device) -> Tensor:
    """A fresh 0-d int64 dropout seed, repeatable under ``torch.manual_seed``."""
    return _draw(device)


def _draw(device: torch.device) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)


@draw_seed.register_fake
def _(device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


# Without it vmap would not see that a random number is drawn: this one obeys its `randomness`.
torch.library.impl("flashmod::seed", "FuncTorchVmapMode")(_draw)


def _spelled_out(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``*call`` its fields in the signature.

    Where nothing requires grad, torch.compile tells by the number of parameters whether the first
    one is a context.
    """
    own = list(inspect.signature(forward).parameters.values())[:-1]
    fields = [inspect.Parameter(x, own[0].kind) for x in AttentionCall._fields]
    forward.__signature__ = inspect.Signature([*own, *fields])  # type: ignore[attr-defined]
    return forward


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    @_spelled_out
    def forward(
        grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        saved: Tensor, mask_grad: bool, *call: Any,
    ) -> Any:  # fmt: skip
        return torch.ops.flashmod.attention_backward(
            grad_out, grad_lse, q, k, v, out, saved, mask_grad, *call
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "flash attention has no double backward: it keeps no attention matrix to differentiate "
            "twice; use flashmod.reference.dense_attention where second derivatives are needed"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return map_backward(_AttentionBackward.apply, info.batch_size, in_dims, inputs)


class _Attention(torch.autograd.Function):
    @staticmethod
    @_spelled_out
    def forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> Any:
        return torch.ops.flashmod.attention_forward(q, k, v, *call)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        out, _, *saved = output
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        tensors = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        ctx.tensor_places = tensors
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(out, saved[0], *(inputs[i] for i in tensors))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *unused: None) -> Any:
        out, saved, *tensors = ctx.saved_tensors
        inputs = list(ctx.numbers)
        for place, tensor in zip(ctx.tensor_places, tensors, strict=True):
            inputs[place] = tensor
        if grad_out is None and grad_lse is None:
            return (None,) * len(inputs)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        mask_grad = ctx.needs_input_grad[_ATTN_MASK]
        dq, dk, dv, dmask, dsink = _AttentionBackward.apply(
            grad_out, grad_lse, *inputs[:3], out, saved, mask_grad, *inputs[3:]
        )
        grads = [dq, dk, dv, *(None for _ in inputs[3:])]
        if mask_grad:
            grads[_ATTN_MASK] = dmask
        if inputs[_SINK] is not None:
            grads[_SINK] = dsink
        return tuple(grads)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return map_forward(_Attention.apply, info.batch_size, in_dims, inputs)


# Where they stand among the inputs of _Attention.
_ATTN_MASK, _SINK = (3 + AttentionCall._fields.index(name) for name in ("attn_mask", "sink"))


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Forward:
    """Attention of one call; out (B, S, H, D_v) and lse (B, H, S) are differentiable.

    Double backward raises RuntimeError; forward-mode AD raises NotImplementedError.
    """
    out, lse, saved, *stats = _Attention.apply(q, k, v, *call)
    return Forward(out, lse, saved, *(stats if call.collect_stats else ()))


register_flops()
