"""Corpora of byte documents: the standard library, a seeded generator, your own files."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from math import log2
from pathlib import Path
from typing import Any, Literal, get_args

from flashmod.training.sources import stdlib_documents, synthetic_documents

logger = logging.getLogger(__name__)

Name = Literal["stdlib", "synthetic", "files"]
Unit = Literal["function", "file"]
Lengths = Literal["lognormal", "fixed"]


@dataclass(frozen=True)
class DataConfig:
    """Which documents, and how they become training sequences. Plain types only.

    Args:
        name: ``"stdlib"``, ``"synthetic"`` or ``"files"``.
        seq_len: longest sequence in bytes; a longer document is cut into pieces.
        unit: with ``stdlib``, one document per ``"function"`` or per ``"file"``.
        documents: number of documents; for ``stdlib`` and ``files`` at most so many,
            spread evenly over the corpus, ``None`` for all; for ``synthetic`` 1024 if ``None``.
        lengths: with ``synthetic``, ``"lognormal"`` (ragged, up to ``seq_len``) or ``"fixed"``.
        glob: with ``files``, a pattern such as ``"/path/**/*.txt"``.
        val_fraction: share of documents, in (0, 1), held out by the hash of their bytes.
        seed: of the synthetic generator.

    Raises:
        ValueError: for a value outside these.
    """

    name: Name = "stdlib"
    seq_len: int = 512
    unit: Unit = "function"
    documents: int | None = None
    lengths: Lengths = "lognormal"
    glob: str | None = None
    val_fraction: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        _choice("name", self.name, get_args(Name))
        _choice("unit", self.unit, get_args(Unit))
        _choice("lengths", self.lengths, get_args(Lengths))
        if self.seq_len < 1:
            raise ValueError(f"data.seq_len is {self.seq_len}; it must be at least 1")
        if not 0.0 < self.val_fraction < 1.0:
            raise ValueError(
                f"data.val_fraction is {self.val_fraction}; it must lie between 0 and 1"
            )
        if self.documents is not None and self.documents < 2:
            raise ValueError(f"data.documents is {self.documents}; a split needs at least 2")
        if self.name == "files" and not self.glob:
            raise ValueError("data=files needs data.glob, for example data.glob='/path/**/*.txt'")


@dataclass(frozen=True)
class Corpus:
    """Byte sequences of at most ``seq_len``, split by document, with the facts of the record.

    Attributes:
        train, val: the sequences; all pieces of one document, and all equal documents,
            are on the same side.
        sha256: of the documents before they were cut, in order.
        documents, bytes: of the whole corpus, before cutting.
        unigram_entropy: bits per byte of the validation bytes under their own byte
            frequencies. Every validation byte is predicted once, so a model below this
            beats every model that ignores context, even one fitted to the validation set.
    """

    name: str
    train: list[bytes]
    val: list[bytes]
    sha256: str
    documents: int
    bytes: int
    train_documents: int
    val_documents: int
    unigram_entropy: float

    def record(self) -> dict[str, Any]:
        """The ``data`` entry of ``result.json``."""
        keys = ("name", "sha256", "documents", "bytes", "train_documents", "val_documents")
        return {key: getattr(self, key) for key in (*keys, "unigram_entropy")}


def load_corpus(config: DataConfig) -> Corpus:
    """Read or generate the documents of ``config``, split them, and cut the long ones."""
    documents = _documents(config)
    train, val = split_documents(documents, config.val_fraction)
    val_pieces = cut(val, config.seq_len)
    logger.info("corpus %s: %d documents, %d held out", config.name, len(documents), len(val))
    return Corpus(
        name=config.name,
        train=cut(train, config.seq_len),
        val=val_pieces,
        sha256=corpus_hash(documents),
        documents=len(documents),
        bytes=sum(map(len, documents)),
        train_documents=len(train),
        val_documents=len(val),
        unigram_entropy=unigram_entropy(val_pieces),
    )


def split_documents(
    documents: Sequence[bytes], val_fraction: float
) -> tuple[list[bytes], list[bytes]]:
    """Split into train and validation by the hash of each document's bytes.

    The side of a document does not depend on the others; only when a side would be empty
    does the document nearest to the threshold change sides.

    Raises:
        ValueError: when fewer than two different documents are given.
    """
    keys = [hashlib.sha256(document).digest() for document in documents]
    distinct = sorted(set(keys))
    if len(distinct) < 2:
        raise ValueError(
            f"{len(documents)} documents of which {len(distinct)} differ cannot be split into "
            "train and validation; give at least 2 different documents"
        )
    limit = int(val_fraction * 2**64).to_bytes(8, "big")
    first_train = min(max(sum(key < limit for key in distinct), 1), len(distinct) - 1)
    held_out = set(distinct[:first_train])
    pairs = list(zip(documents, keys, strict=True))
    train = [document for document, key in pairs if key not in held_out]
    return train, [document for document, key in pairs if key in held_out]


def cut(documents: Sequence[bytes], seq_len: int) -> list[bytes]:
    """Cut every document into pieces of ``seq_len`` bytes; the last piece may be shorter."""
    return [d[i : i + seq_len] for d in documents for i in range(0, len(d), seq_len)]


def corpus_hash(documents: Sequence[bytes]) -> str:
    """sha256 over the documents and their lengths, in order, as hexadecimal digits."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document).to_bytes(8, "big"))
        digest.update(document)
    return digest.hexdigest()


def unigram_entropy(documents: Sequence[bytes]) -> float:
    """Entropy in bits per byte of the byte frequencies of ``documents``; 0.0 if empty."""
    counts = [0] * 256
    for document in documents:
        for byte in document:
            counts[byte] += 1
    total = sum(counts)
    return sum(n / total * log2(total / n) for n in counts if n)


def _documents(config: DataConfig) -> list[bytes]:
    if config.name == "synthetic":
        count = 1024 if config.documents is None else config.documents
        fixed = config.lengths == "fixed"
        return synthetic_documents(count, config.seq_len, fixed=fixed, seed=config.seed)
    documents = stdlib_documents(config.unit) if config.name == "stdlib" else _files(config.glob)
    if config.documents is None or config.documents >= len(documents):
        return documents
    return [documents[i * len(documents) // config.documents] for i in range(config.documents)]


def matching_files(pattern: str) -> list[str]:
    """Paths that ``pattern`` matches, ``**`` included, in order."""
    return sorted(glob(pattern, recursive=True))


def _files(pattern: str | None) -> list[bytes]:
    paths = matching_files(str(pattern))
    documents = [Path(path).read_bytes() for path in paths if Path(path).is_file()]
    documents = [document for document in documents if document]
    if not documents:
        raise ValueError(f"data.glob={pattern!r} matches no file that is not empty")
    return documents


def _choice(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"data.{key} is {value!r}; it must be one of {', '.join(allowed)}")
