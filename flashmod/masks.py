"""The masks a caller can ask for, and the mask functions that backends compile."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from .grammar import grammar_offences
from .spec import HOST_NAMES, UNBOUNDED, TileConfig, bind

if TYPE_CHECKING:
    from .picture import MaskPicture

F = TypeVar("F", bound=Callable[..., Any])
PerSequence = int | Tensor | Sequence[int | None] | None

_registry: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query may attend to.

    With ``diagonal = q_idx + kv_len - q_len`` (or ``q_idx`` when ``align="top_left"``) the visible
    keys are ``diagonal - left <= kv_idx <= diagonal + right``, and ``fn`` must agree.

    Args:
        causal: hide keys after the diagonal. A bool, or one per sequence (N,).
        window: ``(left, right)`` keys visible on either side of the diagonal, which itself is
            always inside; None is unbounded. ``(1, 0)`` sees two keys. Each side may be one value
            per sequence.
        prefix_len: the first keys, which every query sees although they may lie in its future. An
            int, or one per sequence.
        align: ``"bottom_right"`` puts the last query on the last key (decoding, flash-attention);
            ``"top_left"`` puts query 0 on key 0 (torch's ``is_causal``).
        fn: ``fn(batch, head, q_idx, kv_idx, *labels, *fn_args) -> bool``, True = visible,
            FlexAttention's ``mask_mod`` order; positions are those within the sequence. Made of
            operators and ``maximum, minimum, where`` only. What it gets is int32, and its
            arithmetic wraps.
        fn_args: numbers handed to ``fn``.
        labels: ``(q_labels, kv_labels)``, one int32 per token in q's and k's layout, (B, S) or
            (T,): documents, images, tree nodes. ``fn`` receives the pair's two values.
    Raises:
        ValueError: a negative side or prefix, an unknown alignment, a function outside the grammar.
    """

    causal: bool | Tensor | Sequence[bool] = False
    window: tuple[PerSequence, PerSequence] = (None, None)
    prefix_len: int | Tensor | Sequence[int] = 0
    align: Literal["bottom_right", "top_left"] = "bottom_right"
    fn: Callable[..., Any] | None = None
    fn_args: tuple[float, ...] = ()
    labels: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        if self.align not in ("bottom_right", "top_left"):
            raise ValueError(f"align must be 'bottom_right' or 'top_left', got {self.align!r}")
        if not isinstance(self.window, tuple | list) or len(self.window) != 2:
            raise ValueError(f"window must be a pair (left, right), got {self.window!r}")
        sides = {
            "window left": self.window[0],
            "window right": self.window[1],
            "prefix_len": self.prefix_len,
        }
        for name, value in sides.items():
            if isinstance(value, int) and value < 0:
                raise ValueError(
                    f"{name} must be 0 or more, got {value}; None leaves a window side unbounded"
                )
        _check_numbers(self.fn_args)
        if self.labels is not None:
            pair = isinstance(self.labels, tuple | list) and len(self.labels) == 2
            if not pair or not all(isinstance(x, Tensor) for x in self.labels):
                raise TypeError("labels must be a pair of integer tensors (q_labels, kv_labels)")
        if self.fn is not None:
            mask_fn(self.fn)
            if not torch.compiler.is_compiling():  # which cannot trace a look at a signature
                count = 4 + (2 if self.labels is not None else 0) + len(self.fn_args)
                _check_signature(self.fn, count)
        elif self.fn_args or self.labels is not None:
            given = "labels" if self.labels is not None else f"fn_args {self.fn_args}"
            raise ValueError(f"{given} were given without fn, which alone reads them")

    @property
    def fn_key(self) -> str:
        return "" if self.fn is None else _key(self.fn)

    def show(
        self,
        lengths: int | Tensor | Sequence[int],
        lengths_k: int | Tensor | Sequence[int] | None = None,
        *,
        tiles: TileConfig | None = None,
        head: int = 0,
        sequence_ids: Tensor | Sequence[int] | None = None,
    ) -> MaskPicture:
        """Draw who sees whom and which tiles are computed: text in print, a figure in a notebook.

        >>> Mask(causal=True).show(40).total
        Counts(full=3, partial=3, skipped=3, visible=820, pairs=1600)

        Args:
            lengths: queries of every sequence, or of the only one.
            lengths_k: keys likewise; as many as queries by default.
            tiles: tile sizes, 16 x 16 by default. A sequence longer than 64 is drawn by tiles.
            head: the query head that ``fn`` is asked about.
            sequence_ids: (N,), the batch index that ``fn`` sees; 0..N-1 by default.
        """
        from .picture import show

        return show(self, lengths, lengths_k, tiles=tiles, head=head, sequence_ids=sequence_ids)

    def limits(self, num_sequences: int, device: torch.device) -> Tensor:
        """(N, 5) int32: window_left, window_right, prefix_len, first_key, end_key per sequence."""
        left, right = (
            _column(f"window {name}", side, num_sequences, device, missing=UNBOUNDED)
            for name, side in zip(("left", "right"), self.window, strict=True)
        )
        if isinstance(self.causal, int):
            right = 0 if self.causal else right
        else:
            causal = _column("causal", self.causal, num_sequences, device)
            right = torch.where(causal != 0, torch.zeros_like(causal), right)
        prefix = _column("prefix_len", self.prefix_len, num_sequences, device)
        columns = (left, right, prefix, 0, UNBOUNDED)
        return torch.stack([_filled(x, num_sequences, device) for x in columns], 1)


def _column(
    name: str, value: Any, num_sequences: int, device: torch.device, missing: Any = None
) -> Any:
    """One value, or one per sequence, as something that fills a column of limits.

    Args:
        missing: what None stands for; refused by default.
    """
    if value is None and missing is not None:
        return missing
    if isinstance(value, int):
        return min(value, UNBOUNDED)
    if not isinstance(value, Tensor):
        try:
            items = [operator.index(missing if v is None else v) for v in value]
        except TypeError as error:
            wanted = "an int" if missing is None else "an int, None"
            wanted += " or a sequence or integer tensor of one per sequence"
            raise TypeError(f"mask {name} must be {wanted}, got {value!r}") from error
        value = torch.tensor([min(item, UNBOUNDED) for item in items], dtype=torch.int64)
    if value.is_floating_point():
        raise TypeError(f"mask {name} must hold integers, got {value.dtype}")
    if value.shape != (num_sequences,):
        raise ValueError(
            f"mask {name} has shape {tuple(value.shape)}, but the call has {num_sequences} "
            f"sequences: give one value, or {num_sequences}"
        )
    return value.long().clamp(-UNBOUNDED, UNBOUNDED).to(device=device, dtype=torch.int32)


def _filled(x: int | Tensor, num_sequences: int, device: torch.device) -> Tensor:
    """(N,) int32."""
    if isinstance(x, Tensor):
        return x
    return torch.full((num_sequences,), x, dtype=torch.int32, device=device)


def _check_numbers(fn_args: Any) -> None:
    good = isinstance(fn_args, tuple | list) and all(isinstance(x, int | float) for x in fn_args)
    if not good:
        raise TypeError(f"fn_args must be a tuple of numbers, got {fn_args!r}")


def _check_signature(fn: Callable[..., Any], count: int) -> None:
    try:
        inspect.signature(fn).bind(*range(count))
    except TypeError as error:
        raise ValueError(
            f"mask function {fn.__name__!r} must take (batch, head, q_idx, kv_idx, *labels, "
            f"*fn_args), here {count} arguments, got {inspect.signature(fn)}"
        ) from error


def mask_fn(fn: F) -> F:
    """Register a mask function (a decorator, or called on first use) and check its grammar.

    Raises:
        ValueError: naming the line, what stands there, and what to write instead.
    """
    if _registry.get(getattr(fn, "_flashmod_key", "")) is fn:  # functools.wraps copies the key
        return fn
    problems = list(grammar_offences(fn))
    if problems:
        name = getattr(fn, "__name__", repr(fn))
        raise ValueError(
            f"mask function {name!r} cannot run inside kernels: " + "; ".join(problems)
        )
    key, copies = f"{fn.__module__}:{fn.__qualname__}", 1
    while key in _registry:  # another function of that name, e.g. an edited notebook cell
        copies += 1
        key = f"{fn.__module__}:{fn.__qualname__}#{copies}"
    _registry[key] = fn
    fn._flashmod_key = key  # type: ignore[attr-defined]
    return fn


def _key(fn: Callable[..., Any]) -> str:
    return mask_fn(fn)._flashmod_key  # type: ignore[attr-defined]


def registered_mask_fn(key: str) -> Callable[..., Any]:
    """The Python function registered under ``key``."""
    if key not in _registry:
        raise ValueError(
            f"no mask function {key!r} is registered in this process; import its module first"
        )
    return _registry[key]


def mask_fn_on_tensors(key: str) -> Callable[..., Any]:
    """The function bound to torch, for the reference and the torch tiles."""
    fn = registered_mask_fn(key)
    return getattr(bind(HOST_NAMES, functions={fn.__name__: fn}), fn.__name__)
