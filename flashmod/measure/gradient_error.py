"""The error of an attention call's output and gradients against dense float64 attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..numerics import Errors, Results, attention_errors
from .capture import Captured, Tensors
from .oracle import Oracle


class GradientError(NamedTuple):
    """Errors as :mod:`flashmod.numerics` defines them, and the share of query rows checked."""

    errors: Errors
    coverage: float


def gradient_error(
    call: Captured,
    time_limit_s: float = 10.0,
    seed: int = 0,
    repeat: Callable[[Tensors, Tensor], Results] | None = None,
) -> GradientError:
    """Repeat the call and compare it with float64 attention on the same rounded inputs.

    When checking every query row would take more than ``time_limit_s`` seconds, a seeded sample of
    rows is checked: the output's gradient is zeroed elsewhere, for the call and for the reference,
    so that dq, dk and dv are exact. The share of rows is 1 or a power of 1/2.

    Args:
        repeat: ``call.repeat``, or something around it that measures more of the same run.

    Raises:
        ValueError: no exact reference exists for the call; says why.
    """
    if call.unknown is not None:
        raise ValueError(f"no exact reference exists for this attention call: {call.unknown}")
    if call.changed():
        raise ValueError(
            "q, k, v, a mask or a bias was overwritten in place after the attention call"
        )
    ready, grad_out = call.prepared(), call.output_grad(seed)
    oracle = Oracle(ready, grad_out.view(*ready.q.shape[:3], grad_out.shape[-1]))
    share = oracle.affordable_share(time_limit_s)
    chosen = oracle.sample(share, seed)
    checked = _row_mask(oracle, chosen)
    if share < 1:
        grad_out = torch.where(
            checked.view(*grad_out.shape[:-2], 1, 1).to(grad_out.device), grad_out, 0
        )
    repeated = (repeat or call.repeat)(call.leaves(), grad_out)
    expected, unit = oracle.run(chosen)
    found = Results(
        *(x.detach().cpu().view(y.shape) for x, y in zip(repeated, expected, strict=True))
    )
    if share < 1:
        found = found._replace(out=torch.where(checked, found.out, 0))
    rows = sum(map(len, chosen))
    return GradientError(attention_errors(found, expected, unit), rows / max(1, oracle.num_rows()))


def _row_mask(oracle: Oracle, chosen: list[Tensor]) -> Tensor:
    """(B, S, 1, 1) bool, True at the chosen rows."""
    mask = torch.zeros(*oracle.q.shape[:2], 1, 1, dtype=torch.bool)
    for span, rows in zip(oracle.spans, chosen, strict=True):
        mask[span.q_rows].index_fill_(0, rows, True)
    return mask
