"""What flash attention is compared with: padded dense attention, and torch's own SDPA.

Both take :func:`flashmod.flash_attention`'s arguments. Ragged input is padded to the longest
sequence, as code without ragged kernels has to, and unpadded afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import reference, rules
from .intercept import interceptable
from .padding import Padded, pad, unpad
from .patches import torch_sdpa
from .spec import HOST_NAMES, AttentionCall, Span, bind, on_ints, on_tensors

_BLOCK = 1 << 16  # pairs whose fate is worked out at once
_HIDDEN = float("-inf")
# The same rule with torch's own tanh, which autograd differentiates in one step.
_soft_cap = bind(
    {**HOST_NAMES, "tanh": torch.tanh}, functions={"soft_cap": rules.soft_cap}
).soft_cap


@interceptable("dense")
def dense(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
    """``softmax(Q K^T) V`` with every matrix materialised and differentiated by autograd.

    It computes in q's dtype, soft cap, biases and sink included.

    Args:
        q, k, v, kwargs: as for :func:`flashmod.flash_attention`; ``backend`` and ``tiles`` must be
            None, and ``return_stats`` False. The same ``dropout_seed`` drops the same weights.

    Returns:
        As ``flash_attention``; with ``return_lse`` also lse.
    """
    return_lse = _own_arguments("dense", kwargs)
    padded = pad(q, k, v, kwargs)
    call, hidden = padded.call, _hidden(padded)
    dead = None if hidden is None else hidden.all(-1, keepdim=True)
    keys, values = _keys_and_values(padded, hidden)
    scores = _logits(padded, keys, hidden, dead)
    lse = scores.logsumexp(-1) if return_lse else None
    weights = scores.softmax(-1)[..., : keys.shape[2]]  # a sink's share is in none of them
    del scores
    if call.dropout_seed is not None:
        weights = weights.masked_fill(_dropped(padded), 0.0)
    out = weights @ values
    if dead is not None:
        out = out.masked_fill(dead, 0.0)
        lse = None if lse is None else _lse_without_keys(lse, dead[..., 0], call.sink)
    out = unpad(out, padded, q)
    if call.dropout_seed is not None:
        out = out * _keep_scale(call, out)
    if lse is None:
        return out
    lse = lse[..., None].to(torch.promote_types(lse.dtype, torch.float32))
    return out, unpad(lse, padded, q, _HIDDEN)[..., 0].transpose(-1, -2)


@interceptable("sdpa")
def sdpa(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` on the padded batch.

    ``is_causal`` is used where it means the same, else a mask (N|1, H|1, max_q, max_k), boolean
    where nothing is added to the scores. Dropout is torch's own, drawn from the global generator.

    Args:
        q, k, v, kwargs: as for :func:`flashmod.flash_attention`; ``backend``, ``tiles`` and
            ``dropout_seed`` must be None, ``return_lse`` and ``return_stats`` False.
    Raises:
        ValueError: also for ``softcap``, ``learnable_sink`` and one dropout rate per token, which
            torch's SDPA has not.
    """
    if _own_arguments("sdpa", kwargs):
        raise ValueError("return_lse=True: torch's SDPA does not return lse; use dense or flash")
    _refuse_what_sdpa_lacks(kwargs)
    dropout_p = kwargs.pop("dropout_p", 0.0)
    padded = pad(q, k, v, kwargs)
    if not padded.q.numel() or not padded.k.numel():  # torch's CPU kernel crashes on empty axes
        keys, values = _keys_and_values(padded, None)
        return unpad(padded.q @ keys.mT @ values, padded, q)
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": padded.call.scale}
    hidden = dead = None
    if _is_top_left_causal(padded):
        options["is_causal"] = True
    else:
        hidden = _hidden(padded)
        dead = None if hidden is None else hidden.all(-1, keepdim=True)
        options["attn_mask"] = _sdpa_mask(padded, hidden, dead)
    keys, values = _keys_and_values(padded, hidden)
    out = torch_sdpa()(padded.q, keys, values, **options)
    return unpad(out if dead is None else out.masked_fill(dead, 0.0), padded, q)


def _own_arguments(name: str, kwargs: dict[str, Any]) -> bool:
    """Take out what only flash attention or only the caller reads; returns ``return_lse``."""
    for key in ("backend", "tiles"):
        if kwargs.pop(key, None) is not None:
            raise ValueError(f"{key} chooses how flash attention runs; baselines.{name} needs None")
    if kwargs.pop("return_stats", False):
        raise ValueError(f"return_stats=True: baselines.{name} has no tiles to count; use flash")
    return bool(kwargs.pop("return_lse", False))


def _refuse_what_sdpa_lacks(kwargs: dict[str, Any]) -> None:
    if kwargs.get("softcap"):
        raise ValueError(
            f"softcap={kwargs['softcap']}: torch's SDPA cannot cap scores; use dense or flash"
        )
    if kwargs.get("learnable_sink") is not None:
        raise ValueError("learnable_sink: torch's SDPA has no sink; use dense or flash")
    if isinstance(kwargs.get("dropout_p"), Tensor):
        raise ValueError(
            "dropout_p holds one rate per token, but torch's SDPA takes one number; use dense or "
            "flash"
        )
    if kwargs.get("dropout_seed") is not None:
        raise ValueError(
            "dropout_seed was given, but torch's SDPA draws from the global generator: "
            "leave it None and call torch.manual_seed"
        )


def _logits(padded: Padded, keys: Tensor, hidden: Tensor | None, dead: Tensor | None) -> Tensor:
    """(N, H, max_q, max_k), and one column more where there is a sink; -inf where hidden.

    Rows without any key hold zeros, so that nothing in them is NaN.
    """
    call, bias = padded.call, padded.bias()
    scores = (padded.q * call.scale) @ keys.mT
    if call.softcap:
        scores = _soft_cap(scores, call.softcap)
    if bias is not None:
        scores += bias
        del bias
    if hidden is not None and dead is not None:
        scores = scores.masked_fill_(hidden, _HIDDEN).masked_fill_(dead, 0.0)
    if call.sink is None:
        return scores
    sink = call.sink.to(scores.dtype)[..., None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], -1)


def _sdpa_mask(padded: Padded, hidden: Tensor | None, dead: Tensor | None) -> Tensor | None:
    """Everything but q, k and v, as SDPA's ``attn_mask``: a bias where there is one, else bool."""
    bias = padded.bias()
    if hidden is None or dead is None:
        return bias
    if bias is None:
        return ~hidden | dead
    return bias.masked_fill(hidden, _HIDDEN).masked_fill(dead, 0.0)


def hidden_shape(
    call: AttentionCall, sequences: list[Span], heads: int, q_len: int, kv_len: int
) -> tuple[int, int, int, int] | None:
    """(N|1, H|1, q_len, kv_len), what the mask of a padded batch takes; None: all see all."""
    kinds = {(s.limits, s.kv_len) for s in sequences}
    mask = call.attn_mask if hides(call.attn_mask) else None
    whole = all(
        (limits.q_len, keys) == (q_len, kv_len)
        and on_ints.full_key_range(0, q_len - 1, limits) == (0, kv_len)
        for limits, keys in kinds
    )
    if whole and mask is None and not call.mask_fn:
        return None
    own_heads = 1 if mask is None else mask.shape[1]
    alike = len(kinds) == 1 and (mask is None or mask.shape[0] == 1) and not call.mask_fn
    return 1 if alike else len(sequences), heads if call.mask_fn else own_heads, q_len, kv_len


def hides(mask: Tensor | None) -> bool:
    """Whether a mask may hide something: a bias does with -inf."""
    if mask is None or not mask.numel():
        return False
    return mask.dtype == torch.bool or bool(mask.detach().amin() == _HIDDEN)


def _hidden(padded: Padded) -> Tensor | None:
    """Bool of :func:`hidden_shape`: the pairs that do not see each other."""
    call, (_, heads, q_len, _), kv_len = padded.call, padded.q.shape, padded.k.shape[2]
    shape = hidden_shape(call, padded.spans, heads, q_len, kv_len)
    if shape is None:
        return None
    hidden = torch.ones(shape, dtype=torch.bool, device=padded.q.device)
    if not hides(call.attn_mask):  # nor does it decide over the shape
        padded = padded._replace(call=call._replace(attn_mask=None))
    return _unless(reference.visible, padded, hidden)


def _dropped(padded: Padded) -> Tensor:
    """(N, H, max_q, max_k) bool: the weights that dropout drops."""
    shape = (*padded.q.shape[:3], padded.k.shape[2])
    dropped = torch.zeros(shape, dtype=torch.bool, device=padded.q.device)
    return _unless(reference.kept, padded, dropped)


def _unless(rule: Callable[..., Tensor], padded: Padded, result: Tensor) -> Tensor:
    """``not rule`` of every pair, written into ``result`` a few rows at a time."""
    _, heads, _, kv_len = result.shape
    step = max(1, _BLOCK // max(1, heads * kv_len))
    for matrix, span in zip(result, padded.spans, strict=False):  # one matrix where all are alike
        for q_idx in torch.arange(span.limits.q_len, device=result.device).split(step):
            holds = rule(padded.call, span, heads, q_idx, span.kv_len)
            matrix[:, q_idx, : span.kv_len] = ~holds
    return result


def _is_top_left_causal(padded: Padded) -> bool:
    """Whether torch's ``is_causal`` on the padded batch shows every real query what it may see."""
    if padded.call.everywhere or padded.call.alibi_slopes is not None:
        return False
    for limits in {span.limits for span in padded.spans}:
        q_idx = torch.arange(limits.q_len)
        lo, hi = on_tensors.key_interval(q_idx, limits)
        if bool((lo != 0).any()) or not torch.equal(hi, q_idx + 1):
            return False
    return True


def _keep_scale(call: AttentionCall, out: Tensor) -> Any:
    """What makes up for dropped weights: a number, or one per token, broadcast to ``out``."""
    if call.dropout_thresholds is None:
        return on_ints.keep_scale(call.dropout_threshold)
    exact = torch.promote_types(out.dtype, torch.float32)
    scale = on_tensors.keep_scale(call.dropout_thresholds.to(exact))
    return scale.to(out.dtype).view(*out.shape[:-2], 1, 1)


def _lse_without_keys(lse: Tensor, dead: Tensor, sink: Tensor | None) -> Tensor:
    """The lse of rows that see no key is the sink, if there is one."""
    if sink is None:
        return lse.masked_fill(dead, _HIDDEN)
    return torch.where(dead, sink.to(lse.dtype)[..., None], lse)


def _keys_and_values(padded: Padded, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """(N, H, max_k, D), zero where the contents of a mask hide a key from every query."""
    keys, values = padded.k, padded.v
    group = padded.q.shape[1] // keys.shape[1] if keys.shape[1] else 1
    if group > 1:
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    if hidden is None or not padded.call.everywhere:
        return keys, values
    unseen = hidden.all(-2)[..., None]
    return keys.masked_fill(unseen, 0.0), values.masked_fill(unseen, 0.0)
