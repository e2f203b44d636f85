"""What one attention call means, free of any backend. Everything here is immutable."""

from __future__ import annotations

import builtins
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
    """

    q_starts: Tensor  # (N,) int32
    q_lengths: Tensor  # (N,) int32
    kv_starts: Tensor  # (N,) int32
    kv_lengths: Tensor  # (N,) int32
    sequence_ids: Tensor  # (N,) int32, the batch index that dropout and mask functions see
    limits: Tensor  # (N, 5) int32: window_left, window_right, prefix_len, first_key, end_key
    key_mask: Tensor | None  # (B, S_kv) bool, True = visible
    dropout_seed: Tensor | None  # 0-d int64; None is no dropout
    dropout_threshold: int  # a weight is dropped when its 16 random bits fall below
    align: int  # 1: bottom-right, 0: top-left
    mask_fn: str  # registry key, "" is none
    mask_args: tuple[float, ...]
    scale: float
    backend: str  # "" lets dispatch choose
    tiles: tuple[int, ...]  # a TileConfig, () leaves it to the backend

    @property
    def num_sequences(self) -> int:
        return self.q_starts.shape[0]

    @property
    def keep_scale(self) -> float:
        """Factor of kept weights: one over the exact keep probability."""
        kept = DROPOUT_STEPS - self.dropout_threshold
        return DROPOUT_STEPS / kept if kept else 0.0

    def tile_config(self) -> TileConfig | None:
        return TileConfig(*self.tiles) if self.tiles else None


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
        names: implementations of ``maximum``, ``minimum`` and ``where`` (and ``tl`` for Triton).
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


HOST_NAMES = {
    "maximum": _extreme("min", max, torch.maximum),
    "minimum": _extreme("max", min, torch.minimum),
    "where": _where,
}
on_ints = bind({"maximum": max, "minimum": min, "where": lambda c, a, b: a if c else b})
on_tensors = bind(HOST_NAMES)
