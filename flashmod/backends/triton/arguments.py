"""The structs that kernels receive, and those they build inside."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class TensorArg(NamedTuple):
    """A 4-D tensor with its (batch, row, head, column) strides in elements."""

    ptr: Tensor | None
    strides: tuple[int, ...]


class Operands(NamedTuple):
    """What every kernel reads: (B, S, H, D) and (B, S_kv, H_kv, D) tensors."""

    q: TensorArg
    k: TensorArg
    v: TensorArg
    grad_out: TensorArg | None


class RowStats(NamedTuple):
    """Numbers of every query row; float64 for float64 input, else float32.

    A weight is ``exp2(score - row_max - log_sum)``, all in base 2.
    """

    saved: Tensor  # (B, H, 2, S) contiguous: row_max, log_sum
    last: Tensor  # (B, H, S) contiguous: lse in the forward pass, delta in the backward pass


class SequenceTable(NamedTuple):
    """Which rows every sequence has, and the work list of the launch."""

    tiles: Tensor  # (T, 2) int32: sequence, first position of the tile; may point past the end
    q_starts: Tensor
    q_lengths: Tensor
    kv_starts: Tensor
    kv_lengths: Tensor
    ids: Tensor
    limits: Tensor  # (N, 5) int32, contiguous


class MaskArg(NamedTuple):
    """What hides keys beside the interval of a query; ``None`` fields compile to nothing.

    Triton 3.6 loses a number 1 that follows a None in a struct, so the numbers come first.
    """

    key_strides: tuple[int, ...]
    fn_args: tuple[float, ...]
    keys: Tensor | None  # (B, S_kv) bool, True = visible
    fn: Any  # a jitted predicate, or None


class DropoutArg(NamedTuple):
    """``seed`` is None without dropout."""

    seed: Tensor | None  # (2,) int32, low word first
    threshold: int


class Sequence(NamedTuple):
    """One sequence, inside a kernel: where its rows are and who sees whom."""

    id: Any
    q_batch: Any
    q_row: Any
    kv_batch: Any
    kv_row: Any
    limits: Any  # spec.Limits


class QueryTile(NamedTuple):
    """A tile of query positions, inside a kernel, with the key interval of each."""

    idx: Any
    lo: Any
    hi: Any
    dropout_keys: Any  # a pair of int32 per row; zeros without dropout


class KeyTile(NamedTuple):
    """A tile of key positions, inside a kernel, with the interval of queries that see each."""

    first: Any
    idx: Any
    start: Any
    end: Any


class KeySide(NamedTuple):
    """The keys of one head, inside a kernel, and the keys ``[first, end)`` that a tile sees."""

    k: Any  # pointers to the tile at position 0
    v: Any
    k_stride: Any
    v_stride: Any
    first: Any
    end: Any


class QuerySide(NamedTuple):
    """The queries of one head, inside a kernel, and those ``[first, end)`` that see a key tile."""

    q: Any
    grad_out: Any
    q_stride: Any
    grad_stride: Any
    row_max: Any
    log_sum: Any
    delta: Any
    first: Any
    end: Any
