"""Exact, linear-memory attention for ragged batches on any machine."""

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
]
