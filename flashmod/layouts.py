"""Where torch's modules put their tokens: input layouts and padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Tokens(NamedTuple):
    """Which rows of a batch are tokens; at most one field is given."""

    key_padding_mask: Tensor | None  # (N, S), or (S,) unbatched, see TorchMasks
    cu_seqlens: Tensor | None  # (N + 1,) int32
    lengths: Tensor | None  # (N,)

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
        if query.is_nested:
            raise NotImplementedError(
                "NestedTensor input is not supported yet: build nn.TransformerEncoder with "
                "enable_nested_tensor=False"
            )
        if sum(field is not None for field in self) > 1:
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
            if not query.shape[:-1] == key.shape[:-1] == value.shape[:-1]:
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
        if self.cu_seqlens is not None:
            valid = (rows < self.cu_seqlens[-1:])[:, None]
        elif self.lengths is not None:
            valid = (rows < self.lengths.to(rows.device)[:, None])[..., None]
        else:
            return tensors
        return _each_once(lambda x: torch.where(valid, x, 0.0), *tensors)


class TorchMasks(NamedTuple):
    """Masks as torch's modules take them: bool, True = hidden, or numbers to add to the scores."""

    key_padding_mask: Tensor | None  # (N, S), or (S,) unbatched
    attn_mask: Tensor | None  # (L, S), or (N * H, L, S)

    def merged(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Both as flash attention's ``attn_mask``: bool, True = visible, or a bias.

        (N, 1, 1, S) for padding alone, (1, 1, L, S) or (N, H, L, S) for a mask of pairs, and their
        broadcast for both.

        Args:
            q, k: (N, L, H, D) and (N, S, H_kv, D), or without N when packed; a mask of pairs then
                goes by positions within a sequence.
        """
        masks = [m for m in (self._keys(k), self._pairs(q, k)) if m is not None]
        if len(masks) < 2:
            return masks[0] if masks else None
        keys, pairs = masks
        if keys.dtype == pairs.dtype == torch.bool:
            return keys & pairs
        if keys.dtype != torch.bool and pairs.dtype != torch.bool:
            return keys + pairs
        shown, bias = (keys, pairs) if keys.dtype == torch.bool else (pairs, keys)
        return torch.where(shown, bias, float("-inf"))

    def _keys(self, k: Tensor) -> Tensor | None:
        mask = self.key_padding_mask
        if mask is None:
            return None
        mask = _shown("key_padding_mask", mask).reshape(-1, mask.shape[-1])
        for axis in (0, 1):
            if mask.shape[axis] != k.shape[axis]:
                raise AssertionError(
                    f"Expected key_padded_mask.shape[{axis}] to be {k.shape[axis]}, "
                    f"but got {mask.shape[axis]}"
                )
        return mask[:, None, None]

    def _pairs(self, q: Tensor, k: Tensor) -> Tensor | None:
        mask = self.attn_mask
        if mask is None:
            return None
        shape, heads = tuple(mask.shape), q.shape[-2]
        wanted: tuple[int | str, ...]
        if q.dim() == 4:
            sizes = (q.shape[1], k.shape[1])
            wanted = sizes if mask.dim() == 2 else (q.shape[0] * heads, *sizes)
            good = shape == wanted
        else:
            wanted = (f"N * {heads}", "longest", "longest")[3 - mask.dim() :]
            good = mask.dim() == 2 or (mask.dim() == 3 and shape[0] % heads == 0)
        if not good:
            raise RuntimeError(
                f"The shape of the {mask.dim()}D attn_mask is {shape}, but should be {wanted}."
            )
        mask = _shown("attn_mask", mask)
        return mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (-1, heads))


def _shown(name: str, mask: Tensor) -> Tensor:
    """torch's mask with True = visible."""
    if mask.dtype == torch.bool:
        return torch.logical_not(mask)
    if not mask.is_floating_point():
        raise AssertionError(f"only bool and floating types of {name} are supported")
    return mask


def check_widths(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, kdim: int, vdim: int
) -> None:
    """Refuse feature dimensions that the projections do not take, as torch does."""
    if query.shape[-1] != embed_dim:
        raise AssertionError(
            f"was expecting embedding dimension of {embed_dim}, but got {query.shape[-1]}"
        )
    if key.shape[:-1] != value.shape[:-1]:
        raise AssertionError(
            f"key's sequence and batch dims {tuple(key.shape[:-1])} do not match value's "
            f"{tuple(value.shape[:-1])}"
        )
    if (key.shape[-1], value.shape[-1]) != (kdim, vdim):
        raise AssertionError(
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
        return _each_once(self.enter, *tensors)

    def leave(self, x: Tensor) -> Tensor:
        if self.swapped:
            return x.transpose(0, 1).contiguous()
        return x if self.packed or self.batched else x[0]

    def leave_weights(self, weights: Tensor | None) -> Tensor | None:
        return weights if weights is None or self.batched else weights[0]


def _each_once(convert: Callable[[Tensor], Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert each; the same object stays the same object, so that one projection serves all."""
    # `is` rather than id(), on which torch.compile would guard: a new graph for every input.
    results: list[Tensor] = []
    for i, x in enumerate(tensors):
        twins = [results[j] for j in range(i) if tensors[j] is x]
        results.append(twins[0] if twins else convert(x))
    return tuple(results)
