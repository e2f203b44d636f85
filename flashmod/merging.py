"""Join attention over parts of the keys."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_attention(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the attention over each, exactly.

    Differentiable through outputs and lse; associative up to rounding, so that any number of parts
    can be joined. A learned sink must be in one part only.

    Args:
        out1, out2: (B, S, H, D_v) or (T, H, D_v).
        lse1, lse2: (B, H, S) or (H, T), -inf where a part has no key.
    Returns:
        out and lse in the same shapes; 0 and -inf where neither part has a key.
    """
    if out1.shape != out2.shape or lse1.shape != lse2.shape:
        raise ValueError(
            f"parts must have equal shapes, got out {tuple(out1.shape)} and {tuple(out2.shape)}, "
            f"lse {tuple(lse1.shape)} and {tuple(lse2.shape)}"
        )
    rows = lse1.transpose(-1, -2).shape
    if rows != out1.shape[:-1]:
        raise ValueError(
            f"lse must have one entry per query and head of out, got {tuple(lse1.shape)} for "
            f"{tuple(out1.shape)}: (B, H, S) for (B, S, H, D_v), (H, T) for (T, H, D_v)"
        )
    none = float("-inf")
    dead1, dead2 = lse1 == none, lse2 == none
    # Selected before the arithmetic: -inf - -inf has no value, and its gradient none either.
    a = torch.where(dead1, torch.where(dead2, 0.0, lse2), lse1)
    b = torch.where(dead2, a, lse2)
    share2 = torch.where(dead2, 0.0, torch.where(dead1, 1.0, torch.sigmoid(b - a)))
    share1 = torch.where(dead1, 0.0, torch.where(dead2, 1.0, torch.sigmoid(a - b)))
    both = torch.logaddexp(a, b)
    lse = torch.where(dead1, lse2, torch.where(dead2, lse1, both))
    accumulate = torch.promote_types(out1.dtype, lse.dtype)
    part1, part2 = (
        share.transpose(-1, -2)[..., None] * x.to(accumulate)
        for share, x in ((share1, out1), (share2, out2))
    )
    return (part1 + part2).to(out1.dtype), lse
