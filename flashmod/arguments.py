"""From what a caller writes to one immutable call: shapes, dtypes, layouts and defaults."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .masks import Mask
from .spec import DROPOUT_STEPS, END_KEY, FIRST_KEY, AttentionCall, TileConfig

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Prepared(NamedTuple):
    """The arguments of :mod:`flashmod.ops`: 4-D tensors (packed input has B = 1) and the call."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: AttentionCall


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    attn_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lengths_q: Tensor | None = None,
    lengths_k: Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    sequence_ids: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    tiles: TileConfig | None = None,
) -> Prepared:
    """Check the arguments of :func:`flash_attention` and build its call, without running it."""
    mask = Mask() if mask is None else mask
    q, k, v = _autocast(q, k, v)
    _check_operands(q, k, v, cu_seqlens_q)
    if cu_seqlens_q is not None:
        if lengths_q is not None or lengths_k is not None:
            raise ValueError(
                "lengths_q and lengths_k describe padded input; cu_seqlens_q was given as well"
            )
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        q_starts, q_lengths = _packed("cu_seqlens_q", cu_seqlens_q, q)
        kv_starts, kv_lengths = _packed("cu_seqlens_k", cu_seqlens_k, k)
        q, k, v = q[None], k[None], v[None]
    else:
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k was given without cu_seqlens_q: pack both q and k")
        q_starts, q_lengths = _padded("lengths_q", lengths_q, q)
        kv_starts, kv_lengths = _padded("lengths_k", lengths_k, k)
    count = q_starts.shape[0]
    if kv_starts.shape[0] != count:
        raise ValueError(
            f"cu_seqlens_q describes {count} sequences, cu_seqlens_k {kv_starts.shape[0]}"
        )
    threshold = dropout_threshold(dropout_p)
    key_mask = _key_mask(attn_mask, k, packed=cu_seqlens_q is not None)
    call = AttentionCall(
        q_starts=q_starts,
        q_lengths=q_lengths,
        kv_starts=kv_starts,
        kv_lengths=kv_lengths,
        sequence_ids=_sequence_ids(sequence_ids, count, q.device),
        limits=_narrow(mask.limits(count, q.device), key_mask),
        key_mask=key_mask,
        dropout_seed=_seed(dropout_seed, q.device) if threshold else None,
        dropout_threshold=threshold,
        align=int(mask.align == "bottom_right"),
        mask_fn=mask.fn_key,
        mask_args=tuple(mask.fn_args),
        scale=_scale(softmax_scale, q.shape[-1]),
        backend=backend or "",
        tiles=_tiles(tiles),
    )
    return Prepared(q, k, v, call)


def dropout_threshold(p: float) -> int:
    """The 16-bit threshold below which a weight is dropped; only p = 1 drops everything."""
    if isinstance(p, Tensor):
        raise NotImplementedError(
            "dropout_p as a tensor (one rate per token) is not supported yet: give one number"
        )
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout_p must lie between 0 and 1, got {p}")
    return DROPOUT_STEPS if p == 1 else min(round(p * DROPOUT_STEPS), DROPOUT_STEPS - 1)


def _scale(softmax_scale: float | None, head_dim: int) -> float:
    if isinstance(softmax_scale, Tensor):
        raise TypeError("softmax_scale must be a number, got Tensor: it has no gradient")
    return float(softmax_scale) if softmax_scale is not None else 1 / math.sqrt(max(head_dim, 1))


def _tiles(tiles: TileConfig | None) -> tuple[int, ...]:
    if tiles is not None and min(tiles) < 1:
        raise ValueError(f"tiles must hold numbers of 1 or more, got {tiles}")
    return () if tiles is None else tuple(tiles)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def _check_operands(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> None:
    dims = 4 if cu_seqlens is None else 3
    layout = "(B, S, H, D)" if cu_seqlens is None else "(T, H, D) with cu_seqlens_q"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != dims:
            raise ValueError(f"{name} must be {layout}, got shape {tuple(x.shape)}")
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(
                f"q, k and v must share a dtype, got {q.dtype} for q and {x.dtype} for {name}"
            )
        if x.device != q.device:
            raise ValueError(
                f"q, k and v must share a device, got {q.device} for q and {x.device} for {name}"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k and v must agree but for the last axis, got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if dims == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch size {q.shape[0]}, k has {k.shape[0]}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head dimension {q.shape[-1]}, k has {k.shape[-1]}")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"the number of key heads must divide that of query heads, got {kv_heads} and {heads}"
        )


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def _packed(name: str, cu_seqlens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    _check_tensor(name, cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name} must be (N + 1,), got shape {tuple(cu_seqlens.shape)}")
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {cu_seqlens.dtype}: call .to(torch.int32)")
    if cu_seqlens.device != x.device:
        raise ValueError(f"{name} is on {cu_seqlens.device}, the tokens are on {x.device}")
    return cu_seqlens[:-1], cu_seqlens.diff()


def _padded(name: str, lengths: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    batch, rows = x.shape[:2]
    starts = torch.arange(batch, dtype=torch.int32, device=x.device) * rows
    if lengths is None:
        return starts, torch.full((batch,), rows, dtype=torch.int32, device=x.device)
    _check_tensor(name, lengths)
    if lengths.shape != (batch,):
        raise ValueError(
            f"{name} must be ({batch},), one length per batch row, got {tuple(lengths.shape)}"
        )
    if lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {lengths.dtype}")
    return starts, lengths.to(device=x.device, dtype=torch.int32)


def _sequence_ids(sequence_ids: Tensor | None, count: int, device: torch.device) -> Tensor:
    if sequence_ids is None:
        return torch.arange(count, dtype=torch.int32, device=device)
    _check_tensor("sequence_ids", sequence_ids)
    if sequence_ids.shape != (count,):
        raise ValueError(
            f"sequence_ids must be ({count},), one per sequence, got {tuple(sequence_ids.shape)}"
        )
    return sequence_ids.to(device=device, dtype=torch.int32)


def _key_mask(attn_mask: Tensor | None, k: Tensor, *, packed: bool) -> Tensor | None:
    if attn_mask is None:
        return None
    _check_tensor("attn_mask", attn_mask)
    if packed:
        raise NotImplementedError(
            "attn_mask for packed input is not supported yet: describe it with mask=Mask(...)"
        )
    if attn_mask.dtype != torch.bool or attn_mask.dim() != 4 or attn_mask.shape[1:3] != (1, 1):
        raise NotImplementedError(
            f"attn_mask of dtype {attn_mask.dtype} and shape {tuple(attn_mask.shape)} is not "
            "supported yet: give a bool key-padding mask "
            f"({k.shape[0]}, 1, 1, {k.shape[1]}), True = visible, or describe it with "
            "mask=Mask(...)"
        )
    if attn_mask.shape[0] not in (1, k.shape[0]) or attn_mask.shape[3] != k.shape[1]:
        raise ValueError(
            f"attn_mask has shape {tuple(attn_mask.shape)}, but k needs "
            f"({k.shape[0]}, 1, 1, {k.shape[1]})"
        )
    return attn_mask[:, 0, 0].expand(k.shape[0], -1)


def _narrow(limits: Tensor, key_mask: Tensor | None) -> Tensor:
    """Narrow key intervals to the first and last visible key, so that padding is not visited."""
    if key_mask is None or key_mask.shape[1] == 0:
        return limits
    key = torch.arange(key_mask.shape[1], dtype=torch.int32, device=key_mask.device)
    limits[:, FIRST_KEY] = torch.where(key_mask, key, key_mask.shape[1]).amin(1)
    limits[:, END_KEY] = torch.where(key_mask, key + 1, 0).amax(1)
    return limits


def _seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    if seed is None:
        return torch.ops.flashmod.seed(device)
    if isinstance(seed, float):
        raise TypeError(f"dropout_seed must be an int or a 0-d int64 tensor, got {seed}")
    if not isinstance(seed, Tensor):
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"dropout_seed must fit into 64 bits, got {seed}")
        return torch.full((), seed, dtype=torch.int64, device=device)
    if seed.dim() != 0 or seed.dtype != torch.int64:
        raise TypeError(
            "dropout_seed must be an int or a 0-d int64 tensor, got "
            f"{seed.dtype} of shape {tuple(seed.shape)}"
        )
    return seed.to(device)
