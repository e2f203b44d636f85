"""Rotary positions (Su et al. 2021) for packed sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """Cosines and sines of one packed batch, each (T, 1, D / 2) float32."""

    cos: Tensor
    sin: Tensor


def positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """(T,) int64: the place of each row within its sequence, from 0.

    Args:
        cu_seqlens: (N + 1,) cumulative lengths. Rows past the last one count on from it.
        tokens: T.
    """
    rows = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, rows.to(cu_seqlens.dtype), right=True) - 1
    return rows - cu_seqlens[sequence]


def rotary(cu_seqlens: Tensor, tokens: int, head_dim: int, base: float) -> Rotary:
    """The rotation of each row: computed once for a forward pass and shared by its layers."""
    index = torch.arange(head_dim // 2, device=cu_seqlens.device, dtype=torch.float32)
    frequencies = base ** (-2.0 * index / head_dim)
    angles = positions(cu_seqlens, tokens).float()[:, None, None] * frequencies
    return Rotary(angles.cos(), angles.sin())


def rotate(x: Tensor, by: Rotary) -> Tensor:
    """Turn the pairs (i, i + D / 2) of ``x`` (T, H, D); computed in float32, or x's if wider."""
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    turned = (first * by.cos - second * by.sin, second * by.cos + first * by.sin)
    return torch.cat(turned, dim=-1).to(x.dtype)
