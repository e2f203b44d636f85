"""Where torch's modules put their tokens: input layouts and padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Tokens(NamedTuple):
    """Which rows of a batch are tokens; at most one field is given."""

    key_padding_mask: Tensor | None  # (N, S), or (S,) unbatched, see flashmod.torch_masks
    cu_seqlens: Tensor | None  # (N + 1,) int32
    lengths: Tensor | None  # (N,)
    cu_seqlens_k: Tensor | None = None  # (N + 1,) int32 of the keys, where they have their own

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    @property
    def rectangular(self) -> bool:
        """Whether every row of the batch is a token."""
        return all(field is None for field in self)

    def check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        num_heads: int,
        batch_first: bool,
    ) -> None:
        """Refuse what does not fit, with torch's own messages where torch has one."""
        if sum(field is not None for field in self[:3]) > 1:
            raise ValueError(
                "give one of key_padding_mask, cu_seqlens and lengths: each says where tokens are"
            )
        if self.packed or self.lengths is not None:
            name = "cu_seqlens" if self.packed else "lengths"
            given = getattr(self, name)
            if not isinstance(given, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(given).__name__}")
            if query.dim() != 3 - self.packed:
                layout = "packed (T, E)" if self.packed else "batched, 3-D"
                raise ValueError(f"{name} needs {layout} input, got shape {tuple(query.shape)}")
            own_keys = self.cu_seqlens_k is not None
            if not own_keys and not query.shape[:-1] == key.shape[:-1] == value.shape[:-1]:
                raise ValueError(
                    f"{name} describes self-attention, but query, key and value have shapes "
                    f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
                )
        else:
            shape_check = F._mha_shape_check  # type: ignore[attr-defined]
            shape_check(query, key, value, self.key_padding_mask, attn_mask, num_heads)
        if self.lengths is not None:
            batch = query.shape[not batch_first]
            if self.lengths.shape != (batch,):
                got = tuple(self.lengths.shape)
                raise ValueError(f"lengths must be ({batch},), one per sequence, got {got}")

    def without_slack(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """(..., L, E) with rows that are no token set to 0, in value and gradient.

        What lies there, NaN perhaps, must not reach the weight gradients.
        """
        rows = torch.arange(tensors[0].shape[-2], device=tensors[0].device)
        if self.cu_seqlens_k is not None:
            return tensors  # from NestedTensors, which have none
        if self.cu_seqlens is not None:
            valid = (rows < self.cu_seqlens[-1:])[:, None]
        elif self.lengths is not None:
            valid = (rows < self.lengths.to(rows.device)[:, None])[..., None]
        else:
            return tensors
        return each_once(lambda x: torch.where(valid, x, 0.0), *tensors)


def check_widths(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, kdim: int, vdim: int
) -> None:
    """Refuse feature dimensions that the projections do not take, as torch does."""
    if query.shape[-1] != embed_dim:
        raise AssertionError(
            f"was expecting embedding dimension of {embed_dim}, but got {query.shape[-1]}"
        )
    together = kdim == vdim == embed_dim
    if together and key.shape != value.shape:
        raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")
    if key.shape[:-1] != value.shape[:-1]:
        raise AssertionError(
            f"key's sequence and batch dims {key.shape[:-1]} do not match value's "
            f"{value.shape[:-1]}"
        )
    if (key.shape[-1], value.shape[-1]) != (kdim, vdim):
        kind = RuntimeError if together else AssertionError
        raise kind(
            f"was expecting key and value dimensions of {kdim} and {vdim}, "
            f"but got {key.shape[-1]} and {value.shape[-1]}"
        )


class Layout(NamedTuple):
    """One of torch's input layouts; the way to rows (N, L, E), or (T, E) packed, and back."""

    packed: bool
    batched: bool
    batch_first: bool

    @property
    def swapped(self) -> bool:
        return self.batched and not self.batch_first and not self.packed

    def enter(self, x: Tensor) -> Tensor:
        if self.swapped:
            return x.transpose(0, 1)
        return x if self.packed or self.batched else x[None]

    def enter_all(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return each_once(self.enter, *tensors)

    def leave(self, x: Tensor) -> Tensor:
        if self.swapped:
            return x.transpose(0, 1).contiguous()
        return x if self.packed or self.batched else x[0]

    def leave_weights(self, weights: Tensor | None) -> Tensor | None:
        return weights if weights is None or self.batched else weights[0]


def each_once(convert: Callable[[Tensor], Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert each; the same object stays the same object, so that one projection serves all."""
    # `is` rather than id(), on which torch.compile would guard: a new graph for every input.
    results: list[Tensor] = []
    for i, x in enumerate(tensors):
        twins = [results[j] for j in range(i) if tensors[j] is x]
        results.append(twins[0] if twins else convert(x))
    return tuple(results)
