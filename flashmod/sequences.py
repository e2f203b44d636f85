"""Which rows of the operands are sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_INT32_MAX = torch.iinfo(torch.int32).max


class Places(NamedTuple):
    """First row, of the flattened (B*S) row axis, and length of every sequence: (N,) int32."""

    q_starts: Tensor
    q_lengths: Tensor
    kv_starts: Tensor
    kv_lengths: Tensor


def place(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    lengths_q: Tensor | None,
    lengths_k: Tensor | None,
) -> Places:
    """Where sequences lie: packed if ``cu_seqlens_q`` is given, else one in every batch row.

    Args:
        q, k: (T, H, D) packed, else (B, S, H, D).
    """
    if cu_seqlens_q is None:
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k was given without cu_seqlens_q: pack both q and k")
        return Places(*_padded("lengths_q", lengths_q, q), *_padded("lengths_k", lengths_k, k))
    if lengths_q is not None or lengths_k is not None:
        raise ValueError(
            "lengths_q and lengths_k describe padded input; cu_seqlens_q was given as well"
        )
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    q_side = _packed("cu_seqlens_q", cu_seqlens_q, q)
    kv_side = _packed("cu_seqlens_k", cu_seqlens_k, k)
    count, kv_count = q_side[0].shape[0], kv_side[0].shape[0]
    if count != kv_count:
        raise ValueError(f"cu_seqlens_q describes {count} sequences, cu_seqlens_k {kv_count}")
    return Places(*q_side, *kv_side)


def _packed(name: str, cu_seqlens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    check_tensor(name, cu_seqlens)
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
    check_tensor(name, lengths)
    if lengths.shape != (batch,):
        raise ValueError(
            f"{name} must be ({batch},), one length per batch row, got {tuple(lengths.shape)}"
        )
    _check_integers(name, lengths)
    lengths = lengths.to(x.device).long().clamp(-_INT32_MAX, _INT32_MAX)
    return starts, lengths.int()


def ids(sequence_ids: Tensor | None, count: int, device: torch.device) -> Tensor:
    """(N,) int32, 0..N-1 unless given."""
    if sequence_ids is None:
        return torch.arange(count, dtype=torch.int32, device=device)
    check_tensor("sequence_ids", sequence_ids)
    if sequence_ids.shape != (count,):
        raise ValueError(
            f"sequence_ids must be ({count},), one per sequence, got {tuple(sequence_ids.shape)}"
        )
    _check_integers("sequence_ids", sequence_ids)
    return sequence_ids.to(device=device, dtype=torch.int32)


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def _check_integers(name: str, x: Tensor) -> None:
    if x.is_floating_point() or x.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {x.dtype}")
