"""NestedTensors as the input of a module: jagged ones, and the strided ones of torch's encoder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layouts import Tokens, each_once
from .nested import check_equal_offsets

_REFUSED = "MultiheadAttention does not support NestedTensor"


class NestedInput(NamedTuple):
    """Packed rows, and the way back.

    Attributes:
        rows: query, key and value, (T, E) each; the same object where they were.
        tokens: where their sequences lie.
        offsets: of a jagged query; None for a strided one.
    """

    rows: tuple[Tensor, ...]
    tokens: Tokens
    offsets: Tensor | None

    def nest(self, rows: Tensor) -> Tensor:
        """Rows (T, E) as a NestedTensor of the query's kind and lengths."""
        if self.offsets is not None:
            return torch.nested.nested_tensor_from_jagged(rows, offsets=self.offsets)
        assert self.tokens.cu_seqlens is not None
        sizes = self.tokens.cu_seqlens.diff().tolist()
        return torch.nested.as_nested_tensor(list(rows.split(sizes)))


def unnest(
    query: Tensor, key: Tensor, value: Tensor, tokens: Tokens, parameters: Iterable[Tensor]
) -> NestedInput | None:
    """Unpack NestedTensors (N, j, E); None where the input is none.

    Raises:
        AssertionError: as torch's, also for a strided one where a gradient is wanted.
    """
    inputs = (query, key, value)
    if not any(x.is_nested for x in inputs):
        return None
    if not all(x.is_nested for x in inputs):
        raise AssertionError(f"{_REFUSED} beside other tensors as query, key and value")
    if not tokens.rectangular:
        raise AssertionError(
            f"{_REFUSED} with key_padding_mask, cu_seqlens or lengths: it knows its lengths"
        )
    for x in inputs:
        if x.dim() != 3:
            raise AssertionError(
                "query should be unbatched 2D or batched 3D tensor but received "
                f"{x.dim()}-D query tensor"
            )
    if all(x.layout == torch.jagged for x in inputs):
        return _jagged(*inputs)
    if not (query is key is value):
        raise AssertionError(f"{_REFUSED} of layout torch.strided but for self-attention")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, *parameters)):
        raise AssertionError(
            f"{_REFUSED} outside of its fast path. A strided one has no gradient here, but grad is "
            "enabled and at least one of query or the input/output projection weights or biases "
            "requires_grad: build it with layout=torch.jagged"
        )
    return _strided(query)


def _jagged(query: Any, key: Any, value: Any) -> NestedInput:
    if key.offsets() is not value.offsets():
        check_equal_offsets(key.offsets(), value.offsets())
    ends = [x.offsets().int() for x in (query, key)]
    rows = each_once(lambda x: x.values(), query, key, value)
    return NestedInput(rows, Tokens(None, ends[0], None, ends[1]), query.offsets())


def _strided(x: Tensor) -> NestedInput:
    parts = x.unbind()
    ends = torch.tensor([0, *map(len, parts)]).cumsum(0).to(x.device, torch.int32)
    rows = torch.cat(parts)
    return NestedInput((rows, rows, rows), Tokens(None, ends, None, ends), None)
