"""Calls that between them compile every variant of the kernels."""

from __future__ import annotations

from typing import Any

import torch

from ..backends import triton as backend
from ..functional import prepare
from ..masks import Mask
from ..spec import TileConfig


def dilated(batch, head, q_idx, kv_idx, step):  # type: ignore[no-untyped-def]
    """A mask function as users write them."""
    return (head < 1) | ((q_idx - kv_idx) % step == 0) | (q_idx // 8 == kv_idx // 8)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"mask": Mask(causal=True)},  # any window or prefix is the same kernel
    "mask_fn": {"mask": Mask(causal=True, fn=dilated, fn_args=(1,))},
    "key_mask": {"attn_mask": torch.ones(2, 1, 1, 64, dtype=torch.bool)},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 0},
}
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def launch_all(
    variant: str, dtype: torch.dtype, head_dim: int, tiles: TileConfig | None = None
) -> None:
    """Launch every kernel once on small tensors; within ``compiling_for`` that compiles them."""
    q = torch.zeros(2, 64, 4, head_dim, dtype=dtype)
    k = torch.zeros(2, 64, 2, head_dim, dtype=dtype)
    ready = prepare(q, k, k, tiles=tiles, **VARIANTS[variant])
    out, _, stats = backend.forward(ready.q, ready.k, ready.v, ready.call)
    backend.backward(out, None, ready.q, ready.k, ready.v, out, stats, ready.call)
