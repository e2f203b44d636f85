"""The structs that kernels receive, and those they build inside.

A field that is ``None`` compiles to nothing. Triton 3.6 loses a number 1 that follows a None in a
struct, so the numbers come first.
"""

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

    A weight is ``exp2(logit - row_max - log_sum)``, all in base 2.
    """

    saved: Tensor  # (B, H, 2, S) contiguous: row_max, log_sum
    last: Tensor  # (B, H, S) contiguous: lse in the forward pass, delta in the backward pass


class SequenceTable(NamedTuple):
    """Which rows every sequence has, and the work list of the launch."""

    tiles: Tensor | None  # (T, 2) int32: sequence, first position; may point past the end
    q_starts: Tensor
    q_lengths: Tensor
    kv_starts: Tensor
    kv_lengths: Tensor
    ids: Tensor
    limits: Tensor  # (N, 5) int32, contiguous


class MaskArg(NamedTuple):
    """What hides pairs beside the interval of a query, and what is added to those it leaves.

    ``keys`` is an ``attn_mask`` without a query axis, ``pairs`` any other: bool, or a bias.
    """

    strides: tuple[int, ...]  # of (sequence, head, query, key); 0 along broadcast axes
    fn_args: tuple[float, ...]
    keys: Tensor | None
    pairs: Tensor | None
    fn: Any  # a jitted predicate
    q_labels: Tensor | None  # (B, S) int32, contiguous
    kv_labels: Tensor | None


class ScoreArg(NamedTuple):
    """What a logit is beside a scaled product."""

    slope_stride: int  # from sequence to sequence, 0 where they share one
    sink_stride: int
    cap: float | None  # a kernel receives float32:
    cap_rest: float | None  # what is missing for float64
    slopes: Tensor | None  # (N|1, H)
    sink: Tensor | None  # (B|1, H), natural units


class DropoutArg(NamedTuple):
    """``seed`` is None without dropout."""

    threshold: int
    seed: Tensor | None  # (2,) int32, low word first
    thresholds: Tensor | None  # (B, S) int32, contiguous: one per query row instead


class StatsArg(NamedTuple):
    """Where the statistics of a forward pass go, laid out by :mod:`flashmod.stats`."""

    total: int
    tiles: Tensor | None  # (3, total) int32
    offsets: Tensor | None  # (N,) int64
    rows: Tensor | None  # (B, H, 2, S): largest logit, entropy


class Sequence(NamedTuple):
    """One sequence, inside a kernel: where its rows are and who sees whom."""

    n: Any
    id: Any
    q_start: Any  # a row of the flattened (B * S) axis
    kv_start: Any
    q_batch: Any
    q_row: Any
    kv_batch: Any
    kv_row: Any
    kv_len: Any
    limits: Any  # spec.Limits


class Scores(NamedTuple):
    """One head of one sequence, inside a kernel: what makes its logits."""

    scale: Any  # of products, in base 2
    unit: Any  # of what `logits` gives: the scale, or 1
    cap: Any  # in base 2, like the slope
    slope: Any


class Head(NamedTuple):
    """One head of one sequence, inside a kernel, and what applies to its pairs.

    But for MaskArg: Triton lets no struct that is built inside a kernel hold a function.
    """

    sequence: Any
    index: Any
    dropout: Any  # DropoutArg
    arg: Any  # ScoreArg
    scores: Any  # Scores


class DropoutRows(NamedTuple):
    """What decides over the weights of query rows, inside a kernel."""

    first: Any  # int32 per row
    second: Any
    threshold: Any  # one number, or one per row


class QueryTile(NamedTuple):
    """A tile of query positions, inside a kernel, with the key interval of each."""

    first: Any
    idx: Any
    lo: Any
    hi: Any
    dropout: Any  # DropoutRows; unused without dropout
    labels: Any


class KeyTile(NamedTuple):
    """A tile of key positions, inside a kernel, with the interval of queries that see each."""

    first: Any
    idx: Any
    start: Any
    end: Any
    labels: Any
    bias: Any  # what `attn_mask` holds for each key, where it has no query axis


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
