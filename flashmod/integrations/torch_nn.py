"""Swap the attention of a model in place, and put torch's back."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from ..attention import FlashMultiheadAttention
from ..masks import Mask
from ..options import Options
from ..spec import TileConfig
from .scan import doors_for

__all__ = ["Layer", "SwapReport", "restore_attention", "swap_attention"]

logger = logging.getLogger(__name__)

_BYPASSED = (
    "in eval without gradients torch's encoder layer runs its own fused code on these weights and "
    "does not call it: same numbers, torch's memory; always_call=True has it called"
)
_WEIGHTS = (
    "callers that leave need_weights at torch's default also get the quadratic weights; "
    "need_weights=False never computes them"
)
_UNMASKED = "it looks like cross-attention: swapped without the mask"


class Layer(NamedTuple):
    """One attention module of a model and what became of it."""

    name: str
    outcome: str
    notes: tuple[str, ...] = ()


@dataclass
class SwapReport:
    """What :func:`swap_attention` did; ``str()`` is the table, ``len()`` how many were swapped."""

    swapped: list[Layer] = field(default_factory=list)
    skipped: list[Layer] = field(default_factory=list)
    doors: list[str] = field(default_factory=list)  # where to go when nothing is swapped

    def __len__(self) -> int:
        return len(self.swapped)

    def __str__(self) -> str:
        lines = [f"flashmod: {len(self.swapped)} swapped, {len(self.skipped)} skipped"]
        layers = [*self.swapped, *self.skipped]
        width = max((len(layer.name) for layer in layers), default=0)
        legend: dict[str, int] = {}
        for layer in layers:
            marks = [str(legend.setdefault(note, len(legend) + 1)) for note in layer.notes]
            mark = f" [{', '.join(marks)}]" if marks else ""
            lines.append(f"  {layer.name:{width}}  {layer.outcome}{mark}")
        lines += [f"  [{number}] {note}" for note, number in legend.items()]
        if self.doors:
            lines.append("  no nn.MultiheadAttention was swapped; other doors:")
            lines += [f"    {door}" for door in self.doors]
        return "\n".join(lines)


class _Found(NamedTuple):
    """An attention module and who calls it."""

    name: str
    module: nn.MultiheadAttention
    attribute: str
    parent: nn.Module | None

    @property
    def title(self) -> str:
        return self.name or "(the model itself)"

    @property
    def is_cross(self) -> bool:
        """Cross-attention by its widths, or by the name it has beside torch's ``self_attn``."""
        named = self.attribute == "multihead_attn" and hasattr(self.parent, "self_attn")
        return named or not self.module._qkv_same_embed_dim


def swap_attention(
    model: nn.Module,
    *,
    mask: Mask | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    need_weights: bool | None = None,
    always_call: bool = False,
    backend: str | None = None,
    tiles: TileConfig | None = None,
) -> SwapReport:
    """Turn every ``nn.MultiheadAttention`` of ``model`` into :class:`FlashMultiheadAttention`.

    In place: the module objects, their parameters, hooks and modes stay the same ones, so that
    optimizers and references to them go on working. :func:`restore_attention` undoes it.

    Args:
        mask: who may attend to whom, in every self-attention. Modules whose kdim or vdim is not
            embed_dim, and those named as in torch's decoder layer, are cross-attention.
        causal, window: short for ``mask=Mask(causal=..., window=...)``.
        need_weights: False never computes the quadratic weights and returns None for them.
        always_call: have torch's encoder layers call the module in eval mode too, instead of
            running their own fused code. A module that differs from torch's is always called.
        backend, tiles: as in :func:`flashmod.flash_attention`.
    Returns:
        What was swapped, what was not and why; also logged, on rank 0.
    Raises:
        ValueError: both ``mask`` and ``causal`` or ``window``, or ``need_weights=True``.
        TypeError: ``mask`` is no Mask.
    """
    if mask is not None and (causal or window is not None):
        raise ValueError(f"give mask or causal and window, got both: {mask} and {causal}, {window}")
    if causal or window is not None:
        mask = Mask(causal=causal, window=window or (None, None))
    options = Options(
        mask=mask, need_weights=need_weights, always_call=always_call, backend=backend, tiles=tiles
    )
    report = SwapReport()
    for found in list(_attentions(model)):
        if type(found.module) is not nn.MultiheadAttention:
            reason = _why_skipped(found.module)
            report.skipped.append(Layer(found.title, "skipped", (reason,)))
            continue
        unmasked = mask is not None and found.is_cross
        module = _convert(found.module, options._replace(mask=None) if unmasked else options)
        notes = ((_UNMASKED,) if unmasked else ()) + _notes(module, found.parent)
        report.swapped.append(Layer(found.title, f"swapped ({_heads(module)})", notes))
    if not any(isinstance(module, _FLASH) for module in model.modules()):
        report.doors = doors_for(model)
    if _is_first_rank():
        logger.log(logging.WARNING if report.doors else logging.INFO, "%s", report)
    return report


def restore_attention(model: nn.Module) -> list[str]:
    """Turn every :class:`FlashMultiheadAttention` back into ``nn.MultiheadAttention``, in place.

    Masks and other options of the modules are gone afterwards; parameters, hooks and modes stay.

    Returns:
        The names of the modules.
    Raises:
        ValueError: a module has a parameter that torch's has not; nothing is changed then.
    """
    swapped = [found for found in _attentions(model) if type(found.module) is _FLASH]
    for found in swapped:
        assert isinstance(found.module, _FLASH)
        parameter = found.module.beyond_torch()
        if parameter is not None:
            raise ValueError(
                f"{'.'.join(filter(None, (found.name, parameter)))} has no place in "
                f"nn.MultiheadAttention: {found.title} has {_heads(found.module)}"
            )
    for found in swapped:
        assert isinstance(found.module, _FLASH)
        found.module.unconfigure()
        _become(found.module, nn.MultiheadAttention)
    return [found.name for found in swapped]


_FLASH = FlashMultiheadAttention


def _convert(module: nn.MultiheadAttention, options: Options) -> FlashMultiheadAttention:
    """The same object, now of our class."""
    _become(module, _FLASH)
    assert isinstance(module, _FLASH)
    try:
        module.configure(options)
    except (TypeError, ValueError):
        _become(module, nn.MultiheadAttention)
        raise
    return module


def _become(module: nn.Module, kind: type[nn.Module]) -> None:
    module.__class__ = kind


def _attentions(model: nn.Module) -> Iterator[_Found]:
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            path, _, attribute = name.rpartition(".")
            yield _Found(name, module, attribute, model.get_submodule(path) if name else None)


def _why_skipped(module: nn.MultiheadAttention) -> str:
    kind = type(module)
    if isinstance(module, _FLASH):
        return "it is flash attention already"
    if kind.__module__.startswith("torch.distributed."):
        return f"it is wrapped as {kind.__qualname__}: swap the model before you shard it"
    own = [name for name in vars(kind) if callable(getattr(kind, name)) and name[:2] != "__"]
    what = f"it defines {', '.join(own)}" if own else "it may mean something else"
    return f"it is a {kind.__module__}.{kind.__qualname__}, not nn.MultiheadAttention: {what}"


def _notes(module: FlashMultiheadAttention, parent: nn.Module | None) -> tuple[str, ...]:
    if isinstance(parent, nn.TransformerEncoderLayer):
        return () if module.always_called else (_BYPASSED,)
    if isinstance(parent, nn.TransformerDecoderLayer) or module.need_weights is False:
        return ()
    return (_WEIGHTS,)


def _heads(module: nn.MultiheadAttention) -> str:
    groups = getattr(module, "num_kv_heads", module.num_heads)
    shared = "" if groups == module.num_heads else f", {groups} key heads"
    sink = "" if getattr(module, "sink", None) is None else ", a sink"
    return f"{module.num_heads} heads of {module.head_dim}{shared}{sink}"


def _is_first_rank() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
