"""Exact, linear-memory attention for ragged batches on any machine."""

from importlib import import_module
from typing import Any

from . import measure
from .attention import FlashMultiheadAttention
from .dispatch import UnsupportedAttention
from .dropout import dropout_mask
from .functional import explain, flash_attention
from .integrations.sdpa import scaled_dot_product_attention
from .integrations.sdpa_routing import disable_sdpa, enable_sdpa, route_sdpa
from .integrations.torch_nn import restore_attention, swap_attention
from .masks import Mask, mask_fn
from .merging import merge_attention
from .spec import TileConfig
from .stats import AttentionStats

__version__ = "0.1.0"
__all__ = [
    "AttentionStats",
    "Comparison",
    "FlashMultiheadAttention",
    "Mask",
    "TileConfig",
    "UnsupportedAttention",
    "compare",
    "disable_sdpa",
    "dropout_mask",
    "enable_sdpa",
    "explain",
    "flash_attention",
    "mask_fn",
    "measure",
    "merge_attention",
    "padding_report",
    "restore_attention",
    "route_sdpa",
    "scaled_dot_product_attention",
    "swap_attention",
]


def __getattr__(name: str) -> Any:
    """Import on first use what most programs do not need."""
    if name in ("models", "report"):
        return import_module(f"{__name__}.{name}")
    if name in ("Comparison", "compare", "padding_report"):
        return getattr(import_module(f"{__name__}.comparison"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
