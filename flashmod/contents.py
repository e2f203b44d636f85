"""Checks of what only the values of a call can tell."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .spec import AttentionCall

_MORE = " (FLASHMOD_VALIDATE=1 says which)"


class _Check(NamedTuple):
    """What must hold, in short, and the error that names the values when it does not."""

    good: Tensor
    rule: str
    raise_bad: Callable[[Tensor], None]


def check_contents(call: AttentionCall, q: Tensor, k: Tensor) -> None:
    """Check what only the values can tell: sequences inside the buffers, limits, rates, masks.

    On a CPU a ValueError names both numbers. On a device ``torch._assert_async`` stops the stream
    without a synchronisation, unless ``FLASHMOD_VALIDATE=1`` asks for the full message.
    """
    on_host = q.device.type == "cpu" or os.environ.get("FLASHMOD_VALIDATE") == "1"
    for check in _checks(call, q, k):
        if not on_host:
            torch._assert_async(check.good.all(), check.rule + _MORE)
        elif not bool(check.good.all()):
            check.raise_bad(check.good)


def _checks(call: AttentionCall, q: Tensor, k: Tensor) -> list[_Check]:
    checks = [
        _inside("q", call.q_starts, call.q_lengths, q),
        _inside("k", call.kv_starts, call.kv_lengths, k),
        _Check(call.limits >= 0, "mask limits must be 0 or more", lambda _: _bad_limits(call)),
    ]
    if call.dropout_thresholds is not None:
        good = call.dropout_thresholds >= 0
        checks.append(_Check(good, "dropout_p must lie between 0 and 1", _bad_rate))
    if call.attn_mask is not None:
        sides = ((2, "queries", call.q_lengths), (3, "keys", call.kv_lengths))
        for axis, name, lengths in sides:
            if call.attn_mask.shape[axis] > 1:
                checks.append(_covers(call.attn_mask.shape[axis], name, lengths))
    return checks


def _inside(name: str, starts: Tensor, lengths: Tensor, x: Tensor) -> _Check:
    rows = x.shape[1]
    end = torch.where(lengths > 0, starts % max(rows, 1) + lengths, 0)
    good = (lengths >= 0) & (starts >= 0) & (starts <= x.shape[0] * rows) & (end <= rows)
    good[:1] &= starts[:1] == 0
    return _Check(
        good,
        f"sequences of {name} lie outside its buffer",
        lambda good: _bad_sequence(name, starts.long(), lengths.long(), good, rows),
    )


def _covers(size: int, name: str, lengths: Tensor) -> _Check:
    def raise_bad(good: Tensor) -> None:
        n = int((~good).nonzero()[0, 0])
        raise ValueError(
            f"attn_mask has {size} {name}, but sequence {n} has {int(lengths[n])}: it goes by "
            "positions within a sequence and must cover the longest"
        )

    return _Check(lengths <= size, f"attn_mask covers too few {name}", raise_bad)


def _bad_limits(call: AttentionCall) -> None:
    raise ValueError(
        f"mask limits must be 0 or more, got {int(call.limits.min())}; "
        "None leaves a window side unbounded"
    )


def _bad_rate(good: Tensor) -> None:
    row = (~good).nonzero()[0].tolist()
    raise ValueError(f"dropout_p must lie between 0 and 1; that of token {tuple(row)} does not")


def _bad_sequence(name: str, starts: Tensor, lengths: Tensor, good: Tensor, rows: int) -> None:
    n = int((~good).nonzero()[0, 0])
    start, length = int(starts[n]), int(lengths[n])
    if n == 0 and start != 0:
        raise ValueError(
            f"cu_seqlens_{name} must start at 0, got {start}: it holds N + 1 ends, not N lengths"
        )
    if length < 0:
        raise ValueError(
            f"sequence {n} of {name} has length {length}: cu_seqlens_{name} must not decrease and "
            f"lengths_{name} must be 0 or more"
        )
    end = start % max(rows, 1) + length
    raise ValueError(
        f"sequence {n} of {name} ends at row {end}, but {name} has {rows} rows: "
        f"check cu_seqlens_{name} or lengths_{name}"
    )
