"""Jagged NestedTensors: their values are packed tokens, their offsets the sequences' ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def takes_jagged(fn: F) -> F:
    """Let ``fn(q, k, v, **kwargs)`` on packed tokens also take jagged NestedTensors (B, j, H, D).

    The output is jagged with q's offsets; whatever else ``fn`` returns stays packed.
    """

    @functools.wraps(fn)
    def wrapper(q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
        if not any(map(_is_nested, (q, k, v, *kwargs.values()))):
            return fn(q, k, v, **kwargs)
        result = fn(*_values(q, k, v), **{**kwargs, **_sequences(q, k, v, kwargs)})
        out, *rest = result if isinstance(result, tuple) else (result,)
        if isinstance(out, Tensor):
            out = torch.nested.nested_tensor_from_jagged(out, offsets=q.offsets())
        return (out, *rest) if rest else out

    return wrapper  # type: ignore[return-value]


def _is_nested(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_nested


def _values(q: Any, k: Any, v: Any) -> list[Tensor]:
    """(T, H, D) each."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not _is_nested(x):
            raise TypeError(f"q, k and v must all be jagged NestedTensors or none, {name} is not")
        if x.layout != torch.jagged:
            raise NotImplementedError(
                f"{name} is a NestedTensor of layout {x.layout}: build it with "
                "layout=torch.jagged, or pass torch.nested.to_padded_tensor(x, 0.0) and lengths"
            )
        if x.dim() != 4 or x._ragged_idx != 1:
            shape = ", ".join(map(str, x.shape))
            raise ValueError(f"{name} must be (B, j, H, D), got ({shape}): call transpose(1, 2)")
        if x.lengths() is not None:
            raise NotImplementedError(
                f"{name} has holes between its sequences: call {name}.contiguous()"
            )
    return [x.values() for x in (q, k, v)]


def _sequences(q: Any, k: Any, v: Any, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    for name, x in kwargs.items():
        if x is not None and name.startswith(("cu_seqlens", "lengths")):
            raise ValueError(
                f"{name} was given, but NestedTensors know their lengths: leave it out"
            )
        if _is_nested(x):
            raise TypeError(f"{name} must not be a NestedTensor: pass its values()")
    keys, values = k.offsets(), v.offsets()
    if keys is not values:
        check_equal_offsets(keys, values)
    return {"cu_seqlens_q": q.offsets().int(), "cu_seqlens_k": keys.int()}


def check_equal_offsets(keys: Tensor, values: Tensor) -> None:
    """Refuse keys and values that are not sequences of the same lengths."""
    message = "k and v must hold sequences of equal lengths, but their offsets differ"
    if keys.shape != values.shape:
        raise ValueError(f"k holds {len(keys) - 1} sequences, v {len(values) - 1}")
    same = (keys == values).all()
    if keys.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(same, message)
    elif not same:
        raise ValueError(f"{message}: {keys.tolist()} and {values.tolist()}")
