"""Masks as torch's modules take them: True = hidden, or numbers to add to the scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TorchMasks(NamedTuple):
    """A mask of keys and one of pairs."""

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


def what_is_read(
    attn_mask: Tensor | None, is_causal: bool, need_weights: bool, packed: bool, rectangular: bool
) -> tuple[Tensor | None, bool]:
    """The ``attn_mask`` that decides, if any, and whether ``is_causal`` does.

    Args:
        packed, rectangular: of :class:`flashmod.layouts.Tokens`.
    """
    if need_weights and packed:
        raise ValueError("packed input has no rectangular weights: pass need_weights=False")
    if attn_mask is None:
        if is_causal and rectangular:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        return None, is_causal
    if is_causal and rectangular and not need_weights:
        return None, True
    return attn_mask, False
