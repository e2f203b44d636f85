"""Fold the axis that ``torch.func.vmap`` maps over into the batch axis of a call, and back.

Every example keeps its sequence ids, so that it gets what a call of its own would give it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .spec import AttentionCall


class Example(NamedTuple):
    """What every example holds: batch rows (B), rows (B * S and B * S_kv) and sequences (N)."""

    batch: int
    q_rows: int
    kv_rows: int
    sequences: int


def map_forward(
    attend: Callable[..., Any], count: int, dims: Sequence[Any], inputs: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """``attend(q, k, v, *call)`` of all examples at once, as ``autograd.Function.vmap`` wants it.

    Args:
        count: the number of examples.
        dims: the mapped axis of every input, None where the examples share it.
    """
    _, operands, call = _fold_call(count, dims, inputs)
    out, lse, saved, *stats = attend(*operands, *call)
    outputs = (_unfold(out, count), _unfold(lse, count), _unfold(saved, count), *stats)
    return outputs, (0, 0, 0, None, None)


def map_backward(
    gradients: Callable[..., Any], count: int, dims: Sequence[Any], inputs: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """The same of ``gradients(grad_out, grad_lse, q, k, v, out, saved, mask_grad, *call)``."""
    grad_out, grad_lse, *qkv, out, saved, mask_grad = inputs[:8]
    own = ("attn_mask", "sink") if mask_grad else ("sink",)
    example, operands, call = _fold_call(
        count, (*dims[2:5], *dims[8:]), (*qkv, *inputs[8:]), own_gradients=own
    )
    dq, dk, dv, dmask, dsink = gradients(
        _fold(grad_out, dims[0], count),
        None if grad_lse is None else _fold(grad_lse, dims[1], count),
        *operands,
        _fold(out, dims[5], count),
        _fold(saved, dims[6], count).contiguous(),
        mask_grad,
        *call,
    )
    asked, mapped = AttentionCall(*inputs[8:]), _dims_of_call(dims[8:])
    mask = asked.attn_mask if mask_grad else None
    terms = (
        _unfold_term(dmask, count, example.sequences, mask, mapped.attn_mask),
        _unfold_term(dsink, count, example.batch, asked.sink, mapped.sink),
    )
    wanted = (0 if mask is not None else None, 0 if asked.sink is not None else None)
    return (*(_unfold(x, count) for x in (dq, dk, dv)), *terms), (0, 0, 0, *wanted)


def _fold_call(
    count: int, dims: Sequence[Any], inputs: Sequence[Any], own_gradients: Sequence[str] = ()
) -> tuple[Example, tuple[Tensor, ...], AttentionCall]:
    """q, k, v and the call with ``count`` times the batch rows and sequences.

    Args:
        inputs: q, k, v and the fields of an AttentionCall; ``dims`` likewise.
        own_gradients: terms that every example has a gradient of its own for: they are not shared.
    """
    call, mapped = AttentionCall(*inputs[3:]), _dims_of_call(dims[3:])
    _refuse(call, mapped)
    q, k, v = (_fold(x, dim, count) for x, dim in zip(inputs[:3], dims[:3], strict=True))
    batch, sequences = q.shape[0] // count, _example_size(call.q_starts, mapped.q_starts)
    example = Example(batch, batch * q.shape[1], batch * k.shape[1], sequences)
    first_rows = {"q_starts": example.q_rows, "kv_starts": example.kv_rows}
    broadcast = {"attn_mask": sequences, "alibi_slopes": sequences, "sink": batch}
    fields: dict[str, Any] = {}
    for name, x, dim in zip(call._fields, call, mapped, strict=True):
        if not isinstance(x, Tensor) or name == "dropout_seed":
            continue
        if name in broadcast:
            if dim is not None or x.shape[0] > 1 or name in own_gradients:
                x = _mapped(x, dim, count)
                fields[name] = x.expand(count, broadcast[name], *x.shape[2:]).flatten(0, 1)
        else:
            x = _fold(x, dim, count)
            fields[name] = _shift(x, count, first_rows[name]) if name in first_rows else x
    return example, (q, k, v), call._replace(**fields)


def _dims_of_call(dims: Sequence[Any]) -> Any:
    """Mapped axes under the names of the fields they belong to."""
    return AttentionCall(*dims)


def _refuse(call: AttentionCall, mapped: Any) -> None:
    if mapped.dropout_seed is not None:
        raise ValueError(
            "vmap gives every example a dropout seed of its own, but a call has one: share it "
            "(randomness='same', or in_dims=None for dropout_seed) and map over sequence_ids, "
            "which give every example dropout of its own"
        )
    if call.collect_stats:
        raise NotImplementedError(
            "return_stats cannot be mapped over: call flash_attention outside vmap"
        )


def _fold(x: Tensor, dim: int | None, count: int) -> Tensor:
    """Merge the mapped axis into the first axis of an example."""
    return _mapped(x, dim, count).flatten(0, 1)


def _unfold(x: Tensor, count: int) -> Tensor:
    """Undo :func:`_fold`."""
    return x.unflatten(0, (count, x.shape[0] // count))


def _unfold_term(
    grad: Tensor, count: int, parts: int, term: Tensor | None, dim: int | None
) -> Tensor:
    """Gradient (V, ...) of a term, of which an example holds ``parts`` entries or one for all."""
    if term is None:
        return grad
    grad = grad.unflatten(0, (count, parts))
    if _example_size(term, dim) == parts:
        return grad
    wide = torch.promote_types(grad.dtype, torch.float32)
    return grad.sum(1, keepdim=True, dtype=wide).to(grad.dtype)


def _mapped(x: Tensor, dim: int | None, count: int) -> Tensor:
    """The mapped axis first."""
    return x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)


def _example_size(x: Tensor, dim: int | None) -> int:
    """The size of an example's first axis."""
    return x.shape[1 if dim == 0 else 0]


def _shift(starts: Tensor, count: int, rows: int) -> Tensor:
    """Example ``v`` starts ``v * rows`` rows later."""
    first = torch.arange(count, dtype=starts.dtype, device=starts.device) * rows
    return (starts.unflatten(0, (count, starts.shape[0] // count)) + first[:, None]).flatten()
