"""What a call takes beside q, k and v: masks and biases, slopes, sinks, labels, dropout rates."""

from __future__ import annotations

import torch
from torch import Tensor

from .sequences import check_tensor
from .spec import DROPOUT_STEPS, FIRST_KEY


def pair_mask(
    attn_mask: Tensor | None, q: Tensor, k: Tensor, count: int, packed: bool
) -> Tensor | None:
    """``attn_mask`` as (N|1, H|1, Q|1, K|1), broadcast axes of size 1; bool, or a bias to add.

    Args:
        q, k: (B, S, H, D) and (B, S_kv, H_kv, D); B = 1 when packed.
        count: N.
        packed: Q and K are then the longest lengths, or more, which only the contents can tell.
    """
    if attn_mask is None:
        return None
    check_tensor("attn_mask", attn_mask)
    _check_device("attn_mask", attn_mask, q)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(
            f"attn_mask must be bool (True = visible) or a floating-point bias, got "
            f"{attn_mask.dtype}"
        )
    shape = tuple(attn_mask.shape)
    mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + shape)
    wanted = (count, q.shape[2], *((None, None) if packed else (q.shape[1], k.shape[1])))
    axes = zip(mask.shape, wanted, strict=False)
    if mask.dim() > 4 or any(size != 1 and one not in (None, size) for size, one in axes):
        goal = "(N, H, longest, longest)" if packed else "(B, H, S, S_kv)"
        numbers = ", ".join("any" if one is None else str(one) for one in wanted)
        raise ValueError(f"attn_mask must broadcast to {goal}, here ({numbers}), got {shape}")
    if not _requires_grad(mask):  # an expanded axis holds one entry: its gradient would not
        for axis in range(4):
            if mask.stride(axis) == 0 and mask.shape[axis] > 1:
                mask = mask.narrow(axis, 0, 1)
    return mask


def narrow(limits: Tensor, mask: Tensor | None) -> Tensor:
    """Key intervals cut to the first and last key that a key-wise mask shows.

    Padding is then not visited, and no value has to reach the host.

    Args:
        limits: (N, 5).
        mask: (N|1, H|1, Q|1, K|1).
    """
    if mask is None or mask.shape[1:3] != (1, 1) or mask.shape[3] < 2:
        return limits
    keys = mask.detach()[:, 0, 0]
    seen = keys if keys.dtype == torch.bool else keys != float("-inf")
    key = torch.arange(seen.shape[1], dtype=torch.int32, device=seen.device)
    first = torch.where(seen, key, seen.shape[1]).amin(1)
    end = torch.where(seen, key + 1, 0).amax(1)
    ends = torch.stack([first, end], 1).expand(limits.shape[0], 2)
    return torch.cat([limits[:, :FIRST_KEY], ends.to(limits.dtype)], 1)


def per_head(name: str, x: Tensor | None, q: Tensor, count: int) -> Tensor | None:
    """(H,) or (N, H) numbers as (N|1, H)."""
    if x is None:
        return None
    check_tensor(name, x)
    _check_device(name, x, q)
    heads = q.shape[-2]
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating-point, got {x.dtype}")
    rows = x[None] if x.dim() == 1 else x
    if rows.dim() != 2 or rows.shape[1] != heads or rows.shape[0] not in (1, count):
        raise ValueError(f"{name} must be ({heads},) or ({count}, {heads}), got {tuple(x.shape)}")
    return rows


def slopes(alibi_slopes: Tensor | None, q: Tensor, count: int) -> Tensor | None:
    """ALiBi slopes (N|1, H) in the accumulation dtype."""
    rows = per_head("alibi_slopes", alibi_slopes, q, count)
    if rows is None:
        return None
    if _requires_grad(rows):
        raise ValueError("alibi_slopes has no gradient: pass alibi_slopes.detach()")
    return rows.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def sinks(learnable_sink: Tensor | None, q: Tensor) -> Tensor | None:
    """(1, H): the same logit for every sequence."""
    if learnable_sink is None:
        return None
    check_tensor("learnable_sink", learnable_sink)
    if learnable_sink.dim() != 1:
        raise ValueError(
            f"learnable_sink must be ({q.shape[-2]},), got {tuple(learnable_sink.shape)}"
        )
    return per_head("learnable_sink", learnable_sink, q, 1)


def labels(name: str, x: Tensor | None, tokens: Tensor) -> Tensor | None:
    """(B, S) int32 labels of the rows of ``tokens`` (B, S, H, D)."""
    if x is None:
        return None
    check_tensor(name, x)
    _check_device(name, x, tokens)
    if x.is_floating_point() or x.is_complex():
        raise TypeError(f"{name} must hold integers, got {x.dtype}")
    narrow = _per_row(name, x, tokens).to(torch.int32)
    if x.dtype == torch.int64:
        _check_fits(name, x)
    return narrow.contiguous()


def _check_fits(name: str, x: Tensor) -> None:
    """Labels are int32: two that differ by 2**32 would count as the same."""
    if not torch.compiler.is_compiling():
        while torch._C._functorch.is_functorch_wrapped_tensor(x):  # in torch.func's transforms
            x = torch._C._functorch.get_unwrapped(x)
    fits = (x == x.to(torch.int32)).all()
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(fits, f"{name} must fit into int32")
    elif not fits:
        raise ValueError(
            f"{name} must fit into int32, got values from {int(x.min())} to {int(x.max())}: "
            "number them anew, e.g. by torch.unique(..., return_inverse=True)"
        )


def thresholds(dropout_p: float | Tensor, q: Tensor) -> tuple[Tensor | None, int]:
    """16-bit dropout thresholds: (B, S) int32 for one rate per query token, else one number.

    Only p = 1 drops everything.
    """
    if not isinstance(dropout_p, Tensor):
        return None, dropout_threshold(dropout_p)
    _check_device("dropout_p", dropout_p, q)
    if not dropout_p.is_floating_point():
        raise TypeError(f"dropout_p must hold floating-point rates, got {dropout_p.dtype}")
    if _requires_grad(dropout_p):
        raise ValueError("dropout_p has no gradient: pass dropout_p.detach()")
    p = _per_row("dropout_p", dropout_p, q).double()
    steps = (p * DROPOUT_STEPS).round().clamp(max=DROPOUT_STEPS - 1)
    steps = torch.where(p == 1, DROPOUT_STEPS, steps)
    # A rate that is none leaves the range of thresholds, for the check of contents to find.
    bad = torch.logical_not((p >= 0) & (p <= 1))
    return torch.where(bad, -1, steps).to(torch.int32).contiguous(), 0


def dropout_threshold(p: float) -> int:
    """The 16-bit threshold below which a weight is dropped; only p = 1 drops everything."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout_p must lie between 0 and 1, got {p}")
    return DROPOUT_STEPS if p == 1 else min(round(p * DROPOUT_STEPS), DROPOUT_STEPS - 1)


def _per_row(name: str, x: Tensor, tokens: Tensor) -> Tensor:
    """One number per token; packed tokens have a batch axis of 1 that ``x`` may lack."""
    shape = tokens.shape[:2]
    if (
        x.dim() not in (1, 2)
        or x.shape[-1] != shape[1]
        or x.shape[:-1] not in ((), (1,), shape[:1])
    ):
        wanted = f"({shape[1]},)" if shape[0] == 1 else f"({shape[0]}, {shape[1]})"
        raise ValueError(f"{name} must be {wanted}, one per token, got {tuple(x.shape)}")
    return x.expand(shape)


def _requires_grad(x: Tensor) -> bool:
    """Also inside ``torch.func.vmap``, where a tensor does not tell."""
    if not torch.compiler.is_compiling():
        while torch._C._functorch.is_batchedtensor(x):
            x = torch._C._functorch.get_unwrapped(x)
    return x.requires_grad


def _check_device(name: str, x: Tensor, like: Tensor) -> None:
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, q, k and v are on {like.device}")
