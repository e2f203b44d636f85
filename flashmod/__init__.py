"""Exact, linear-memory attention for ragged batches on any machine."""

from importlib import import_module
from types import ModuleType

from . import measure
from .attention import FlashMultiheadAttention
from .dispatch import UnsupportedAttention
from .functional import explain, flash_attention
from .masks import Mask, mask_fn
from .spec import TileConfig

__version__ = "0.1.0"
__all__ = [
    "FlashMultiheadAttention",
    "Mask",
    "TileConfig",
    "UnsupportedAttention",
    "explain",
    "flash_attention",
    "mask_fn",
    "measure",
]


def __getattr__(name: str) -> ModuleType:
    """Import ``flashmod.models`` and ``flashmod.report`` on first use; most programs need none."""
    if name in ("models", "report"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
