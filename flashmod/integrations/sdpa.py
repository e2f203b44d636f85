"""``scaled_dot_product_attention`` with torch's contract, run by flash attention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import handle_torch_function, has_torch_function

from ..functional import flash_attention
from ..masks import Mask
from ..patches import torch_sdpa
from .sdpa_shapes import Operands

_log = logging.getLogger(__name__)
_logged: set[str] = set()
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TOP_LEFT, _BOTTOM_RIGHT = Mask(causal=True, align="top_left"), Mask(causal=True)


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


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, exact and in linear memory.

    Shapes, broadcasting, dtypes, autocast, output strides and error types are torch's, tensor
    subclasses included: jagged nested tensors and ``CausalBias`` run without being padded or
    written out. An ``attn_mask`` is never expanded. Differences: ``attn_mask`` together with
    ``is_causal`` always raises (some of torch's kernels do, one combines them), keys and values of
    different lengths raise (torch's CPU kernel reads past the end), dropout has another random
    stream, seeded by ``torch.manual_seed`` as well, and ``torch.nn.attention.sdpa_kernel``, which
    chooses among torch's kernels, chooses nothing here.

    What flash attention cannot take goes to torch's function, and a log line says so once: strided
    nested tensors, DTensor, sparse layouts, other dtypes than float16, bfloat16, float32 and
    float64, and calls recorded by ``torch.jit.trace``.

    Args:
        query: (..., H, L, D), or (L, D).
        key, value: (..., H_kv, S, D) and (..., H_kv, S, D_v), broadcast against query.
        attn_mask: broadcastable to (..., H, L, S): bool, True = attend, or float, added. It may
            require grad.
        dropout_p: probability that a weight is dropped, also in eval mode: there is no training
            flag.
        is_causal: query i sees the keys up to i, whatever L and S are (top-left).
        scale: factor of the scores, ``D ** -0.5`` by default; may be 0 or negative.
        enable_gqa: key and value may have fewer heads, each a divisor of query's.
    Returns:
        (..., H, L, D_v); a query that sees no key gives 0.
    Raises:
        RuntimeError, TypeError: where torch's function raises them.
    """
    given = SdpaArguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return run(given, scaled_dot_product_attention, torch_sdpa())


def run(
    given: SdpaArguments,
    public: Callable[..., Any],
    torchs: Callable[..., Any],
    count: Callable[[str | None], None] | None = None,
) -> Any:
    """The call: by whoever overrides it, by ``torchs`` function, or as flash attention.

    Args:
        public: the function that torch function modes and tensor subclasses get to see.
        count: told why torch runs it, or None, where the call is not overridden or compiled.
    """
    if _overridden(given):
        return given.call(partial(handle_torch_function, public, given.tensors))
    _check_types(given)
    reason = _left_to_torch(given)
    if not torch.compiler.is_compiling():
        if reason:
            _log_once(reason)
        if count is not None:
            count(reason)
    return given.call(torchs) if reason else _attend(given)


def _overridden(given: SdpaArguments) -> bool:
    """Whether a torch function mode, or a subclass that is unknown here, decides what runs."""
    if not has_torch_function(given.tensors):
        return False
    known = isinstance(given.attn_mask, CausalBias) or any(map(_is_jagged, given.operands))
    return not known or has_torch_function((None,))  # true for None: a mode is active


def _left_to_torch(given: SdpaArguments) -> str | None:
    """Why torch's own function has to run the call; None: flash attention can."""
    if torch.jit.is_tracing():
        return "torch.jit.trace cannot record it"
    return next((reason for x in given.operands if (reason := _foreign(x, given))), None)


def _log_once(reason: str) -> None:
    if reason not in _logged:
        _logged.add(reason)
        _log.warning(
            "scaled_dot_product_attention runs as torch's own: %s "
            "(logging.getLogger('flashmod').setLevel('ERROR') silences this)",
            reason,
        )


def _attend(given: SdpaArguments) -> Tensor:
    """The call as flash attention; nothing in it is foreign."""
    _check(given)
    if _is_jagged(given.query):
        return _ragged(given)
    operands = Operands.of(*given.operands, bool(given.enable_gqa))
    mask, attn_mask = _masks(given, operands)
    return operands.attend(
        attn_mask,
        lambda q, k, v, attn_mask: flash_attention(
            q, k, v, mask=mask, attn_mask=attn_mask, **_numbers(given)
        ),
    )


def _check_types(given: SdpaArguments) -> None:
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


def _is_jagged(x: Any) -> bool:
    if not isinstance(x, Tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():  # other subclasses are not asked for their layout
        return x.layout == torch.jagged


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
        _is_jagged(x) and x.dim() == 4 and x._ragged_idx == 2 and x.lengths() is None
        for x in operands
    )
    alike = given.enable_gqa or len({x.shape[1] for x in operands}) == 1
    return plain and alike and given.attn_mask is None


def _check(given: SdpaArguments) -> None:
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
    if isinstance(mask, CausalBias):
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


def _numbers(given: SdpaArguments) -> dict[str, Any]:
    scale = None if given.scale is None else float(given.scale)
    return {"dropout_p": float(given.dropout_p), "softmax_scale": scale}


def _masks(given: SdpaArguments, operands: Operands) -> tuple[Mask | None, Tensor | None]:
    bias = given.attn_mask
    if not isinstance(bias, CausalBias):
        return _TOP_LEFT if given.is_causal else None, bias
    sizes = (bias.seq_len_q, bias.seq_len_kv)
    if bias.variant.name == "UPPER_LEFT" or sizes[0] == sizes[1]:
        return _TOP_LEFT, None
    lengths = (operands.q.shape[-2], operands.k.shape[-2])
    if sizes != lengths:
        raise RuntimeError(
            f"attn_mask is causal_lower_right{sizes}, but query and key have lengths {lengths}"
        )
    return _BOTTOM_RIGHT, None


def _ragged(given: SdpaArguments) -> Tensor:
    """Jagged (B, H, ragged, D): the buffers are packed sequences already."""
    rows: list[Any] = [x.transpose(1, 2) for x in given.operands]
    q, k, v = (x.values() for x in rows)
    ends = [x.offsets().to(torch.int32) for x in rows[:2]]
    out = flash_attention(
        q, k, v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1],
        mask=_TOP_LEFT if given.is_causal else None, **_numbers(given),
    )  # fmt: skip
    return torch.nested.nested_tensor_from_jagged(out, rows[0].offsets()).transpose(1, 2)
