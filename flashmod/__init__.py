"""Exact, linear-memory attention for ragged batches on any machine."""

from importlib import import_module
from types import ModuleType

from . import measure
from .attention import FlashMultiheadAttention
from .dispatch import UnsupportedAttention
from .dropout import dropout_mask
from .functional import explain, flash_attention
from .integrations.sdpa import scaled_dot_product_attention
from .integrations.sdpa_routing import disable_sdpa, enable_sdpa, route_sdpa
from .masks import Mask, mask_fn
from .merging import merge_attention
from .spec import TileConfig
from .stats import AttentionStats

__version__ = "0.1.0"
__all__ = [
    "AttentionStats",
    "FlashMultiheadAttention",
    "Mask",
    "TileConfig",
    "UnsupportedAttention",
    "disable_sdpa",
    "dropout_mask",
    "enable_sdpa",
    "explain",
    "flash_attention",
    "mask_fn",
    "measure",
    "merge_attention",
    "route_sdpa",
    "scaled_dot_product_attention",
]


def __getattr__(name: str) -> ModuleType:
    """Import ``flashmod.models`` and ``flashmod.report`` on first use; most programs need none."""
    if name in ("models", "report"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
