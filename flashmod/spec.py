"""What one attention call means, free of any backend. Everything here is immutable."""

from __future__ import annotations

import builtins
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import rules

UNBOUNDED = 1 << 30  # a window side that never cuts; sums with positions stay inside int32
DROPOUT_STEPS = 1 << 16  # a dropout rate is a multiple of 1 / DROPOUT_STEPS
WINDOW_LEFT, WINDOW_RIGHT, PREFIX_LEN, FIRST_KEY, END_KEY = range(5)  # columns of `limits`


class Limits(NamedTuple):
    """The numbers that fix every key interval of one sequence, as the rules read them."""

    q_len: Any
    shift: Any
    window_left: Any
    window_right: Any
    prefix_len: Any
    first_key: Any
    end_key: Any


class TileConfig(NamedTuple):
    """Tile sizes and launch options. They change speed and memory, never the meaning of a result.

    Args:
        block_m: queries per tile.
        block_n: keys per tile.
        num_warps, num_stages: Triton launch options; the torch tiles ignore them.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2


class AttentionCall(NamedTuple):
    """All of a call but q, k, v, flat so that it is also the argument list of the custom ops.

    Sequence ``n`` holds rows ``starts[n] .. starts[n] + lengths[n]`` of the flattened (B*S) row
    axis and never crosses a batch row: dense, padded and packed (B = 1) input are one layout.
    Axes written ``N|1`` hold one entry per sequence, or one for all.
    """

    q_starts: Tensor  # (N,) int32
    q_lengths: Tensor  # (N,) int32
    kv_starts: Tensor  # (N,) int32
    kv_lengths: Tensor  # (N,) int32
    sequence_ids: Tensor  # (N,) int32, the batch index that dropout and mask functions see
    limits: Tensor  # (N, 5) int32: window_left, window_right, prefix_len, first_key, end_key
    attn_mask: Tensor | None  # (N|1, H|1, Q|1, K|1) by local positions: bool, or a bias to add
    sink: Tensor | None  # (B|1, H), a logit that joins the denominator
    alibi_slopes: Tensor | None  # (N|1, H) in the accumulation dtype
    q_labels: Tensor | None  # (B, S) int32, handed to the mask function
    kv_labels: Tensor | None  # (B, S_kv) int32
    dropout_seed: Tensor | None  # 0-d int64; None is no dropout
    dropout_thresholds: Tensor | None  # (B, S) int32, one per query token
    dropout_threshold: int  # a weight is dropped when its 16 random bits fall below; else for all
    align: int  # 1: bottom-right, 0: top-left
    mask_fn: str  # registry key, "" is none
    mask_args: tuple[float, ...]
    scale: float
    softcap: float  # 0 is none
    backend: str  # "" lets dispatch choose
    tiles: tuple[int, ...]  # a TileConfig, () leaves it to the backend
    collect_stats: bool

    @property
    def num_sequences(self) -> int:
        return self.q_starts.shape[0]

    @property
    def everywhere(self) -> bool:
        """Whether any pair may be hidden, so that no tile is known to be fully visible."""
        return bool(self.mask_fn) or self.attn_mask is not None

    def tile_config(self) -> TileConfig | None:
        return TileConfig(*self.tiles) if self.tiles else None


class Forward(NamedTuple):
    """What the forward pass of a backend gives."""

    out: Tensor  # (B, S, H, D_v)
    lse: Tensor  # (B, H, S)
    saved: Tensor  # (B, H, 2, S), what the backward pass of the same backend needs
    row_stats: Tensor | None = None  # (2, B, H, S): largest logit and entropy, see flashmod.stats
    tile_stats: Tensor | None = None  # (3, tiles) int32, see flashmod.stats


class Gradients(NamedTuple):
    """What the backward pass of a backend gives, in the shapes and dtypes of the inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None = None
    sink: Tensor | None = None  # (B, H): summed over rows, not over the batch


class Span(NamedTuple):
    """Sequence ``n`` on the host: which rows of which batch row, and its limits as ints."""

    n: int
    q_batch: int
    q_start: int
    kv_batch: int
    kv_start: int
    kv_len: int
    limits: Limits

    @property
    def q_rows(self) -> tuple[int, slice]:
        return self.q_batch, slice(self.q_start, self.q_start + self.limits.q_len)

    @property
    def kv_rows(self) -> tuple[int, slice]:
        return self.kv_batch, slice(self.kv_start, self.kv_start + self.kv_len)


class SequenceTerms(NamedTuple):
    """What a call holds for one sequence beside q, k and v, broadcastable to (H, S, S_kv)."""

    attn_mask: Tensor | None  # (H|1, S|1, S_kv|1)
    sink: Tensor | None  # (H, 1)
    slopes: Tensor | None  # (H, 1, 1)
    labels: tuple[Tensor, ...]  # (S, 1) and (S_kv,), or none
    thresholds: Tensor | None  # (S, 1)

    def at_rows(self, q_idx: Tensor) -> SequenceTerms:
        """The terms of some query rows."""
        mask = self.attn_mask
        if mask is not None and mask.shape[-2] != 1:
            mask = mask.index_select(-2, q_idx)
        labels = self.labels
        if labels:
            labels = (labels[0].index_select(-2, q_idx), labels[1])
        thresholds = self.thresholds
        if thresholds is not None:
            thresholds = thresholds.index_select(-2, q_idx)
        return self._replace(attn_mask=mask, labels=labels, thresholds=thresholds)


def sequence_terms(call: AttentionCall, span: Span) -> SequenceTerms:
    """The terms of one sequence, cut to its lengths."""

    def of(x: Tensor | None, n: int) -> Tensor | None:
        return None if x is None else x[n if x.shape[0] > 1 else 0]

    mask, sink = of(call.attn_mask, span.n), of(call.sink, span.q_batch)
    if mask is not None:
        mask = mask[:, : span.limits.q_len, : span.kv_len]
    slopes = of(call.alibi_slopes, span.n)
    labels = _labels(call, span.q_rows, span.kv_rows)
    thresholds = call.dropout_thresholds
    return SequenceTerms(
        mask,
        None if sink is None else sink[:, None],
        None if slopes is None else slopes[:, None, None],
        (labels[0][:, None], labels[1]) if labels else (),
        None if thresholds is None else thresholds[span.q_rows][:, None],
    )


def batch_terms(call: AttentionCall) -> SequenceTerms:
    """The terms of a call whose sequences are its batch rows, with a batch axis before them all."""
    every = (slice(None), slice(None))
    labels = _labels(call, every, every)
    sink, slopes, thresholds = call.sink, call.alibi_slopes, call.dropout_thresholds
    return SequenceTerms(
        call.attn_mask,
        None if sink is None else sink[..., None],
        None if slopes is None else slopes[..., None, None],
        (labels[0][:, None, :, None], labels[1][:, None, None, :]) if labels else (),
        None if thresholds is None else thresholds[:, None, :, None],
    )


def _labels(call: AttentionCall, q_rows: Any, kv_rows: Any) -> tuple[Tensor, ...]:
    if call.q_labels is None or call.kv_labels is None:
        return ()
    return call.q_labels[q_rows], call.kv_labels[kv_rows]


def spans(call: AttentionCall, q: Tensor, k: Tensor) -> list[Span]:
    """Every sequence of a call as host numbers; synchronises when they live on a device.

    Args:
        q, k: (B, S, H, D) and (B, S_kv, H_kv, D), for their row counts.
    """
    columns = zip(
        call.q_starts.tolist(),
        call.q_lengths.tolist(),
        call.kv_starts.tolist(),
        call.kv_lengths.tolist(),
        call.limits.tolist(),
        strict=True,
    )
    q_rows, kv_rows = max(q.shape[1], 1), max(k.shape[1], 1)
    return [
        Span(
            n,
            *_place(q_start, q_len, q_rows),
            *_place(kv_start, kv_len, kv_rows),
            kv_len,
            sequence_limits(q_len, kv_len, call.align, limits),
        )
        for n, (q_start, q_len, kv_start, kv_len, limits) in enumerate(columns)
    ]


def _place(start: int, length: int, rows: int) -> tuple[int, int]:
    """Batch row and row within it; an empty sequence may start past the last row."""
    return divmod(start, rows) if length else (0, 0)


def sequence_limits(q_len: Any, kv_len: Any, align: int, row: Sequence[Any]) -> Limits:
    """One row of ``AttentionCall.limits`` resolved against its lengths, all ints or all tensors."""
    return Limits(
        q_len,
        on_tensors.diagonal_shift(q_len, kv_len, align),
        row[WINDOW_LEFT],
        row[WINDOW_RIGHT],
        row[PREFIX_LEN],
        row[FIRST_KEY],
        HOST_NAMES["minimum"](row[END_KEY], kv_len),
    )


def bind(
    names: dict[str, Any],
    compiled: Callable[[types.FunctionType], Any] = lambda fn: fn,
    functions: dict[str, Any] | None = None,
) -> types.SimpleNamespace:
    """Give leaf functions the free names of one machine.

    Args:
        names: implementations of ``maximum``, ``minimum``, ``where`` and ``exp`` (and ``tl`` for
            Triton).
        compiled: applied to every bound function, e.g. ``triton.jit``.
        functions: name -> leaf function; the rules by default.
    """
    leaves = vars(rules) if functions is None else functions
    leaves = {name: fn for name, fn in leaves.items() if isinstance(fn, types.FunctionType)}
    scope = {"__builtins__": builtins, **names}
    for name, fn in leaves.items():
        bound = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__)
        bound.__module__, bound.__qualname__ = fn.__module__, fn.__qualname__
        scope[name] = compiled(bound)
    return types.SimpleNamespace(**{name: scope[name] for name in leaves})


def _extreme(clamp: str, builtin: Callable[..., Any], elementwise: Callable[..., Tensor]) -> Any:
    def choose(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return elementwise(a, b)
        if isinstance(a, Tensor):
            return a.clamp(**{clamp: b})
        return b.clamp(**{clamp: a}) if isinstance(b, Tensor) else builtin(a, b)

    return choose


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, Tensor):
        return torch.where(condition, a, b)
    return a if condition else b


def _exp(x: Any) -> Any:
    return x.exp() if isinstance(x, Tensor) else math.exp(x)


HOST_NAMES = {
    "maximum": _extreme("min", max, torch.maximum),
    "minimum": _extreme("max", min, torch.minimum),
    "where": _where,
    "exp": _exp,
}
on_ints = bind(
    {"maximum": max, "minimum": min, "where": lambda c, a, b: a if c else b, "exp": math.exp}
)
on_tensors = bind(HOST_NAMES)
