"""Packed batches without padding, and a loader that resumes in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from flashmod.training.sampler import PackedBatchSampler

BOS = 256  # the input before a document's first byte; never a target


@dataclass
class Packed:
    """Several byte sequences on one token axis, with no padding between them.

    Each document of L bytes takes L rows: the inputs are ``BOS`` and its first L - 1 bytes,
    the targets its L bytes. So every byte is predicted exactly once, and bits per byte
    compare directly with the entropy of the same bytes.

    Attributes:
        tokens: (T,) int64 in 0..256.
        targets: (T,) int64 in 0..255.
        cu_seqlens: (N + 1,) int32, the first row of each sequence, then T.
        max_len: rows of the longest sequence.
    """

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    max_len: int

    def to(self, *args: Any, **kwargs: Any) -> Packed:
        """Move the tensors as ``torch.Tensor.to`` does; give devices, not dtypes."""
        return self._map(lambda tensor: tensor.to(*args, **kwargs))

    def pin_memory(self) -> Packed:
        """Copy to page-locked memory, as ``DataLoader(pin_memory=True)`` asks."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Packed:
        return Packed(fn(self.tokens), fn(self.targets), fn(self.cu_seqlens), self.max_len)


def pack(documents: Sequence[bytes]) -> Packed:
    """Put documents behind each other: the collate function of :class:`PackedLoader`."""
    lengths = [len(document) for document in documents]
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int64), 0, out=cu_seqlens[1:])
    # frombuffer refuses an empty buffer, so one spare byte goes in and is cut off.
    joined = bytearray(b"".join(documents) + b"\0")
    targets = torch.frombuffer(joined, dtype=torch.uint8)[:-1].long()
    tokens = targets.roll(1)
    tokens[[int(start) for start, n in zip(cu_seqlens, lengths, strict=False) if n]] = BOS
    return Packed(tokens, targets, cu_seqlens.to(torch.int32), max(lengths, default=0))


class PackedLoader(DataLoader[Any]):
    """A ``DataLoader`` over documents that goes on where a checkpoint left it.

    Lightning stores ``state_dict()`` in its checkpoints and hands it back; the resumed run
    sees the remaining batches of the epoch, and then the same epochs as a run that was
    never stopped. Under DDP the sampler shards by itself: pass
    ``Trainer(use_distributed_sampler=False)``.

    Args:
        documents: byte sequences, none longer than the sampler's budget.
        sampler: yields the document indices of each batch.
        num_workers, pin_memory: as in ``DataLoader``.
    """

    def __init__(
        self,
        documents: Sequence[bytes],
        sampler: PackedBatchSampler,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(
            documents,  # type: ignore[arg-type]  # any sequence is a map-style data set
            batch_sampler=sampler,
            collate_fn=pack,
            num_workers=num_workers,
            pin_memory=pin_memory,
        )
        self._packed_sampler = sampler
        self._epoch, self._done = 0, 0

    def __iter__(self) -> Iterator[Packed]:  # type: ignore[override]
        # A generator: nothing happens before the first batch is asked for, so an epoch or
        # a state that is set after iter() still counts.
        self._epoch, self._done = self._packed_sampler.epoch, self._packed_sampler.start
        for batch in super().__iter__():
            self._done += 1
            yield batch
        self._packed_sampler.start = 0

    def state_dict(self) -> dict[str, int]:
        """Epoch, and the number of its batches that have been handed out."""
        sampler = self._packed_sampler
        started = self._epoch == sampler.epoch
        return {"epoch": sampler.epoch, "batches": self._done if started else sampler.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the batches that ``state`` counts."""
        self._packed_sampler.resume(state["epoch"], state["batches"])
        self._epoch, self._done = state["epoch"], state["batches"]
