"""A small pre-norm decoder on packed bytes, with its attention exchangeable by name."""

from .attention import ATTENTION, RotarySelfAttention, build_attention
from .config import ModelConfig
from .storage import load, save
from .transformer import Transformer

__all__ = [
    "ATTENTION", "ModelConfig", "RotarySelfAttention", "Transformer", "build_attention", "load",
    "save",
]  # fmt: skip
