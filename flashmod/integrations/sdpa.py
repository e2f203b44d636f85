"""``scaled_dot_product_attention`` with torch's contract, run by flash attention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..functional import flash_attention
from ..masks import Mask
from ..patches import torch_sdpa
from .sdpa_arguments import (
    SdpaArguments,
    check,
    check_types,
    is_causal_bias,
    is_jagged,
    left_to_torch,
)
from .sdpa_shapes import Operands

_log = logging.getLogger(__name__)
_logged: set[str] = set()
_TOP_LEFT, _BOTTOM_RIGHT = Mask(causal=True, align="top_left"), Mask(causal=True)


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
    check_types(given)
    reason = left_to_torch(given)
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
    known = is_causal_bias(given.attn_mask) or any(map(is_jagged, given.operands))
    return not known or has_torch_function((None,))  # true for None: a mode is active


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
    check(given)
    if is_jagged(given.query):
        return _ragged(given)
    operands = Operands.of(*given.operands, bool(given.enable_gqa))
    mask, attn_mask = _masks(given, operands)
    return operands.attend(
        attn_mask,
        lambda q, k, v, attn_mask: flash_attention(
            q, k, v, mask=mask, attn_mask=attn_mask, **_numbers(given)
        ),
    )


def _numbers(given: SdpaArguments) -> dict[str, Any]:
    scale = None if given.scale is None else float(given.scale)
    return {"dropout_p": float(given.dropout_p), "softmax_scale": scale}


def _masks(given: SdpaArguments, operands: Operands) -> tuple[Mask | None, Tensor | None]:
    bias: Any = given.attn_mask
    if not is_causal_bias(bias):
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
    """Jagged (B, H, ragged, D)."""
    q, k, v = (x.transpose(1, 2) for x in given.operands)
    mask = _TOP_LEFT if given.is_causal else None
    return flash_attention(q, k, v, mask=mask, **_numbers(given)).transpose(1, 2)
