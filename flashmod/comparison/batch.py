"""One batch of a model: how it is handed over, and what it says of its padding."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_LENGTHS = re.compile(r"(^|_)(lengths?|lens|seq_?lens?)$")
_PADDING = re.compile(r"pad(ding)?_mask$")
_TOKENS = re.compile(r"attention_mask$")
_PACKED = re.compile(r"^cu_seq_?lens(_q)?$")


class Padding(NamedTuple):
    """Which positions of a padded batch are padding.

    Attributes:
        lengths: tokens of each sequence.
        width: positions of each sequence.
        how: what it was read from.
        valid: (N, S) bool, True = token; None where only lengths are known.
    """

    lengths: list[int]
    width: int
    how: str
    valid: Tensor | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def positions(self) -> int:
        return len(self.lengths) * self.width

    @property
    def share(self) -> float:
        return 1 - self.tokens / self.positions if self.positions else 0.0


def call(model: nn.Module, batch: Any) -> Any:
    """``model`` on a tensor, a tuple or list of arguments, or a mapping of keywords."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def plain(batch: Any) -> Any:
    """``batch`` checked, and any mapping as a dict.

    Raises:
        TypeError: it is none of what :func:`call` takes.
    """
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, Tensor | tuple | list):
        return batch
    raise TypeError(
        f"batch is a {type(batch).__name__}: give a tensor, a tuple of arguments for model(*batch) "
        "or a dict for model(**batch)"
    )


def copied(batch: Any, double: bool = False) -> Any:
    """New tensors in the same structure; ``double`` makes float64 of every float."""

    def copy(x: Tensor) -> Tensor:
        dtype = torch.float64 if double and x.is_floating_point() else x.dtype
        return x.detach().to(dtype, copy=True).requires_grad_(x.requires_grad)

    return tree_map_only(Tensor, copy, batch)


def named(batch: Any, function: Callable[..., Any] | None = None) -> dict[str, Any]:
    """The parts of a batch by the names that ``function`` has for them, or by number."""
    if isinstance(batch, Mapping):
        return {str(key): value for key, value in batch.items()}
    parts = list(batch) if isinstance(batch, tuple | list) else [batch]
    try:
        assert function is not None
        bound = inspect.signature(function).bind(*parts).arguments
        return {name: value for name, value in bound.items() if isinstance(value, Tensor)}
    except (AssertionError, TypeError, ValueError):
        return {str(number): part for number, part in enumerate(parts)}


def padding_of(parts: Mapping[str, Any]) -> Padding | None:
    """What the tensors of a batch say of its padding, by name first, then by what they hold.

    In this order: ``cu_seqlens`` (packed, no padding), ``*padding_mask`` (true or -inf: padding),
    ``attention_mask`` (true: token), ``lengths``, and last a 2-D mask of another name that looks
    like padding on the right. None where nothing says it.
    """
    tensors = {name: x for name, x in parts.items() if isinstance(x, Tensor)}
    readers = (_packed, _padding_mask, _attention_mask, _lengths, _unnamed_mask)
    found = (read(name, x, tensors) for read in readers for name, x in tensors.items())
    return next((padding for padding in found if padding is not None), None)


def from_mask(valid: Tensor, how: str) -> Padding:
    """The padding of a (N, S) mask, True = token."""
    return Padding(valid.sum(1).tolist(), valid.shape[1], how, valid)


def _packed(name: str, x: Tensor, others: Mapping[str, Tensor]) -> Padding | None:
    if not _PACKED.search(name) or x.dim() != 1:
        return None
    lengths = x.diff().tolist()
    tokens = sum(lengths)
    return Padding([tokens], tokens, f"{name}: packed, nothing is padded")


def _padding_mask(name: str, x: Tensor, others: Mapping[str, Tensor]) -> Padding | None:
    if not _PADDING.search(name) or x.dim() != 2:
        return None
    if x.is_floating_point():
        return from_mask(x != float("-inf"), f"{name}: -inf is padding")
    return from_mask(~x.bool(), f"{name}: true is padding")


def _attention_mask(name: str, x: Tensor, others: Mapping[str, Tensor]) -> Padding | None:
    if not _TOKENS.search(name) or x.dim() != 2 or not _is_zero_one(x):
        return None
    return from_mask(x.bool(), f"{name}: true is a token")


def _lengths(name: str, x: Tensor, others: Mapping[str, Tensor]) -> Padding | None:
    if not _LENGTHS.search(name) or x.dim() != 1 or x.is_floating_point() or not x.numel():
        return None
    longest = int(x.max())
    widths = [t.shape[1] for t in others.values() if t.dim() > 1 and t.shape[0] == len(x)]
    width = next((width for width in widths if width >= longest), longest)
    valid = torch.arange(width, device=x.device) < x[:, None]
    return from_mask(valid, f"{name}: tokens of each sequence")


def _unnamed_mask(name: str, x: Tensor, others: Mapping[str, Tensor]) -> Padding | None:
    """A guess: its rows are tokens up to some column, then padding."""
    fits = any(t is not x and t.shape[:2] in (x.shape, x.shape[::-1]) for t in others.values())
    square = x.dim() == 2 and x.shape[0] == x.shape[1]  # as likely a mask of pairs
    guessable = x.dim() == 2 and x.numel() and not x.is_floating_point() and _is_zero_one(x)
    if not guessable or square or not fits:
        return None
    for valid, meaning in ((x.bool(), "a token"), (~x.bool(), "padding")):
        falling = bool((valid.int().diff(dim=1) <= 0).all())
        if falling and bool(valid[:, 0].all()) and not bool(valid.all()):
            how = f"{name}: a guess, true is {meaning} if the padding is on the right"
            return from_mask(valid, how)._replace(valid=None)
    return None


def _is_zero_one(x: Tensor) -> bool:
    return x.dtype == torch.bool or bool(((x == 0) | (x == 1)).all())
