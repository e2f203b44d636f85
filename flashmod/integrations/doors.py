"""Attention that other code calls, and the door to flashmod for each."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import NamedTuple

Traps = Callable[[ast.Call], list[str]]

NEED_WEIGHTS = (
    "need_weights is True unless a caller says otherwise, and then the quadratic weights are "
    "computed too: pass need_weights=False, or swap_attention(model, need_weights=False)"
)
EARLY_IMPORT = (
    "this name was bound to torch's function before any patch: route_sdpa(early_imports=True) "
    "finds it in imported modules, not in functions, classes or objects"
)
_BYPASS = (
    "in eval without gradients torch's encoder layers run their own fused code and do not call "
    "the module: same numbers, torch's memory; swap_attention(model, always_call=True) has it "
    "called"
)
_DECODER = (
    "a causal tgt_mask is an (L, L) matrix; tgt_is_causal=True lets it go unread, but not beside "
    "tgt_key_padding_mask. swap_attention(model.decoder, causal=True) needs none: leave tgt_mask "
    "out then"
)
_TOP_LEFT = (
    "is_causal is top-left: query i sees keys 0 to i, also when lengths differ (a key cache). "
    "The twin keeps that; flash_attention's causal is bottom-right, Mask(causal=True, "
    "align='top_left') is torch's"
)
_EVAL_DROPOUT = "dropout_p applies in eval mode too: there is no training flag"
_FUNCTION_WEIGHTS = (
    "need_weights is True by default, and then torch computes dense attention that nothing routes"
)
_LSE = (
    "return_attn_probs also returns lse: return_lse=True here, and rows without keys give -inf, "
    "not +inf"
)
_WINDOW = "window_size=(-1, -1) is Mask(window=(None, None)); other sides keep their numbers"
_KEPT_ALIGNMENT = (
    "causal is bottom-right in both (flash-attn 2.1 and later) when the lengths differ"
)
_PAGED = "a paged cache (block_table) and rotary embedding inside the call have no door"
_SCORES = (
    "score_mod has no general counterpart: softcap, ALiBi, biases and sinks are arguments, for "
    "any other function of the score stay with FlexAttention"
)
_INDEX = (
    "Flex counts q_idx and kv_idx from 0: when the lengths differ, its causal is "
    "Mask(causal=True, align='top_left')"
)


class Door(NamedTuple):
    """Where some attention is called, what leads from it to flashmod, and what to look out for."""

    roots: tuple[str, ...]  # packages whose name it is; empty for any
    enter: str
    traps: Traps
    builds: bool = False  # a class, entered once the model is built


def _none(call: ast.Call) -> list[str]:
    return []


def _encoder(call: ast.Call) -> list[str]:
    return [_BYPASS]


def _decoder(call: ast.Call) -> list[str]:
    return [_DECODER]


def _sdpa(call: ast.Call) -> list[str]:
    causal, rate = argument(call, "is_causal", 5), argument(call, "dropout_p", 4)
    found = [] if causal is None or _is(causal, False) else [_TOP_LEFT]
    fixed = isinstance(rate, ast.Constant | ast.Attribute | ast.Name)
    return [*found, _EVAL_DROPOUT] if fixed and not _is(rate, 0) else found


def _function(call: ast.Call) -> list[str]:
    weights = argument(call, "need_weights", 15)
    return [] if _is(weights, False) else [_FUNCTION_WEIGHTS]


def _flash(call: ast.Call) -> list[str]:
    causal = argument(call, "causal", None)
    found = [] if causal is None or _is(causal, False) else [_KEPT_ALIGNMENT]
    found += [_WINDOW] if argument(call, "window_size", None) is not None else []
    return found + ([_LSE] if argument(call, "return_attn_probs", None) is not None else [])


def _cache(call: ast.Call) -> list[str]:
    return [*_flash(call), _PAGED]


def _flex(call: ast.Call) -> list[str]:
    scored = argument(call, "score_mod", 3)
    masked = argument(call, "block_mask", 4)
    found = [] if scored is None or _is(scored, None) else [_SCORES]
    return found if masked is None or _is(masked, None) else [*found, _INDEX]


def argument(call: ast.Call, name: str, position: int | None) -> ast.expr | None:
    """An argument by name or position; None where it is not written out."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is None or any(isinstance(given, ast.Starred) for given in call.args):
        return None
    return call.args[position] if len(call.args) > position else None


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == value and node.value is not ...


_SWAP = "flashmod.swap_attention(model) once the model is built"
_ROUTE = (
    "with flashmod.route_sdpa(): around forward and backward, flashmod.enable_sdpa() for the "
    "whole process, or flashmod.scaled_dot_product_attention in its place"
)
_CALL = "flashmod.flash_attention(q, k, v, mask=Mask(causal=..., window=...)), the same layout"
_PACKED = (
    "flashmod.flash_attention(q, k, v, cu_seqlens_q=..., cu_seqlens_k=..., mask=Mask(...)), the "
    "same packed layout; the longest lengths are not needed"
)
_UNPACK = "q, k, v = qkv.unbind(-3), then "
_CACHE = (
    "write the new keys into the cache, then flashmod.flash_attention(q, k_cache, v_cache, "
    "lengths_k=..., mask=Mask(causal=True))"
)
_FLEX = (
    "flashmod.flash_attention with (B, S, H, D) tensors and the mask that the README's table "
    '"From FlexAttention" names'
)
SUBCLASS = "derive it from flashmod.FlashMultiheadAttention, which has the same constructor"
SUBCLASS_TRAP = "swap_attention leaves subclasses alone: they may mean something else"
_FLASH_ATTN: tuple[str, ...] = ()  # its API is copied by many packages

DOORS = {
    "MultiheadAttention": Door(("torch",), _SWAP, _none, builds=True),
    "Transformer": Door(("torch",), _SWAP, lambda c: [_BYPASS, _DECODER], builds=True),
    "TransformerEncoder": Door(("torch",), _SWAP, _encoder, builds=True),
    "TransformerEncoderLayer": Door(("torch",), _SWAP, _encoder, builds=True),
    "TransformerDecoder": Door(("torch",), _SWAP, _decoder, builds=True),
    "TransformerDecoderLayer": Door(("torch",), _SWAP, _decoder, builds=True),
    "scaled_dot_product_attention": Door(("torch", "?"), _ROUTE, _sdpa),
    "multi_head_attention_forward": Door(
        ("torch", "?"), f"it calls F.scaled_dot_product_attention: {_ROUTE}", _function
    ),
    "flash_attn_func": Door(_FLASH_ATTN, _CALL, _flash),
    "flash_attn_qkvpacked_func": Door(_FLASH_ATTN, _UNPACK + _CALL, _flash),
    "flash_attn_varlen_func": Door(_FLASH_ATTN, _PACKED, _flash),
    "flash_attn_varlen_qkvpacked_func": Door(_FLASH_ATTN, _UNPACK + _PACKED, _flash),
    "flash_attn_with_kvcache": Door(_FLASH_ATTN, _CACHE, _cache),
    "flex_attention": Door(("torch", "?"), _FLEX, _flex),
}


def hugging_face(name: str) -> str:
    """The door for ``attn_implementation=name``; an empty name is one that is not a literal."""
    if name == "sdpa":
        return f"it calls F.scaled_dot_product_attention: {_ROUTE}"
    how = f"{name!r} has no door here" if name else "the name is not written out here"
    return f"{how}: attn_implementation='sdpa' has one, {_ROUTE}"


def find(path: str) -> Door | None:
    """The door for what ``path`` names, if there is one."""
    head, _, name = path.rpartition(".")
    door, root = DOORS.get(name), path.partition(".")[0]
    if door is None or head in ("", "?self", "?cls"):  # a definition of the same name
        return None
    return door if not door.roots or root[:1] == "?" in door.roots or root in door.roots else None
