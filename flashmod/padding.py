"""One padded batch out of any layout, and back: what code without ragged kernels has to do."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from .contents import check_contents
from .functional import prepare
from .spec import AttentionCall, SequenceTerms, Span, spans


class Padded(NamedTuple):
    """A call as one padded batch of N sequences."""

    q: Tensor  # (N, H, max_q, D)
    k: Tensor  # (N, H_kv, max_k, D), zero beyond each sequence
    v: Tensor  # (N, H_kv, max_k, D_v)
    q_rows: tuple[Tensor, Tensor] | None  # token rows, padded rows; None: they are the same
    spans: list[Span]
    call: AttentionCall

    def bias(self) -> Tensor | None:
        """What is added to the scores, ALiBi and ``attn_mask``: (N|1, H|1, max_q|1, max_k)."""
        mask, slopes = self.call.attn_mask, self.call.alibi_slopes
        if slopes is None and (mask is None or mask.dtype == torch.bool):
            return None
        q_len, kv_len = self.q.shape[2], self.k.shape[2]
        terms = SequenceTerms(
            attn_mask=None if mask is None else mask[..., :q_len, :kv_len],
            sink=None,
            slopes=None if slopes is None else slopes[..., None, None],
            labels=(),
            thresholds=None,
        )
        alike = len({span.limits.shift for span in self.spans}) == 1
        limits = self.spans[0].limits if alike else reference.batch_limits(self.call)
        q_idx = torch.arange(q_len, device=self.q.device)
        return reference.add_terms(self.q.new_zeros(1, 1, 1, kv_len), terms, limits, q_idx)


def pad(q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> Padded:
    """Check flash attention's arguments and lay its call out as one padded batch."""
    q4, k4, v4, call = prepare(q, k, v, **kwargs)
    check_contents(call, q4, k4)
    sequences = spans(call, q4, k4)
    q_pad, q_rows = _padded(q4, [(s.q_batch, s.q_start, s.limits.q_len) for s in sequences])
    kv = [(s.kv_batch, s.kv_start, s.kv_len) for s in sequences]
    k_pad, _ = _padded(k4, kv)
    v_pad, _ = _padded(v4, kv)
    q_pad, k_pad, v_pad = (x.transpose(1, 2) for x in (q_pad, k_pad, v_pad))
    return Padded(q_pad, k_pad, v_pad, q_rows, sequences, call)


def _padded(
    x: Tensor, parts: list[tuple[int, int, int]]
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """(B, S, H, D) -> (N, longest, H, D), zero beyond each part."""
    batch, rows = x.shape[:2]
    if parts == [(b, 0, rows) for b in range(batch)]:
        return x, None
    longest = max((length for _, _, length in parts), default=0)
    tokens = [torch.arange(length) + b * rows + start for b, start, length in parts]
    places = [torch.arange(length) + n * longest for n, (_, _, length) in enumerate(parts)]
    source, target = (torch.cat([*t, torch.empty(0, dtype=torch.long)]) for t in (tokens, places))
    source, target = source.to(x.device), target.to(x.device)
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
