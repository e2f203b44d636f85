"""A mask drawn: who sees whom and which tiles are computed, as text and as SVG."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import Prepared, prepare
from ..contents import check_contents
from ..masks import Mask
from ..spec import TileConfig
from .panels import Counts, Panel, build_panels
from .svg import picture_svg
from .text import picture_text

__all__ = ["Counts", "MaskPicture", "Panel", "show"]

SHOWN_TILES = TileConfig(16, 16)


@dataclasses.dataclass(frozen=True, eq=False)
class MaskPicture:
    """What :meth:`flashmod.Mask.show` gives: text when printed, a figure in a notebook.

    Args:
        panels: one per sequence, with its cells, tile kinds and counts.
    """

    panels: tuple[Panel, ...]

    @property
    def total(self) -> Counts:
        """Tiles and pairs of all sequences."""
        return Counts.sum(panel.counts for panel in self.panels)

    def svg(self) -> str:
        """A complete SVG document, for light and dark pages."""
        return picture_svg(self.panels, self.total)

    def _repr_svg_(self) -> str:
        return self.svg()

    def __str__(self) -> str:
        return picture_text(self.panels, self.total)

    def __repr__(self) -> str:
        return str(self)


def show(
    mask: Mask,
    lengths: int | Tensor | Sequence[int],
    lengths_k: int | Tensor | Sequence[int] | None = None,
    *,
    tiles: TileConfig | None = None,
    head: int = 0,
    sequence_ids: Tensor | Sequence[int] | None = None,
) -> MaskPicture:
    """The picture of :meth:`flashmod.Mask.show`, which says what the arguments are."""
    tiles = SHOWN_TILES if tiles is None else tiles
    if not isinstance(tiles, TileConfig):
        raise TypeError(f"tiles must be a flashmod.TileConfig, got {tiles!r}")
    if not isinstance(head, int) or head < 0:
        raise ValueError(f"head must be an integer of 0 or more, got {head!r}")
    q_lengths = _lengths("lengths", lengths)
    kv_lengths = q_lengths if lengths_k is None else _lengths("lengths_k", lengths_k)
    if len(q_lengths) != len(kv_lengths):
        raise ValueError(
            f"lengths has {len(q_lengths)} sequences, lengths_k has {len(kv_lengths)}: give one "
            "length per sequence in both"
        )
    if sequence_ids is not None:
        sequence_ids = torch.as_tensor(sequence_ids)
    ready = _prepare(mask, q_lengths, kv_lengths, head + 1, tiles, sequence_ids)
    return MaskPicture(tuple(build_panels(ready.call, ready.q, ready.k, head)))


def _prepare(
    mask: Mask, q_lengths: Tensor, kv_lengths: Tensor, heads: int, tiles: TileConfig, ids: Any
) -> Prepared:
    """A call over operands that hold nothing, with all the checks of a real one."""
    q_labels = kv_labels = None
    if mask.labels is not None:
        q_labels, kv_labels = (x.cpu() for x in mask.labels)
        mask = dataclasses.replace(mask, labels=(q_labels, kv_labels))
    q = _operand("queries", q_lengths, q_labels, heads)
    k = _operand("keys", kv_lengths, kv_labels, heads)
    if q.dim() != k.dim():
        raise ValueError("labels must be (T,) for queries and keys, or (B, S) for both")
    where: dict[str, Any] = {"lengths_q": q_lengths, "lengths_k": kv_lengths}
    if q.dim() == 3:
        where = {"cu_seqlens_q": _cumulative(q_lengths), "cu_seqlens_k": _cumulative(kv_lengths)}
    ready = prepare(q, k, k, mask=mask, sequence_ids=ids, tiles=tiles, **where)
    check_contents(ready.call, ready.q, ready.k)
    return ready


def _operand(name: str, lengths: Tensor, labels: Tensor | None, heads: int) -> Tensor:
    """Rows as the labels have them, (T,) or (B, S); packed without slack where there are none."""
    count, total, longest = len(lengths), int(lengths.sum()), max(lengths.tolist(), default=0)
    shape = (total,) if labels is None else tuple(labels.shape)
    packed = len(shape) == 1 and shape[0] >= total
    padded = len(shape) == 2 and shape[0] == count and shape[1] >= longest
    if not packed and not padded:
        raise ValueError(
            f"labels of {name} have shape {shape}, but the lengths {lengths.tolist()} need "
            f"({total},) or ({count}, {longest}), or longer"
        )
    return torch.zeros(()).expand(*shape, heads, 1)


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()


def _lengths(name: str, value: Any) -> Tensor:
    """(N,) int64 on the CPU."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.dtype == torch.bool or value.dim() > 1:
            raise TypeError(
                f"{name} must hold one integer per sequence, got {value.dtype} of shape "
                f"{tuple(value.shape)}"
            )
        items = value.reshape(-1).tolist()
    else:
        try:
            items = [operator.index(n) for n in (value if isinstance(value, Sequence) else [value])]
        except TypeError as error:
            raise TypeError(f"{name} must be an int or one per sequence, got {value!r}") from error
    if any(n < 0 for n in items):
        raise ValueError(f"{name} must be 0 or more, got {min(items)}")
    return torch.tensor(items, dtype=torch.int64)
