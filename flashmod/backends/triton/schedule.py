"""Work lists of ragged launches, built on the device without a synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...spec import AttentionCall, Limits, on_tensors

_Range = Callable[[Tensor, Tensor, Limits], tuple[Tensor, Tensor]]


def query_tiles(call: AttentionCall, rows: int, block: int) -> Tensor:
    """(T, 2) int32: sequence and first position of every query tile, longest work first.

    Args:
        rows: B * S, which bounds the number of tiles. Those past the real count start beyond the
            end of the last sequence.
    """
    return _tiles(call, call.q_lengths, rows, block, on_tensors.key_range)


def key_tiles(call: AttentionCall, rows: int, block: int) -> Tensor:
    """The same for key tiles; ``rows`` is B * S_kv."""
    return _tiles(call, call.kv_lengths, rows, block, on_tensors.query_range)


def _tiles(call: AttentionCall, lengths: Tensor, rows: int, block: int, work: _Range) -> Tensor:
    counts = (lengths + (block - 1)) // block
    ends = counts.cumsum(0)
    tile = torch.arange(
        -(-rows // block) + call.num_sequences, dtype=torch.int64, device=lengths.device
    )
    n = torch.searchsorted(ends, tile, right=True).clamp_(max=call.num_sequences - 1)
    first = ((tile - (ends - counts)[n]) * block).int()
    length = lengths[n]
    begin, end = work(first, torch.minimum(first + block, length) - 1, _limits(call, n))
    cost = torch.where(first < length, end - begin, -1)
    order = cost.argsort(descending=True, stable=True)
    return torch.stack([n.int(), first], 1)[order]


def _limits(call: AttentionCall, n: Tensor) -> Limits:
    q_len, kv_len = call.q_lengths[n], call.kv_lengths[n]
    left, right, prefix, first_key, end_key = call.limits[n].unbind(1)
    shift = on_tensors.diagonal_shift(q_len, kv_len, call.align)
    return Limits(q_len, shift, left, right, prefix, first_key, torch.minimum(end_key, kv_len))
