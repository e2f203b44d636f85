"""Which documents go into which batch, for every epoch and every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import torch.distributed as dist
from torch.utils.data import Sampler


class PackedBatchSampler(Sampler[list[int]]):
    """Batches of whole documents: by a token budget, or of a fixed number of sequences.

    Every epoch has the same number of batches, and under DDP every rank gets as many as the
    others, with documents of its own; no document is left out or repeated.

    Args:
        lengths: bytes of each document.
        tokens_per_batch: budget; documents are added until the next would exceed it.
        sequences_per_batch: this many documents in every batch instead (the last may hold
            fewer), so that tokens per batch grow with the length. Give one of the two.
        shuffle: another order every epoch, a function of ``seed`` and the epoch alone.
        seed: of the order.
        rank, world_size: of this process; by default those of ``torch.distributed`` when
            the batches are asked for, or 0 and 1.
        drop_last: with ``sequences_per_batch``, leave out documents that do not fill a
            batch, unless they are all there is.

    Raises:
        ValueError: for both or neither size, a document over the budget, or fewer documents
            than ranks.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        tokens_per_batch: int | None = None,
        sequences_per_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self.lengths = list(lengths)
        self.tokens_per_batch, self.sequences_per_batch = tokens_per_batch, sequences_per_batch
        self._check_sizes()
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._rank, self._world_size = rank, world_size
        self.epoch, self.start = 0, 0
        # Lightning calls set_epoch on `batch_sampler.sampler` and nowhere else.
        self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of ``epoch``; batches to skip belong to the epoch they came from."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def resume(self, epoch: int, batches: int) -> None:
        """Start in ``epoch`` after its first ``batches`` batches."""
        self.epoch, self.start = epoch, batches

    def __len__(self) -> int:
        """Batches of a whole epoch on one rank, also after :meth:`resume`."""
        _, world_size = self._place()
        return len(self._batches()) // world_size

    def __iter__(self) -> Iterator[list[int]]:
        # A worker-backed loader calls iter() twice, so reading `start` must not consume it.
        rank, world_size = self._place()
        yield from self._batches()[rank::world_size][self.start :]

    def _batches(self) -> list[list[int]]:
        """The batches of this epoch for all ranks; their number is a multiple of the ranks."""
        rng = Random(f"{self.seed}/{self.epoch}")
        batches = self._fill(self._order(rng))
        _, world_size = self._place()
        while len(batches) % world_size:
            largest = max(range(len(batches)), key=lambda i: len(batches[i]))
            batch = batches.pop(largest)
            if len(batch) < 2:
                raise ValueError(
                    f"{len(self.lengths)} documents cannot be shared evenly by {world_size} ranks; "
                    "use more documents or fewer devices"
                )
            batches += [batch[::2], batch[1::2]]
        if self.shuffle:
            rng.shuffle(batches)
        return batches

    def _order(self, rng: Random) -> list[int]:
        order = list(range(len(self.lengths)))
        if not self.shuffle:
            return order
        if self.sequences_per_batch is not None:
            rng.shuffle(order)
            return order
        # With a budget the number of batches depends on the order of the lengths. That
        # order is fixed, and documents of equal length trade places, so Lightning, which
        # asks for the length once, sees every batch of every epoch.
        Random(self.seed).shuffle(order)
        same_length: dict[int, list[int]] = {}
        for index in order:
            same_length.setdefault(self.lengths[index], []).append(index)
        for group in same_length.values():
            rng.shuffle(group)
        return [same_length[self.lengths[index]].pop() for index in order]

    def _fill(self, order: list[int]) -> list[list[int]]:
        size = self.sequences_per_batch
        if size is not None:
            batches = [order[i : i + size] for i in range(0, len(order), size)]
            if self.drop_last and len(batches) > 1 and len(batches[-1]) < size:
                batches.pop()
            return batches
        assert self.tokens_per_batch is not None
        batches, room = [], 0
        for index in order:
            if not batches or self.lengths[index] > room:
                batches.append([])
                room = self.tokens_per_batch
            batches[-1].append(index)
            room -= self.lengths[index]
        return batches

    def _place(self) -> tuple[int, int]:
        running = dist.is_available() and dist.is_initialized()
        rank = self._rank if self._rank is not None else dist.get_rank() if running else 0
        if self._world_size is not None:
            return rank, self._world_size
        return rank, dist.get_world_size() if running else 1

    def _check_sizes(self) -> None:
        tokens, sequences = self.tokens_per_batch, self.sequences_per_batch
        if (tokens is None) == (sequences is None):
            raise ValueError(
                f"tokens_per_batch={tokens} and sequences_per_batch={sequences}: give exactly one"
            )
        if sequences is not None and sequences < 1:
            raise ValueError(f"sequences_per_batch is {sequences}; it must be at least 1")
        longest = max(self.lengths, default=0)
        if tokens is not None and longest > tokens:
            raise ValueError(
                f"a document has {longest} bytes but tokens_per_batch is {tokens}; "
                "raise the budget or lower seq_len"
            )
