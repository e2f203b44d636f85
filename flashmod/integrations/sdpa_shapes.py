"""From (..., H, S, D) operands that broadcast to (B, S, H, D), and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Operands(NamedTuple):
    """Query, key and value of at least four axes that fit together.

    Batch axes are expanded, without copies; key and value share a head count that divides query's.
    """

    q: Tensor  # (*batch, H, L, D)
    k: Tensor  # (*batch, H_kv, S, D)
    v: Tensor  # (*batch, H_kv, S, D_v)
    dims: int  # of the result, as the caller sees it
    like: Tensor  # query as it was given, whose memory order the result takes

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> Operands:
        """
        Raises:
            RuntimeError: they do not fit.
        """
        _check_sizes(q, k, v)
        dims, like = max(q.dim(), k.dim(), v.dim()), q
        if grouped and min(q.dim(), k.dim(), v.dim()) < 3:
            raise RuntimeError(f"enable_gqa=True needs a head axis, got {_shapes(q, k, v)}")
        q, k, v = (_lead(x, max(dims, 4)) for x in (q, k, v))
        heads = _group(q, k, v) if grouped else _share(q, k, v)
        batch = _broadcast("batch axes", *(x.shape[:-3] for x in heads))
        q, k, v = (x.expand(*batch, *x.shape[-3:]) for x in heads)
        return cls(q, k, v, dims, like)

    def attend(self, mask: Tensor | None, attention: Attention) -> Tensor:
        """``attention`` of (B, S, H, D) operands and a mask of four axes; (..., H, L, D_v)."""
        if mask is not None:
            mask = self._check_mask(mask)
        out = _attend(self.q, self.k, self.v, mask, attention)
        out = out.reshape(out.shape[out.dim() - self.dims :])
        return out if _rows_first(self.like) and self.dims > 3 else out.contiguous()

    def _check_mask(self, mask: Tensor) -> Tensor:
        scores = (*self.q.shape[:-1], self.k.shape[-2])
        fits = 2 <= mask.dim() <= self.dims and all(
            size in (1, whole) for size, whole in zip(mask.shape[::-1], scores[::-1], strict=False)
        )
        if not fits:
            raise RuntimeError(
                f"attn_mask must have two axes or more and broadcast to "
                f"{scores[len(scores) - self.dims :]}, got {tuple(mask.shape)}"
            )
        mask = _lead(mask, len(scores))
        if not mask.requires_grad:  # an expanded axis holds one entry
            for axis, stride in enumerate(mask.stride()):
                if stride == 0 and mask.shape[axis] > 1:
                    mask = mask.narrow(axis, 0, 1)
        return mask


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attention: Attention) -> Tensor:
    batch = q.shape[:-3]
    if mask is not None and _mixed(mask.shape[:-3], batch):
        # Joined batch axes would need the mask written out: one call for each part of the first.
        masks = mask.expand(batch[0], *mask.shape[1:])
        parts = zip(q, k, v, masks, strict=True)
        return torch.stack([_attend(*part, attention) for part in parts])
    rows = [x.flatten(0, -4).transpose(1, 2) for x in (q, k, v)]
    out = attention(rows[0], rows[1], rows[2], None if mask is None else mask.flatten(0, -4))
    return out.transpose(1, 2).reshape(*q.shape[:-1], v.shape[-1])


def _mixed(mask: Size, batch: Size) -> bool:
    """Whether a mask has some of the batch axes, but not all."""
    own = [size for size, whole in zip(mask, batch, strict=True) if whole != 1]
    return 0 not in batch and 1 in own and max(own) > 1


def _rows_first(x: Tensor) -> bool:
    """Whether (..., H, S, D) lies in memory as (..., S, H, D)."""
    return x.dim() > 3 and not x.is_contiguous() and x.transpose(-3, -2).is_contiguous()


def _check_sizes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if min(q.dim(), k.dim(), v.dim()) < 2:
        raise RuntimeError(f"query, key and value need two axes or more, got {_shapes(q, k, v)}")
    if q.shape[-1] != k.shape[-1]:
        raise RuntimeError(
            f"query and key must share the last axis, got {q.shape[-1]} and {k.shape[-1]}"
        )
    if k.shape[-2] != v.shape[-2]:
        raise RuntimeError(
            f"key and value must have the same length, got {k.shape[-2]} and {v.shape[-2]}"
        )


def _group(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Grouped heads; key and value with different head counts are repeated to a common one."""
    heads, k_heads, v_heads = (x.shape[-3] for x in (q, k, v))
    if any(heads % one if one else heads for one in (k_heads, v_heads)):
        raise RuntimeError(
            "Number of heads in key and value must divide the number of heads in query, got "
            f"{k_heads}, {v_heads} and {heads}"
        )
    common = math.lcm(k_heads, v_heads)
    if k_heads != v_heads:
        k, v = (x.repeat_interleave(common // x.shape[-3], -3) for x in (k, v))
    return q, k, v


def _share(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads that broadcast; one head of key and value serves all of query's as it is."""
    (heads,) = _broadcast("head axes", *(x.shape[-3:-2] for x in (q, k, v)))
    own = 1 if k.shape[-3] == v.shape[-3] == 1 else heads
    counts = ((q, heads), (k, own), (v, own))
    q, k, v = (x.expand(*x.shape[:-3], n, *x.shape[-2:]) for x, n in counts)
    return q, k, v


def _broadcast(name: str, *shapes: Any) -> Size:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError as error:
        raise RuntimeError(
            f"the {name} of query, key and value do not broadcast: "
            f"{', '.join(str(tuple(x)) for x in shapes)}; fewer key heads need enable_gqa=True"
        ) from error


def _lead(x: Tensor, dims: int) -> Tensor:
    return x[(None,) * (dims - x.dim())]


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors)
