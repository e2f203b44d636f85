"""Checks of what only the values of a call can tell."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from .spec import AttentionCall

_MORE = " (FLASHMOD_VALIDATE=1 says which)"


def check_contents(call: AttentionCall, q: Tensor, k: Tensor) -> None:
    """Check what only the values can tell: that sequences lie inside the buffers, limits >= 0.

    On a CPU a ValueError names both numbers. On a device ``torch._assert_async`` stops the stream
    without a synchronisation, unless ``FLASHMOD_VALIDATE=1`` asks for the full message.
    """
    sides = (("q", call.q_starts, call.q_lengths, q), ("k", call.kv_starts, call.kv_lengths, k))
    on_host = q.device.type == "cpu" or os.environ.get("FLASHMOD_VALIDATE") == "1"
    for name, starts, lengths, x in sides:
        rows = x.shape[1]
        end = torch.where(lengths > 0, starts % max(rows, 1) + lengths, 0)
        good = (lengths >= 0) & (starts >= 0) & (starts <= x.shape[0] * rows) & (end <= rows)
        good[:1] &= starts[:1] == 0
        if on_host:
            _raise_first_bad(name, starts.long(), lengths.long(), good, rows)
        else:
            torch._assert_async(good.all(), f"sequences of {name} lie outside its buffer{_MORE}")
    if not on_host:
        torch._assert_async((call.limits >= 0).all(), f"mask limits must be 0 or more{_MORE}")
    elif bool((call.limits < 0).any()):
        raise ValueError(
            f"mask limits must be 0 or more, got {int(call.limits.min())}; "
            "None leaves a window side unbounded"
        )


def _raise_first_bad(name: str, starts: Tensor, lengths: Tensor, good: Tensor, rows: int) -> None:
    if bool(good.all()):
        return
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
