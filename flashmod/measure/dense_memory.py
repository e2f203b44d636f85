"""Peak memory of one attention call, and of the same call as padded dense attention."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from ..baselines import hidden_shape
from ..functional import Prepared
from ..numerics import Results
from ..spec import spans
from .capture import Captured, Tensors
from .memory import MIB, peak_mib
from .room import available_bytes, dense_seconds_per_pair
from .routing import implementation

logger = logging.getLogger(__name__)
_QUICK_PAIRS = 1 << 24  # dense attention of so many pairs is never worth a prediction


class Peak(NamedTuple):
    """A peak in MiB, and whether it was worked out rather than measured."""

    mib: float
    predicted: bool


class DenseSize(NamedTuple):
    """What dense attention of one call takes, in bytes."""

    pairs: int  # query-key pairs of the padded batch, over all heads
    peak: int  # beyond the inputs, forward and backward
    saved: int  # held from the forward until the backward


def attention_peak(call: Captured, seed: int = 0) -> float:
    """Memory of the call alone, forward and backward, beyond its inputs, in MiB.

    It is repeated on detached leaves, with the gradient that its output received.
    """
    return metered_repeat(call, call.leaves(), call.output_grad(seed))[0]


def metered_repeat(call: Captured, leaves: Tensors, grad_out: Tensor) -> tuple[float, Results]:
    """:meth:`Captured.repeat`, and its peak in MiB beyond ``leaves`` and ``grad_out``."""
    results: list[Results] = []
    fn = lambda: results.append(call.repeat(leaves, grad_out))  # noqa: E731
    return peak_mib(fn, call.q.device), results[0]


def dense_attention_peak(call: Captured, time_limit_s: float = 10.0, seed: int = 0) -> Peak:
    """As :func:`attention_peak`, for :func:`flashmod.baselines.dense` on the same batch, padded.

    Measured where it fits into the memory there is and, roughly, into ``time_limit_s`` seconds;
    else the closed form of :func:`dense_size`.
    """
    size = dense_size(call.prepared())
    if not fits(size.pairs, size.peak, call.q.device, time_limit_s):
        return Peak(size.peak / MIB, predicted=True)
    kwargs = {**call.kwargs, "backend": None, "tiles": None}
    leaves, grad_out = call.leaves(), call.output_grad(seed)
    dense = implementation("dense")
    mib = peak_mib(lambda: call.repeat_with(dense, kwargs, leaves, grad_out), call.q.device)
    return Peak(mib, predicted=False)


def fits(pairs: int, peak_bytes: int, device: torch.device, time_limit_s: float) -> bool:
    """Whether dense attention over ``pairs`` may be run here; the log says why not.

    Args:
        peak_bytes: what it would allocate.
    """
    free = available_bytes(device)
    seconds = pairs * dense_seconds_per_pair(device) if pairs > _QUICK_PAIRS else 0.0
    if peak_bytes <= free and seconds <= time_limit_s:
        return True
    logger.info(
        "dense attention would take %.0f MiB (%.0f MiB are free) and about %.0f s (limit %.0f s): "
        "its peak is predicted, not measured",
        *(peak_bytes / MIB, free / MIB, seconds, time_limit_s),
    )
    return False


def dense_size(ready: Prepared) -> DenseSize:
    """Closed form of :func:`flashmod.baselines.dense`'s memory.

    The peak lies in the softmax's backward: weights, their gradient and the scores' gradient, all
    of N x H x max_q x max_k, and what a soft cap saved; beside them the mask, dropout's mask and
    what is linear in tokens. A bias, ALiBi and a sink add nothing to it. Within 4 % of a
    measurement while max_k is several times the head dimension; 12 % below it for ALiBi with
    one sequence of two heads in a half type, whose int32 distances are then wider.
    """
    q, k, _, call = ready
    sequences = spans(call, q, k)
    count, heads, width = len(sequences), q.shape[2], q.element_size()
    q_len = max((s.limits.q_len for s in sequences), default=0)
    kv_len = max((s.kv_len for s in sequences), default=0)
    pairs = count * heads * q_len * kv_len
    hidden = hidden_shape(call, sequences, heads, q_len, kv_len)
    masks = torch.Size(hidden).numel() if hidden is not None else 0
    dropout = call.dropout_seed is not None
    if dropout:
        masks += pairs
    # Scaled q, keys by head, out and dv of the padded batch; copies where weights drop.
    copies = 4 + 3 * dropout
    rows = copies * heads * count * max(q_len, kv_len)
    padding = any((s.limits.q_len, s.kv_len) != (q.shape[1], k.shape[1]) for s in sequences)
    if padding:  # tokens gathered from q, out, k and v
        rows += 2 * (heads + k.shape[2]) * sum(max(s.limits.q_len, s.kv_len) for s in sequences)
    linear = rows * q.shape[-1] * width
    matrix, capped = pairs * width, bool(call.softcap)
    saved = matrix * (1 + dropout + capped) + masks
    return DenseSize(pairs, matrix * (3 + capped) + masks + linear, saved)
