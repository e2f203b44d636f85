"""Rotary self-attention on packed input, computed in one of three ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flashmod import baselines
from flashmod.attention import FlashMultiheadAttention
from flashmod.masks import Mask
from flashmod.spec import TileConfig

from .config import ModelConfig
from .rotary import Rotary, rotate


class RotarySelfAttention(FlashMultiheadAttention):
    """Causal self-attention within each packed sequence, positions rotated into q and k.

    Args:
        config: sizes, window and dropout.
        backend, tiles: as in :class:`~flashmod.FlashMultiheadAttention`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        backend: str | None = None,
        tiles: TileConfig | None = None,
    ) -> None:
        super().__init__(
            config.embed_dim,
            config.num_heads,
            dropout=config.dropout,
            bias=False,
            batch_first=True,
            num_kv_heads=config.kv_heads,
            mask=Mask(causal=True, window=(config.window, None)),
            backend=backend,
            tiles=tiles,
        )

    def forward(self, x: Tensor, cu_seqlens: Tensor, positions: Rotary) -> Tensor:  # type: ignore[override]
        """Attend within each sequence.

        Args:
            x: (T, E), sequences one behind the other.
            cu_seqlens: (N + 1,) int32.
            positions: the rotation of every row.

        Returns:
            (T, E).
        """
        q, k, v = self.project(x, x, x)
        out = self.attend(
            rotate(q, positions),
            rotate(k, positions),
            v,
            mask=self.mask,
            cu_seqlens_q=cu_seqlens,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.merge(out)


class SdpaSelfAttention(RotarySelfAttention):
    """The same module, computed by torch's SDPA on the padded batch."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        return baselines.sdpa(q, k, v, **kwargs)


class DenseSelfAttention(RotarySelfAttention):
    """The same module, computed as softmax(Q K^T) V on the padded batch."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        return baselines.dense(q, k, v, **kwargs)


ATTENTION: dict[str, type[RotarySelfAttention]] = {
    "flash": RotarySelfAttention,
    "sdpa": SdpaSelfAttention,
    "dense": DenseSelfAttention,
}


def build_attention(
    kind: str,
    config: ModelConfig,
    *,
    backend: str | None = None,
    tiles: Sequence[int] | None = None,
) -> RotarySelfAttention:
    """The attention module of one block; parameters and state dict are those of every kind.

    Args:
        kind: ``"flash"``, ``"sdpa"`` or ``"dense"``.
        config: sizes, window and dropout.
        backend: of flash attention only: ``"triton"``, ``"tiled"`` or ``None`` to choose.
        tiles: of flash attention only: queries and keys per tile, then optionally warps and
            stages; ``None`` for the table's.

    Raises:
        ValueError: for another kind, or for ``backend`` or ``tiles`` with a kind but flash.
    """
    if kind not in ATTENTION:
        raise ValueError(f"attention is {kind!r}; it must be one of {', '.join(ATTENTION)}")
    if kind != "flash" and (backend is not None or tiles is not None):
        raise ValueError(
            f"attention={kind} has no backend and no tiles, got backend={backend!r} and "
            f"tiles={tiles}; leave them out or use attention=flash"
        )
    config_of_tiles = None if tiles is None else TileConfig(*tiles)
    return ATTENTION[kind](config, backend=backend, tiles=config_of_tiles)
