"""What flash attention is compared with: padded dense attention, and torch's own SDPA.

Both take :func:`flashmod.flash_attention`'s arguments. Ragged input is padded to the longest
sequence, as code without ragged kernels has to, and unpadded afterwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .functional import prepare
from .intercept import interceptable
from .spec import AttentionCall, Span, check_contents, on_ints, on_tensors, spans

_DROPOUT_BLOCK = 1 << 18  # weights whose fate is worked out at once


class Padded(NamedTuple):
    """A call as one padded batch of N sequences; ``at`` places tokens in it."""

    q: Tensor  # (N, H, max_q, D)
    k: Tensor  # (N, H_kv, max_k, D), zero where no query may look
    v: Tensor  # (N, H_kv, max_k, D_v)
    q_rows: tuple[Tensor, Tensor] | None  # token rows, padded rows; None: they are the same
    spans: list[Span]
    call: AttentionCall


@interceptable("dense")
def dense(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
    """``softmax(Q K^T) V`` with every matrix materialised and differentiated by autograd.

    Args:
        q, k, v, kwargs: as for :func:`flashmod.flash_attention`; ``backend`` and ``tiles`` must be
            None. The same ``dropout_seed`` drops the same weights.

    Returns:
        As ``flash_attention``; with ``return_lse`` also lse.
    """
    return_lse = _own_arguments("dense", kwargs)
    padded = _pad(q, k, v, kwargs)
    hidden = _hidden(padded)
    dead = None if hidden is None else hidden.all(-1, keepdim=True)
    keys, values = _repeat_heads(padded)
    scores = (padded.q * padded.call.scale) @ keys.mT
    if hidden is not None and dead is not None:
        scores.masked_fill_(hidden & ~dead, float("-inf"))
    lse = scores.logsumexp(-1) if return_lse else None
    weights = scores.softmax(-1)
    del scores
    if padded.call.dropout_seed is not None:
        weights = weights * _kept(padded)
        values = values * padded.call.keep_scale
    out = weights @ values
    if dead is not None:
        out = out.masked_fill(dead, 0.0)
        lse = None if lse is None else lse.masked_fill(dead[..., 0], float("-inf"))
    out = _unpad(out, padded, q)
    if lse is None:
        return out
    lse = lse[..., None].to(torch.promote_types(lse.dtype, torch.float32))
    return out, _unpad(lse, padded, q, float("-inf"))[..., 0].transpose(-1, -2)


@interceptable("sdpa")
def sdpa(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` on the padded batch.

    ``is_causal`` is used where it means the same, else a boolean mask (N, 1, max_q, max_k).
    Dropout is torch's own, drawn from the global generator.

    Args:
        q, k, v, kwargs: as for :func:`flashmod.flash_attention`; ``backend``, ``tiles`` and
            ``dropout_seed`` must be None, and ``return_lse`` False.
    """
    if _own_arguments("sdpa", kwargs):
        raise ValueError("return_lse=True: torch's SDPA does not return lse; use dense or flash")
    if kwargs.get("dropout_seed") is not None:
        raise ValueError(
            "dropout_seed was given, but torch's SDPA draws from the global generator: "
            "leave it None and call torch.manual_seed"
        )
    dropout_p = kwargs.pop("dropout_p", 0.0)
    padded = _pad(q, k, v, kwargs)
    keys, values = _repeat_heads(padded)
    if not padded.q.numel() or not keys.numel():  # torch's CPU kernel crashes on empty axes
        return _unpad(padded.q @ keys.mT @ values, padded, q)
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": padded.call.scale}
    dead = None
    if _is_top_left_causal(padded):
        options["is_causal"] = True
    elif (hidden := _hidden(padded)) is not None:
        dead = hidden.all(-1, keepdim=True)
        options["attn_mask"] = ~hidden | dead
    out = F.scaled_dot_product_attention(padded.q, keys, values, **options)
    return _unpad(out if dead is None else out.masked_fill(dead, 0.0), padded, q)


def _own_arguments(name: str, kwargs: dict[str, Any]) -> bool:
    """Take out what only flash attention or only the caller reads; returns ``return_lse``."""
    for key in ("backend", "tiles"):
        if kwargs.pop(key, None) is not None:
            raise ValueError(f"{key} chooses how flash attention runs; baselines.{name} needs None")
    return bool(kwargs.pop("return_lse", False))


def _pad(q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> Padded:
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


def _unpad(x: Tensor, padded: Padded, q: Tensor, fill: float = 0.0) -> Tensor:
    """(N, H, max_q, E) -> q's layout with E last, ``fill`` where no sequence lies."""
    x = x.transpose(1, 2)
    if padded.q_rows is not None:
        source, target = padded.q_rows
        flat = x.new_full((q.shape[:-2].numel(), *x.shape[2:]), fill)
        x = flat.index_copy(0, source, x.flatten(0, 1).index_select(0, target))
    return x.reshape(*q.shape[:-1], x.shape[-1])


def _hidden(padded: Padded) -> Tensor | None:
    """(N|1, H|1, max_q, max_k) bool of the pairs that do not see each other; None: all do."""
    call, q_len, kv_len = padded.call, padded.q.shape[2], padded.k.shape[2]
    plain = call.key_mask is None and not call.mask_fn
    if plain and all(_sees_all(s, q_len, kv_len) for s in padded.spans):
        return None
    same = plain and all(s.limits == padded.spans[0].limits for s in padded.spans)
    sequences = padded.spans[:1] if same else padded.spans
    heads = padded.q.shape[1] if call.mask_fn else 1
    device = padded.q.device
    hidden = torch.ones(len(sequences), heads, q_len, kv_len, dtype=torch.bool, device=device)
    for matrix, span in zip(hidden, sequences, strict=True):
        q_idx = torch.arange(span.limits.q_len, device=device)
        seen = reference.visible(call, span, heads, q_idx, span.kv_len)
        torch.logical_not(seen, out=matrix[:, : span.limits.q_len, : span.kv_len])
    return hidden


def _sees_all(span: Span, q_len: int, kv_len: int) -> bool:
    everything = on_ints.full_key_range(0, q_len - 1, span.limits) == (0, kv_len)
    return everything and (span.limits.q_len, span.kv_len) == (q_len, kv_len)


def _is_top_left_causal(padded: Padded) -> bool:
    """Whether torch's ``is_causal`` on the padded batch shows every real query what it may see."""
    if padded.call.key_mask is not None or padded.call.mask_fn:
        return False
    for limits in {span.limits for span in padded.spans}:
        q_idx = torch.arange(limits.q_len)
        lo, hi = on_tensors.key_interval(q_idx, limits)
        if bool((lo != 0).any()) or not torch.equal(hi, q_idx + 1):
            return False
    return True


def _kept(padded: Padded) -> Tensor:
    """(N, H, max_q, max_k) bool: the weights that dropout keeps, a few rows at a time."""
    n, heads, q_len, _ = padded.q.shape
    kv_len = padded.k.shape[2]
    keep = torch.zeros(n, heads, q_len, kv_len, dtype=torch.bool, device=padded.q.device)
    step = max(1, _DROPOUT_BLOCK // max(1, heads * kv_len))
    for matrix, span in zip(keep, padded.spans, strict=True):
        for q_idx in torch.arange(span.limits.q_len, device=keep.device).split(step):
            kept = reference.kept(padded.call, span, heads, q_idx, span.kv_len)
            matrix[:, q_idx, : span.kv_len] = kept
    return keep


def _repeat_heads(padded: Padded) -> tuple[Tensor, Tensor]:
    group = padded.q.shape[1] // padded.k.shape[1]
    if group == 1:
        return padded.k, padded.v
    return padded.k.repeat_interleave(group, 1), padded.v.repeat_interleave(group, 1)
