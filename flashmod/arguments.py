"""From what a caller writes to one immutable call: operands, numbers and defaults."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .masks import Mask
from .operands import labels, narrow, pair_mask, sinks, slopes, thresholds
from .sequences import check_tensor, ids, place
from .spec import AttentionCall, TileConfig

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
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    dropout_p: float | Tensor = 0.0,
    dropout_seed: int | Tensor | None = None,
    sequence_ids: Tensor | None = None,
    return_lse: bool = False,
    return_stats: bool = False,
    backend: str | None = None,
    tiles: TileConfig | None = None,
) -> Prepared:
    """Check the arguments of :func:`flash_attention` and build its call, without running it."""
    mask = _mask(mask)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    q, k, v = _autocast(q, k, v)
    _check_operands(q, k, v, cu_seqlens_q)
    places = place(q, k, cu_seqlens_q, cu_seqlens_k, lengths_q, lengths_k)
    count = places.q_starts.shape[0]
    packed = cu_seqlens_q is not None
    if packed:
        q, k, v = q[None], k[None], v[None]
    pairs = pair_mask(attn_mask, q, k, count, packed)
    rates, rate = thresholds(dropout_p, q)
    q_labels, kv_labels = mask.labels or (None, None)
    call = AttentionCall(
        *places,
        sequence_ids=ids(sequence_ids, count, q.device),
        limits=narrow(mask.limits(count, q.device), pairs),
        attn_mask=pairs,
        sink=sinks(learnable_sink, q),
        alibi_slopes=slopes(alibi_slopes, q, count),
        q_labels=labels("labels of queries", q_labels, q),
        kv_labels=labels("labels of keys", kv_labels, k),
        dropout_seed=seed_tensor(dropout_seed, q.device) if rate or rates is not None else None,
        dropout_thresholds=rates,
        dropout_threshold=rate,
        align=int(mask.align == "bottom_right"),
        mask_fn=mask.fn_key,
        mask_args=tuple(mask.fn_args),
        scale=_scale(softmax_scale, q.shape[-1]),
        softcap=_softcap(softcap),
        backend=backend or "",
        tiles=_tiles(tiles),
        collect_stats=return_stats,
    )
    return Prepared(q, k, v, call)


def _mask(mask: Mask | None) -> Mask:
    if mask is None:
        return Mask()
    if not isinstance(mask, Mask):
        remedy = ": a boolean mask goes into attn_mask" if isinstance(mask, Tensor) else ""
        raise TypeError(f"mask must be a flashmod.Mask, got {type(mask).__name__}{remedy}")
    return mask


def _scale(softmax_scale: float | None, head_dim: int) -> float:
    if isinstance(softmax_scale, Tensor):
        raise TypeError("softmax_scale must be a number, got Tensor: it has no gradient")
    return float(softmax_scale) if softmax_scale is not None else 1 / math.sqrt(max(head_dim, 1))


def _softcap(softcap: float) -> float:
    if isinstance(softcap, Tensor):
        raise TypeError("softcap must be a number, got Tensor: it has no gradient")
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap must be 0 (off) or a positive number, got {softcap}")
    return float(softcap)


def _tiles(tiles: TileConfig | None) -> tuple[int, ...]:
    if tiles is None:
        return ()
    if not all(isinstance(size, int) for size in tiles):
        raise TypeError(f"tiles must hold integers, got {tiles}")
    if min(tiles) < 1:
        raise ValueError(f"tiles must hold numbers of 1 or more, got {tiles}")
    return tuple(tiles)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
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


def seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """0-d int64 on ``device``; drawn from torch's generator where None is given."""
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
