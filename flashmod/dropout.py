"""Which weights dropout keeps, as a tensor: to test, to plot, to repeat a call with other means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .arguments import seed_tensor
from .contents import check_rates
from .dispatch import load
from .operands import thresholds
from .reference import dropout_draws
from .sequences import ids

_CHUNK = 1 << 18  # weights at a time: a few MiB of random numbers beside the result


def dropout_mask(
    dropout_p: float | Tensor,
    dropout_seed: int | Tensor,
    shape: Sequence[int],
    *,
    sequence_ids: Tensor | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
) -> Tensor:
    """Which attention weights :func:`flash_attention` keeps for the same rate and seed.

    Positions are those within a sequence: ``mask[n, :, :q_len, :kv_len]`` is sequence ``n`` of a
    ragged batch. Kept weights are divided by ``1 - p``, p rounded to 1/65536.

    Args:
        dropout_p: a rate, or one per query token, (N, S).
        dropout_seed: int or 0-d int64 tensor, as given to the call.
        shape: (N, H, S, S_kv): sequences, query heads, queries, keys.
        sequence_ids: (N,) int32, as given to the call; 0..N-1 by default.
        device: of the result; that of a given tensor by default, else torch's.
        backend: ``"triton"`` asks the kernels; None and ``"tiled"`` apply the rule in torch.
    Returns:
        (N, H, S, S_kv) bool, True = kept. Quadratic, unlike the call itself.
    """
    sizes = tuple(shape)
    if len(sizes) != 4 or any(not isinstance(n, int) or n < 0 for n in sizes):
        raise ValueError(f"shape must be (N, H, S, S_kv), got {sizes}")
    if dropout_seed is None:
        raise TypeError("dropout_seed must be the seed of the call, got None")
    given = [x.device for x in (dropout_p, dropout_seed) if isinstance(x, Tensor)]
    device = torch.device(device) if device is not None else None
    out = torch.empty(sizes, dtype=torch.bool, device=device or (given[0] if given else None))
    if isinstance(dropout_p, Tensor):
        dropout_p = dropout_p.to(out.device)
    rates, rate = thresholds(dropout_p, out.transpose(1, 2))
    if rates is not None:
        check_rates(rates)
    seed, sequences = seed_tensor(dropout_seed, out.device), ids(sequence_ids, sizes[0], out.device)
    if backend is not None:
        load(backend)
    if backend == "triton":
        from .backends.triton.dropout import dropout_mask as from_kernel

        return from_kernel(seed, sequences, rate if rates is None else rates, sizes)
    for n, rows in _chunks(*sizes):
        q_idx = torch.arange(sizes[2], device=out.device)[rows]
        draws = dropout_draws(seed, sequences[n, None, None, None], sizes[1], q_idx, sizes[3])
        out[n, :, rows] = draws >= (rate if rates is None else rates[n, None, rows, None])
    return out


def _chunks(count: int, heads: int, rows: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """Whole sequences, or rows of one where it is too large."""
    per_row = max(heads * keys, 1)
    some = max(_CHUNK // (per_row * max(rows, 1)), 1)
    step = max(_CHUNK // per_row, 1)
    for n in range(0, count, some):
        for first in range(0, rows, step):
            yield slice(n, n + some), slice(first, first + step)
