"""One padded batch out of any layout, and back: what code without ragged kernels has to do."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contents import check_contents
from .functional import prepare
from .spec import AttentionCall, Span, spans


class Padded(NamedTuple):
    """A call as one padded batch of N sequences."""

    q: Tensor  # (N, H, max_q, D)
    k: Tensor  # (N, H_kv, max_k, D), zero where no query may look
    v: Tensor  # (N, H_kv, max_k, D_v)
    q_rows: tuple[Tensor, Tensor] | None  # token rows, padded rows; None: they are the same
    spans: list[Span]
    call: AttentionCall


def pad(q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> Padded:
    """Check flash attention's arguments and lay its call out as one padded batch."""
    q4, k4, v4, call = prepare(q, k, v, **kwargs)
    check_contents(call, q4, k4)
    sequences = spans(call, q4, k4)
    q_pad, q_rows = _padded(q4, [(s.q_batch, s.q_start, s.limits.q_len) for s in sequences], None)
    kv = [(s.kv_batch, s.kv_start, s.kv_len) for s in sequences]
    k_pad, _ = _padded(k4, kv, call.key_mask)
    v_pad, _ = _padded(v4, kv, call.key_mask)
    q_pad, k_pad, v_pad = (x.transpose(1, 2) for x in (q_pad, k_pad, v_pad))
    return Padded(q_pad, k_pad, v_pad, q_rows, sequences, call)


def _padded(
    x: Tensor, parts: list[tuple[int, int, int]], mask: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """(B, S, H, D) -> (N, longest, H, D), zero beyond each part and where ``mask`` is False."""
    batch, rows = x.shape[:2]
    if mask is None and parts == [(b, 0, rows) for b in range(batch)]:
        return x, None
    longest = max((length for _, _, length in parts), default=0)
    tokens = [torch.arange(length) + b * rows + start for b, start, length in parts]
    places = [torch.arange(length) + n * longest for n, (_, _, length) in enumerate(parts)]
    source, target = (torch.cat([*t, torch.empty(0, dtype=torch.long)]) for t in (tokens, places))
    source, target = source.to(x.device), target.to(x.device)
    if mask is not None:
        keep = mask.flatten()[source]
        source, target = source[keep], target[keep]
    flat = x.new_zeros(len(parts) * longest, *x.shape[2:])
    flat = flat.index_copy(0, target, x.flatten(0, 1).index_select(0, source))
    return flat.unflatten(0, (len(parts), longest)), (source, target)


def unpad(x: Tensor, padded: Padded, q: Tensor, fill: float = 0.0) -> Tensor:
    """(N, H, max_q, E) -> q's layout with E last, ``fill`` where no sequence lies."""
    x = x.transpose(1, 2)
    if padded.q_rows is not None:
        source, target = padded.q_rows
        flat = x.new_full((q.shape[:-2].numel(), *x.shape[2:]), fill)
        x = flat.index_copy(0, source, x.flatten(0, 1).index_select(0, target))
    return x.reshape(*q.shape[:-1], x.shape[-1])
