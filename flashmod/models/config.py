"""What a small byte Transformer is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a :class:`~flashmod.models.Transformer`. Plain types only, so it can be saved.

    Args:
        vocab_size: inputs; 256 bytes and the marker before a document's first byte.
        num_targets: outputs; the 256 bytes.
        num_layers: blocks of attention and MLP.
        embed_dim: width of the residual stream.
        num_heads: query heads; ``embed_dim / num_heads`` must be even for rotary positions.
        num_kv_heads: key and value heads, each shared by a group of query heads; ``None``
            for as many as query heads.
        hidden_dim: width of the gated MLP; ``None`` for ``8/3 embed_dim``, rounded up to a
            multiple of 8.
        window: keys each query sees to its left, itself not counted; ``None`` for all.
        dropout: of the attention weights, while training.
        rope_base: largest wavelength of the rotary positions, in units of 2 pi tokens.

    Raises:
        ValueError: for sizes that do not divide, and values out of range.
    """

    vocab_size: int = 257
    num_targets: int = 256
    num_layers: int = 2
    embed_dim: int = 64
    num_heads: int = 4
    num_kv_heads: int | None = None
    hidden_dim: int | None = None
    window: int | None = None
    dropout: float = 0.0
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_targets", "num_layers", "embed_dim", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        if self.embed_dim % (2 * self.num_heads):
            raise ValueError(
                f"model.embed_dim={self.embed_dim} does not give num_heads={self.num_heads} heads "
                f"of an even size; use a multiple of {2 * self.num_heads}"
            )
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}"
            )
        if self.window is not None and self.window < 0:
            raise ValueError(f"model.window is {self.window}; it must be at least 0, or null")
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"model.dropout is {self.dropout}; it must lie between 0 and 1")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def mlp_dim(self) -> int:
        if self.hidden_dim is not None:
            return self.hidden_dim
        return -(-8 * self.embed_dim // 3 // 8) * 8

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Build from plain values, as a checkpoint or ``result.json`` holds them.

        Raises:
            ValueError: for a name that is no field.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"unknown model setting {unknown[0]!r}; known are {', '.join(known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The fields as ints, floats and None."""
        return asdict(self)
