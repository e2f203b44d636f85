"""Keys that every query sees beside those of the input: ``add_bias_kv`` and ``add_zero_attn``."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .spec import on_tensors


class ExtraKeys(NamedTuple):
    """X keys without position, which no mask hides.

    They join attention after the fact, through its ``lse``: no mask has to be extended for them,
    and packed sequences stay as they are.

    Attributes:
        keys, values: (X, H, D).
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def of(
        cls, bias_k: Tensor | None, bias_v: Tensor | None, zero: bool, q: Tensor
    ) -> ExtraKeys | None:
        """Those of a module, if it has any.

        Args:
            bias_k, bias_v: (1, 1, H_kv * D). q: (..., H, D).
        """
        if (bias_k is None) != (bias_v is None):
            missing = "bias_v" if bias_v is None else "bias_k"
            raise AssertionError(f"bias_k and bias_v go together, but {missing} is None")
        heads, head_dim = q.shape[-2:]
        rows = []
        for bias in (bias_k, bias_v):
            own = [] if bias is None else [bias.reshape(1, -1, head_dim)]
            own = [x.repeat_interleave(heads // x.shape[1], 1) for x in own]
            rows.append(own + [q.new_zeros(1, heads, head_dim)] * zero)
        return cls(*map(torch.cat, rows)) if rows[0] else None

    def shares(self, q: Tensor, lse: Tensor, softcap: float) -> Tensor:
        """How each query's weight is shared out: (..., H, L, 1 + X), first all keys of the input.

        Args:
            q: (..., L, H, D). lse: (..., H, L), of the keys of the input.
        """
        scores = torch.einsum("...lhd,xhd->...hlx", q.to(lse.dtype), self.keys.to(lse.dtype))
        scores = scores / math.sqrt(q.shape[-1])
        if softcap:
            scores = on_tensors.soft_cap(scores, softcap)
        return torch.cat([lse[..., None], scores], -1).softmax(-1)

    def append(
        self, shares: Tensor, out: Tensor, weights: Tensor | None, dropout_p: float
    ) -> tuple[Tensor, Tensor | None]:
        """Attention to the keys of the input, and its weights, with the extra keys last.

        Args:
            out: (..., L, H, D). weights: (..., H, L, S).
        """
        rest, own = shares[..., :1], F.dropout(shares[..., 1:], dropout_p)
        own_out = torch.einsum("...hlx,xhd->...lhd", own, self.values.to(own.dtype))
        joined = (rest.transpose(-3, -2) * out + own_out).to(out.dtype)
        if weights is None:
            return joined, None
        return joined, torch.cat([weights * rest, own], -1).to(weights.dtype)
