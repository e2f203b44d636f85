"""A small pre-norm decoder Transformer on packed bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from .attention import build_attention
from .config import ModelConfig
from .rotary import Rotary, rotary


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (Shazeer 2020)."""

    def __init__(self, embed_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(embed_dim, hidden_dim, bias=False)
        self.up = nn.Linear(embed_dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, embed_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each behind its own norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.embed_dim, eps=1e-6)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(config.embed_dim, eps=1e-6)
        self.mlp = GatedMLP(config.embed_dim, config.mlp_dim)

    def forward(self, x: Tensor, cu_seqlens: Tensor, positions: Rotary) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cu_seqlens, positions)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Predict the next byte of every row of a packed batch.

    Args:
        config: sizes.
        attention: ``"flash"``, ``"sdpa"`` or ``"dense"``; the state dict is the same.
        backend, tiles: of flash attention; see :func:`build_attention`.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: str = "flash",
        *,
        backend: str | None = None,
        tiles: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.blocks = nn.ModuleList(
            Block(config, build_attention(attention, config, backend=backend, tiles=tiles))
            for _ in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.embed_dim, eps=1e-6)
        self.head = nn.Linear(config.embed_dim, config.num_targets, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Logits of every row.

        Args:
            tokens: (T,) int64 below ``vocab_size``.
            cu_seqlens: (N + 1,) int32 cumulative lengths. Positions restart in each sequence,
                and no sequence sees another; rows past the last entry see nothing.

        Returns:
            (T, num_targets).
        """
        head_dim = self.config.embed_dim // self.config.num_heads
        positions = rotary(cu_seqlens, tokens.shape[0], head_dim, self.config.rope_base)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cu_seqlens, positions)
        return self.head(self.norm(x))
