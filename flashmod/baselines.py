"""What flash attention is compared with: padded dense attention, and torch's own SDPA.

Both take :func:`flashmod.flash_attention`'s arguments. Ragged input is padded to the longest
sequence, as code without ragged kernels has to, and unpadded afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .intercept import interceptable
from .padding import Padded, pad, unpad
from .spec import AttentionCall, Span, on_ints, on_tensors

_DROPOUT_BLOCK = 1 << 16  # weights whose fate is worked out at once


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
    padded = pad(q, k, v, kwargs)
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
        weights = weights.masked_fill(_dropped(padded), 0.0)
        values = values * padded.call.keep_scale
    out = weights @ values
    if dead is not None:
        out = out.masked_fill(dead, 0.0)
        lse = None if lse is None else lse.masked_fill(dead[..., 0], float("-inf"))
    out = unpad(out, padded, q)
    if lse is None:
        return out
    lse = lse[..., None].to(torch.promote_types(lse.dtype, torch.float32))
    return out, unpad(lse, padded, q, float("-inf"))[..., 0].transpose(-1, -2)


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
    padded = pad(q, k, v, kwargs)
    keys, values = _repeat_heads(padded)
    if not padded.q.numel() or not keys.numel():  # torch's CPU kernel crashes on empty axes
        return unpad(padded.q @ keys.mT @ values, padded, q)
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": padded.call.scale}
    dead = None
    if _is_top_left_causal(padded):
        options["is_causal"] = True
    elif (hidden := _hidden(padded)) is not None:
        dead = hidden.all(-1, keepdim=True)
        options["attn_mask"] = ~hidden | dead
    out = F.scaled_dot_product_attention(padded.q, keys, values, **options)
    return unpad(out if dead is None else out.masked_fill(dead, 0.0), padded, q)


def _own_arguments(name: str, kwargs: dict[str, Any]) -> bool:
    """Take out what only flash attention or only the caller reads; returns ``return_lse``."""
    for key in ("backend", "tiles"):
        if kwargs.pop(key, None) is not None:
            raise ValueError(f"{key} chooses how flash attention runs; baselines.{name} needs None")
    return bool(kwargs.pop("return_lse", False))


def hidden_shape(
    call: AttentionCall, sequences: list[Span], heads: int, q_len: int, kv_len: int
) -> tuple[int, int, int, int] | None:
    """(N|1, H|1, q_len, kv_len), what the mask of a padded batch takes; None: all see all."""
    plain = call.key_mask is None and not call.mask_fn
    kinds = {(s.limits, s.kv_len) for s in sequences}
    whole = all(
        (limits.q_len, keys) == (q_len, kv_len)
        and on_ints.full_key_range(0, q_len - 1, limits) == (0, kv_len)
        for limits, keys in kinds
    )
    if plain and whole:
        return None
    count = 1 if plain and len(kinds) == 1 else len(sequences)
    return count, heads if call.mask_fn else 1, q_len, kv_len


def _hidden(padded: Padded) -> Tensor | None:
    """Bool of :func:`hidden_shape`: the pairs that do not see each other."""
    call, (_, heads, q_len, _), kv_len = padded.call, padded.q.shape, padded.k.shape[2]
    shape = hidden_shape(call, padded.spans, heads, q_len, kv_len)
    if shape is None:
        return None
    hidden = torch.ones(shape, dtype=torch.bool, device=padded.q.device)
    for matrix, span in zip(hidden, padded.spans, strict=False):
        q_idx = torch.arange(span.limits.q_len, device=hidden.device)
        seen = reference.visible(call, span, shape[1], q_idx, span.kv_len)
        torch.logical_not(seen, out=matrix[:, : span.limits.q_len, : span.kv_len])
    return hidden


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


def _dropped(padded: Padded) -> Tensor:
    """(N, H, max_q, max_k) bool: the weights that dropout drops, a few rows at a time."""
    shape = (*padded.q.shape[:3], padded.k.shape[2])
    dropped = torch.zeros(shape, dtype=torch.bool, device=padded.q.device)
    step = max(1, _DROPOUT_BLOCK // max(1, shape[1] * shape[3]))
    for matrix, span in zip(dropped, padded.spans, strict=True):
        for q_idx in torch.arange(span.limits.q_len, device=dropped.device).split(step):
            kept = reference.kept(padded.call, span, shape[1], q_idx, span.kv_len)
            matrix[:, q_idx, : span.kv_len] = ~kept
    return dropped


def _repeat_heads(padded: Padded) -> tuple[Tensor, Tensor]:
    group = padded.q.shape[1] // padded.k.shape[1]
    if group == 1:
        return padded.k, padded.v
    return padded.k.repeat_interleave(group, 1), padded.v.repeat_interleave(group, 1)
