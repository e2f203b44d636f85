"""Calls that between them compile every variant of the kernels."""

from __future__ import annotations

from typing import Any

import torch

from ..arguments import prepare
from ..backends import triton as backend
from ..masks import Mask
from ..spec import TileConfig

_ROWS = 64


def dilated(batch, head, q_idx, kv_idx, step):  # type: ignore[no-untyped-def]
    """A mask function as users write them."""
    return (head < 1) | ((q_idx - kv_idx) % step == 0) | (q_idx // 8 == kv_idx // 8)


def same_label(batch, head, q_idx, kv_idx, q_label, kv_label):  # type: ignore[no-untyped-def]
    """Documents, images, nodes of a tree."""
    return q_label == kv_label


_LABELS = torch.zeros(2, _ROWS, dtype=torch.int32)
_BIAS = torch.zeros(1, 4, _ROWS, _ROWS, requires_grad=True)
_SLOPES, _SINK = torch.ones(4), torch.zeros(4)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"mask": Mask(causal=True)},  # any window or prefix is the same kernel
    "mask_fn": {"mask": Mask(causal=True, fn=dilated, fn_args=(1,))},
    "labels": {"mask": Mask(fn=same_label, labels=(_LABELS, _LABELS))},
    "key_mask": {"attn_mask": torch.ones(2, 1, 1, _ROWS, dtype=torch.bool)},
    "key_bias": {"attn_mask": torch.zeros(2, 1, 1, _ROWS, requires_grad=True)},
    "pair_mask": {"attn_mask": torch.ones(2, 1, _ROWS, _ROWS, dtype=torch.bool)},
    "pair_bias": {"attn_mask": _BIAS},
    "softcap": {"mask": Mask(causal=True), "softcap": 50.0},
    "alibi": {"mask": Mask(causal=True), "alibi_slopes": _SLOPES},
    "sink": {"mask": Mask(causal=True), "learnable_sink": _SINK},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 0},
    "dropout_rates": {"dropout_p": torch.full((2, _ROWS), 0.1), "dropout_seed": 0},
    "stats": {"mask": Mask(causal=True), "return_stats": True},
    "everything": {
        "mask": Mask(causal=True, fn=same_label, labels=(_LABELS, _LABELS)),
        "attn_mask": _BIAS,
        "softcap": 50.0,
        "alibi_slopes": _SLOPES,
        "learnable_sink": _SINK,
        "dropout_p": torch.full((2, _ROWS), 0.1),
        "dropout_seed": 0,
        "return_stats": True,
    },
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
    """Launch every kernel once on small tensors; within ``compiling_for`` that compiles them.

    The gradient of a bias is launched where the variant's bias requires one.
    """
    q = torch.zeros(2, _ROWS, 4, head_dim, dtype=dtype)
    k = torch.zeros(2, _ROWS, 2, head_dim, dtype=dtype)
    ready = prepare(q, k, k, tiles=tiles, **VARIANTS[variant])
    mask = ready.call.attn_mask
    out, _, saved, *_ = backend.forward(*ready)
    mask_grad = mask is not None and mask.requires_grad
    backend.backward(out, None, ready.q, ready.k, ready.v, out, saved, ready.call, mask_grad)
