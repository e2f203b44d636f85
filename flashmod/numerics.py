"""How far an attention result is from the truth, and how far it may be. Tests and measurements
use the same functions.

``error = max|x - ref| / max(max|ref|, unit)`` against a float64 reference on the same rounded
inputs. ``unit`` is the size of what is summed, so that a result that cancels to nearly zero is not
judged by its own smallness.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

FP32_ERROR = 1e-5
FP64_ERROR = 1e-9
FP32_LOGIT = 50.0  # up to this largest logit fp32 owes FP32_ERROR; above, in proportion
_BLOCK_ELEMENTS = 1 << 22  # score entries held at once


class Results(NamedTuple):
    """An attention output and its gradients, all shaped like q, q, k and v."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Errors(NamedTuple):
    """One number per result: an error, an allowed error or a unit."""

    out: float
    dq: float
    dk: float
    dv: float

    def within(self, allowed: Errors) -> bool:
        """Whether every error is at most the allowed one; a NaN never is."""
        return all(error <= limit for error, limit in zip(self, allowed, strict=True))


def largest(x: Tensor) -> float:
    """max|x| over the finite entries, in float64; 0 when there is none."""
    x = x.detach()
    x = x[x.isfinite()]
    return x.abs().max().double().item() if x.numel() else 0.0


def error(x: Tensor, ref: Tensor, unit: float = 0.0) -> float:
    """``max|x - ref| / max(max|ref|, unit)``; equal infinities agree, NaN gives NaN.

    Args:
        x, ref: same shape; compared in float64 on the device of ``ref``.
        unit: smallest size that counts as the scale of ``ref``.

    Returns:
        0 for two equal tensors, inf when they differ and the scale is 0.
    """
    if x.shape != ref.shape:
        raise ValueError(f"shapes differ: x {tuple(x.shape)}, ref {tuple(ref.shape)}")
    if not x.numel():
        return 0.0
    ref = ref.detach().double()
    x = x.detach().to(ref.device).double()
    distance = torch.where(x == ref, 0.0, (x - ref).abs()).max().item()
    scale = max(largest(ref), unit)
    if distance == 0.0:
        return 0.0
    return distance / scale if scale else math.inf if distance == distance else math.nan


def largest_product(rows: Tensor, columns: Tensor) -> float:
    """Exact ``max |rows_i . columns_j|`` over all pairs and heads, in blocks of rows.

    Memory stays linear: no more than a few million products exist at a time.

    Args:
        rows: (R, H, D).
        columns: (K, H_kv, D); head ``h`` of ``rows`` meets head ``h // (H / H_kv)``.
    """
    if not rows.numel() or not columns.numel():
        return 0.0
    columns = columns.detach().transpose(0, 1).double()  # (H_kv, K, D)
    rows = rows.detach().unflatten(1, (columns.shape[0], -1)).double()  # (R, H_kv, G, D)
    step = max(1, _BLOCK_ELEMENTS // (rows.shape[1] * rows.shape[2] * columns.shape[1]))
    peaks = [
        largest(block.permute(1, 2, 0, 3).flatten(1, 2) @ columns.mT) for block in rows.split(step)
    ]
    return max(peaks)


def largest_logit(q: Tensor, k: Tensor, scale: float) -> float:
    """``scale * max|q . k|`` over all pairs of a sequence; layouts as in :func:`units`."""
    return abs(scale) * _largest_of_sequences(q, k)


def units(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, scale: float) -> Errors:
    """The unit of each result: the size of the terms that its sum is made of.

    out: max|v|; dv: max|dO|; dq: scale max|k| max|dP|; dk: scale max|q| max|dP|. ``dP = dO V^T``
    is searched exactly, in blocks of query rows, over every pair of a sequence (visible or not).

    Args:
        q, k, v, grad_out: (B, S, H, D), each batch row one sequence; or one (T, H, D) sequence.
            A packed batch given as one sequence counts pairs of different sequences too.
    """
    slope = abs(scale) * _largest_of_sequences(grad_out, v)
    return Errors(largest(v), slope * largest(k), slope * largest(q), largest(grad_out))


def _largest_of_sequences(rows: Tensor, columns: Tensor) -> float:
    if rows.dim() == 3:
        return largest_product(rows, columns)
    pairs = zip(rows, columns, strict=True)
    return max((largest_product(a, b) for a, b in pairs), default=0.0)


def attention_errors(results: Results, reference: Results, unit: Errors) -> Errors:
    """:func:`error` of each result. ``reference`` should be float64."""
    return Errors(*map(error, results, reference, unit))


def allowed_errors(
    dtype: torch.dtype,
    reference: Results,
    unit: Errors,
    *,
    logit: float = 0.0,
    dense: Results | None = None,
) -> Errors:
    """What :func:`attention_errors` may be at most.

    fp64: 1e-9. fp32: 1e-5 while logits stay under 50, above in proportion (fp32 scores are no
    better). fp16 and bf16: twice the error of dense torch in that dtype, plus ``2 eps unit``.

    Args:
        dtype: of the inputs.
        logit: the largest logit (:func:`largest_logit`), read for fp32.
        dense: results of dense torch in ``dtype``; needed for fp16 and bf16.
    """
    if dtype == torch.float64:
        return Errors(*[FP64_ERROR] * 4)
    if dtype == torch.float32:
        return Errors(*[FP32_ERROR * max(1.0, logit / FP32_LOGIT)] * 4)
    if dense is None:
        raise ValueError(f"the error allowed for {dtype} is relative to dense torch: give dense=")
    allowed = []
    for ref, own_unit, bound in zip(
        reference, unit, attention_errors(dense, reference, unit), strict=True
    ):
        scale = max(largest(ref), own_unit)
        rounding = 2 * torch.finfo(dtype).eps * own_unit / scale if scale else 0.0
        allowed.append(2 * bound + rounding)
    return Errors(*allowed)
