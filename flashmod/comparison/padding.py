"""What padding costs, and what packing would save, from lengths alone."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .batch import named, padding_of

Batch = tuple[list[int], int]  # lengths, padded width


class Size(NamedTuple):
    """What a transformer computes on some batches, packed and padded.

    Attributes:
        tokens, padded_tokens: rows of everything that works token by token (projections, MLPs,
            norms).
        pairs, padded_pairs: query-key pairs of attention; a causal mask halves both.
    """

    tokens: int
    padded_tokens: int
    pairs: int
    padded_pairs: int


@dataclass(frozen=True)
class PaddingReport:
    """Padded and packed sizes of some batches; ``str()`` is the table.

    Attributes:
        batches, sequences: how many were read.
        shortest, median, longest: lengths.
        total: the size of all batches; it sets the time.
        largest: of each size the largest in one batch; it sets the peak of memory.
        embed_dim: width of the model, where it was given.
        how: what lengths were read from.
    """

    batches: int
    sequences: int
    shortest: int
    median: float
    longest: int
    total: Size
    largest: Size
    embed_dim: int | None
    how: str

    @property
    def share(self) -> float:
        """Of the padded positions, those that are padding."""
        return 1 - _ratio(self.total.tokens, self.total.padded_tokens)

    @property
    def linear_time(self) -> float:
        """Packed over padded, of what works token by token."""
        return _ratio(self.total.tokens, self.total.padded_tokens)

    @property
    def quadratic_time(self) -> float:
        """Packed over padded, of attention's scores and weighted sums."""
        return _ratio(self.total.pairs, self.total.padded_pairs)

    @property
    def time(self) -> float | None:
        """Packed over padded, of a transformer of width ``embed_dim``; None without it.

        By multiplications: 12 E^2 a token (projections and an MLP of 4 E), 2 E a pair.
        """
        if self.embed_dim is None:
            return None
        packed = 6 * self.embed_dim * self.total.tokens + self.total.pairs
        return _ratio(
            packed, 6 * self.embed_dim * self.total.padded_tokens + self.total.padded_pairs
        )

    @property
    def linear_memory(self) -> float:
        """Packed over padded, of the activations of the largest batch."""
        return _ratio(self.largest.tokens, self.largest.padded_tokens)

    @property
    def quadratic_memory(self) -> float:
        """Packed over padded, of score matrices of the largest batch. Flash attention has none."""
        return _ratio(self.largest.pairs, self.largest.padded_pairs)

    def __str__(self) -> str:
        spread = f"{self.shortest:,} to {self.longest:,} tokens, median {self.median:,.0f}"
        rows = [
            f"padding: {self.share:.0%} of {self.total.padded_tokens:,} positions ({self.how})",
            f"  {self.sequences:,} sequences of {spread}, in {self.batches:,} batches",
            "predicted, packed over padded",
            f"  time    linear part {_times(self.linear_time)}, "
            f"quadratic part (attention) {_times(self.quadratic_time)}",
        ]
        if self.time is not None:
            rows.append(f"          together {_times(self.time)} at width {self.embed_dim:,}")
        else:
            rows.append("          together between the two: embed_dim=... tells")
        rows += [
            f"  memory  linear part {_times(self.linear_memory)}; score matrices "
            f"{_times(self.quadratic_memory)} where attention keeps them, none with flash",
            f"          largest batch: {self.largest.padded_tokens:,} positions, "
            f"{self.largest.padded_pairs:,} pairs a head",
        ]
        return "\n".join(rows)


def padding_report(
    source: Iterable[Any],
    *,
    lengths: Callable[[Any], Iterable[int]] | None = None,
    batch_size: int | None = None,
    embed_dim: int | None = None,
    max_batches: int | None = None,
) -> PaddingReport:
    """What share of some batches is padding, and what packing them would save.

    Args:
        source: a DataLoader or any iterable of batches. A batch tells its padding by
            ``attention_mask``, ``*padding_mask`` or ``lengths`` (in a dict or as attributes' names
            would be), is a list of its lengths (ints, or a 1-D int tensor), or a list of 1-D
            sequences. With ``batch_size`` the items are single sequences: lengths, or anything
            with ``len()``.
        lengths: from a batch to its lengths, where the batch does not tell; padded to the longest.
        batch_size: put so many items, in their order, into a batch.
        embed_dim: width of the model, to weigh the linear against the quadratic part.
        max_batches: read no more.
    Raises:
        TypeError: a batch does not tell its lengths.
        ValueError: there is no batch, or both ``lengths`` and ``batch_size`` are given.
    """
    if lengths is not None and batch_size is not None:
        raise ValueError("give lengths (items are batches) or batch_size (items are sequences)")
    if batch_size is not None:
        found = ((batch, max(batch)) for batch in _grouped(source, batch_size))
        how = f"lengths, {batch_size} sequences a batch"
        return _report(itertools.islice(found, max_batches), embed_dim, [how])
    hows: list[str] = []
    batches = (_read(batch, lengths, hows) for batch in itertools.islice(source, max_batches))
    return _report(batches, embed_dim, hows)


def _report(batches: Iterable[Batch], embed_dim: int | None, hows: list[str]) -> PaddingReport:
    every = [(one, width) for one, width in batches if one]
    if not every:
        raise ValueError("there is no batch with a sequence in it")
    flat = [length for one, _ in every for length in one]
    sizes = [
        Size(sum(one), len(one) * width, sum(n * n for n in one), len(one) * width * width)
        for one, width in every
    ]
    columns = list(zip(*sizes, strict=True))
    return PaddingReport(
        len(every), len(flat), min(flat), statistics.median(flat), max(flat),
        Size(*map(sum, columns)), Size(*map(max, columns)), embed_dim,
        hows[0] if hows else "lengths",
    )  # fmt: skip


def _read(batch: Any, lengths: Callable[[Any], Iterable[int]] | None, hows: list[str]) -> Batch:
    if lengths is not None:
        own = [int(n) for n in lengths(batch)]
        hows.append("lengths=")
        return own, max(own, default=0)
    if isinstance(batch, Tensor):
        if batch.dim() == 1 and not batch.is_floating_point() and batch.dtype != torch.bool:
            return batch.tolist(), int(batch.max()) if len(batch) else 0
    elif isinstance(batch, list | tuple) and all(isinstance(n, int) for n in batch):
        return list(batch), max(batch, default=0)
    elif isinstance(batch, list | tuple) and all(_is_sequence(x) for x in batch):
        own = [len(x) for x in batch]
        return own, max(own, default=0)
    parts = batch if isinstance(batch, Mapping | Tensor | list | tuple) else _fields(batch)
    padding = padding_of(named(parts))
    if padding is None:
        raise TypeError(
            f"a {type(batch).__name__} does not tell its lengths: give batches with "
            "attention_mask, key_padding_mask or lengths, or pass lengths=, a function from a "
            "batch to its lengths, e.g. lambda batch: (batch != pad_id).sum(1)"
        )
    hows.append(padding.how)
    return padding.lengths, padding.width


def _fields(batch: Any) -> dict[str, Any]:
    if hasattr(batch, "_asdict"):
        return dict(batch._asdict())
    return dict(getattr(batch, "data", None) or getattr(batch, "__dict__", {}))


def _is_sequence(x: Any) -> bool:
    return isinstance(x, list | tuple | str | bytes) or (hasattr(x, "shape") and len(x.shape) == 1)


def _grouped(source: Iterable[Any], batch_size: int) -> Iterator[list[int]]:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    sizes = (x if isinstance(x, int) else len(x) for x in source)
    while batch := list(itertools.islice(sizes, batch_size)):
        yield batch


def _ratio(packed: int, padded: int) -> float:
    return packed / padded if padded else 1.0


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"
