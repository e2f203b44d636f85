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
    _enforce(_checks(call, q, k), q.device)


def check_rates(thresholds: Tensor) -> None:
    """The same for dropout thresholds alone."""
    _enforce([_rates(thresholds)], thresholds.device)


def _enforce(checks: list[_Check], device: torch.device) -> None:
    on_host = device.type == "cpu" or os.environ.get("FLASHMOD_VALIDATE") == "1"
    for check in checks:
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
        checks.append(_rates(call.dropout_thresholds))
    if call.attn_mask is not None:
        sides = ((2, "queries", call.q_lengths, q), (3, "keys", call.kv_lengths, k))
        for axis, name, lengths, x in sides:
            size = call.attn_mask.shape[axis]
            if size > 1:
                checks.append(_covers(size, name, lengths))
            if 1 < size == x.shape[1] and x.shape[0] < call.num_sequences:
                checks.append(_local(size, name, lengths))
    return checks


def _rates(thresholds: Tensor) -> _Check:
    return _Check(thresholds >= 0, "dropout_p must lie between 0 and 1", _bad_rate)


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


def _local(size: int, name: str, lengths: Tensor) -> _Check:
    """One entry per packed token is what a mask of the unpacked batch would look like."""

    def raise_bad(good: Tensor) -> None:
        raise ValueError(
            f"attn_mask has {size} {name}, one for every packed token, but the longest sequence "
            f"has {int(lengths.max())}: with cu_seqlens it goes by positions within a sequence; "
            "leave tokens out of cu_seqlens to hide them"
        )

    return _Check(lengths.max() == size, f"attn_mask counts packed {name}", raise_bad)


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
