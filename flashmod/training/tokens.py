"""How many real tokens a batch holds, whoever made it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

PACKED = ("cu_seqlens", "cu_seqlens_q", "cu_seq_lens_q")
REAL_MASKS = ("attention_mask",)  # true: a token
PADDING_MASKS = ("key_padding_mask", "src_key_padding_mask")  # true: padding


class Tokens(NamedTuple):
    """Tokens of one batch.

    Attributes:
        real: neither padding nor slack.
        rows: rows that the model computes.
        padded: rows of the same batch padded to its longest sequence.
    """

    real: int
    rows: int
    padded: int


def count_tokens(batch: Any) -> Tokens:
    """Count the tokens of a batch by what it carries.

    Read from attributes or keys, in this order: ``cu_seqlens`` (packed), ``lengths``,
    ``attention_mask`` (true: token), ``key_padding_mask`` (true: padding). Otherwise every
    element of an integer tensor, and every row of a float tensor (B, S, E) or (T, E), is a
    token. Of a tuple or list the first part that can be counted is.

    Raises:
        TypeError: for a batch without any of these.
    """
    found = _count(batch)
    if found is None:
        raise TypeError(
            f"cannot count the tokens of a {type(batch).__name__}: give it cu_seqlens, lengths or "
            "attention_mask, or pass Throughput(count=...) a function from batch to Tokens"
        )
    return found


def _count(batch: Any) -> Tokens | None:
    if isinstance(batch, Tensor):
        return _count_tensor(batch)
    get = batch.get if isinstance(batch, Mapping) else lambda name: getattr(batch, name, None)
    for name in PACKED:
        if isinstance(cu_seqlens := get(name), Tensor):
            lengths = cu_seqlens.diff().tolist()
            real = sum(lengths)
            return Tokens(real, real, len(lengths) * max(lengths, default=0))
    for name in ("lengths", *REAL_MASKS, *PADDING_MASKS):
        if isinstance(value := get(name), Tensor):
            rest = {k: v for k, v in _items(batch) if k != name}
            return _count_padded(name, value, rest)
    parts = [v for _, v in _items(batch)]
    return next((found for part in parts if (found := _count(part)) is not None), None)


def _count_padded(name: str, value: Tensor, rest: Mapping[str, Any]) -> Tokens:
    if name == "lengths":
        real = int(value.sum())
        whole = next((c for v in rest.values() if (c := _count(v)) is not None), None)
        rows = real if whole is None else whole.rows
    else:
        mask = value.bool() if name in REAL_MASKS else ~value.bool()
        real, rows = int(mask.sum()), mask.numel()
    return Tokens(real, rows, rows)


def _count_tensor(tensor: Tensor) -> Tokens | None:
    if not tensor.is_floating_point() and tensor.dtype != torch.bool and tensor.dim() <= 2:
        rows = tensor.numel()
    elif tensor.is_floating_point() and tensor.dim() in (2, 3):
        rows = tensor.shape[:-1].numel()
    else:
        return None
    return Tokens(rows, rows, rows)


def _items(batch: Any) -> list[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        return list(batch.items())
    if isinstance(batch, tuple | list):
        return [(str(i), part) for i, part in enumerate(batch)]
    return list(getattr(batch, "__dict__", {}).items())
