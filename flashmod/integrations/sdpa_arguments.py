"""The arguments of torch's SDPA: what it refuses, and what flash attention leaves to it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class SdpaArguments(NamedTuple):
    """The arguments of torch's function, in its order."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any
    dropout_p: Any
    is_causal: Any
    scale: Any
    enable_gqa: Any

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self[:4]

    def call(self, function: Callable[..., Any]) -> Any:
        return function(
            *self[:3], attn_mask=self.attn_mask, dropout_p=self.dropout_p,
            is_causal=self.is_causal, scale=self.scale, enable_gqa=self.enable_gqa,
        )  # fmt: skip


def check_types(given: SdpaArguments) -> None:
    """Raise TypeError, as torch's argument parser does, for what is no tensor or no bool."""
    for name, x in given._asdict().items():
        if name in ("query", "key", "value") or (name == "attn_mask" and x is not None):
            kind: tuple[type, ...] = (Tensor,)
        elif name in ("is_causal", "enable_gqa"):
            kind = (bool, torch.SymBool)
        else:
            continue
        if not isinstance(x, kind):
            raise TypeError(
                f"scaled_dot_product_attention(): argument '{name}' must be {kind[0].__name__}, "
                f"not {type(x).__name__}"
            )


def left_to_torch(given: SdpaArguments) -> str | None:
    """Why torch's own function has to run the call; None: flash attention can."""
    if torch.jit.is_tracing():
        return "torch.jit.trace cannot record it"
    return next((reason for x in given.operands if (reason := _foreign(x, given))), None)


def _foreign(x: Tensor, given: SdpaArguments) -> str | None:
    if x.layout == torch.jagged:
        return None if _plain_jagged(given) else "this use of jagged nested tensors is torch's own"
    if x.is_nested:
        return "a nested tensor of the strided layout; build it with layout=torch.jagged"
    if x.layout != torch.strided:
        return f"a tensor of layout {x.layout}"
    if x.dtype not in _DTYPES:
        return f"a tensor of {x.dtype}"
    if type(x).__name__ == "DTensor":
        return "a DTensor, for which flash attention has no sharding rule"
    return None


def _plain_jagged(given: SdpaArguments) -> bool:
    """(B, H, ragged, D) without holes on all sides, and no mask: torch takes none there either."""
    operands: tuple[Any, ...] = given.operands
    plain = all(
        is_jagged(x) and x.dim() == 4 and x._ragged_idx == 2 and x.lengths() is None
        for x in operands
    )
    alike = given.enable_gqa or len({x.shape[1] for x in operands}) == 1
    return plain and alike and given.attn_mask is None


def check(given: SdpaArguments) -> None:
    """What torch refuses whatever the shapes are."""
    q, k, v = given.operands
    if not (q.device == k.device == v.device):
        raise RuntimeError(
            f"query, key and value must share a device, got {q.device}, {k.device} and {v.device}"
        )
    dtypes = [_cast_to(x) for x in (q, k, v)]
    if len(set(dtypes)) > 1:
        raise RuntimeError(
            f"query, key and value must share a dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    p = float(given.dropout_p)
    if not 0.0 <= p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    mask = given.attn_mask
    if mask is None:
        return
    if is_causal_bias(mask):
        if given.is_causal:
            raise ValueError("CausalBias should not be used with causal=True")
        return
    if given.is_causal:
        raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
    if mask.device != q.device:
        raise RuntimeError(f"attn_mask is on {mask.device}, query on {q.device}")
    if mask.dtype not in (torch.bool, torch.float32) and _cast_to(mask) != dtypes[0]:
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
            f"attn_mask.dtype: {mask.dtype} and query.dtype: {dtypes[0]}"
        )


def _cast_to(x: Tensor) -> torch.dtype:
    """The dtype that autocast, if it is on, gives to ``x``."""
    kind = x.device.type
    if not x.is_floating_point() or x.dtype == torch.float64:
        return x.dtype
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def is_jagged(x: Any) -> bool:
    if not isinstance(x, Tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():  # other subclasses are not asked for their layout
        return x.layout == torch.jagged


def is_causal_bias(x: Any) -> bool:
    """Whether this is torch's CausalBias; its module is not imported here, since that is slow."""
    if type(x) in (Tensor, torch.nn.Parameter, type(None)):
        return False
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(x, module.CausalBias)
