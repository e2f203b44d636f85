"""Models to try ``flashmod-compare`` on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def padded_encoder(
    batch: int = 16, length: int = 2048, padding: float = 0.8, layers: int = 1
) -> tuple[nn.Module, dict[str, Any]]:
    """``nn.TransformerEncoder`` with 8 heads of 64, and a right-padded batch of seeded noise.

    Args:
        padding: share of the batch's positions; lengths differ by up to a half around their mean,
            and one sequence is as long as the batch.
    Returns:
        The model in training mode, and the keyword arguments of its ``forward``.
    """
    generator = torch.Generator().manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    rest = (batch * (1 - padding) - 1) * length / max(batch - 1, 1)
    spread = 0.5 + torch.rand(batch - 1, generator=generator)
    lengths = (rest * spread / spread.mean()).round().clamp(1, length)
    ends = torch.cat([torch.tensor([float(length)]), lengths])[:, None]
    return model, {
        "src": torch.randn(batch, length, 512, generator=generator),
        "src_key_padding_mask": torch.arange(length) >= ends,
    }
