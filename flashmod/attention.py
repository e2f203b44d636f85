"""``FlashMultiheadAttention``: torch's module and parameters, our attention."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .functional import flash_attention, prepare
from .masks import Mask
from .ops import draw_seed
from .reference import call_weights
from .spec import TileConfig

_log = logging.getLogger(__name__)
_warned: set[str] = set()


class FlashMultiheadAttention(nn.MultiheadAttention):
    """Multi-head attention with the parameters of ``nn.MultiheadAttention`` and linear memory.

    State dicts load both ways and ``torch.manual_seed`` gives torch's initial values. Differences
    from torch: rows that see no key give ``out_proj.bias`` rather than NaN, and dropout has another
    random stream.

    Args:
        embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first, device, dtype: as in torch.
        add_bias_kv, add_zero_attn: not supported yet; NotImplementedError.
        num_kv_heads: key and value heads, each shared by ``num_heads / num_kv_heads`` query heads;
            ``in_proj_weight`` is then (E + 2 * num_kv_heads * head_dim, E). Default ``num_heads``.
        mask: who may attend to whom, for the life of the module.
        backend, tiles: as in :func:`flashmod.flash_attention`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        mask: Mask | None = None,
        backend: str | None = None,
        tiles: TileConfig | None = None,
    ) -> None:
        if add_bias_kv or add_zero_attn:
            raise NotImplementedError("add_bias_kv and add_zero_attn are not supported yet: leave them False")
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.mask, self.backend, self.tiles = mask, backend, tiles
        if self.num_kv_heads != num_heads:
            self._shrink_kv(device, dtype)
        if mask is not None or self.num_kv_heads != num_heads:
            # torch's encoder layers skip an attention module in eval mode unless it has a hook; their
            # fused path knows neither this mask nor grouped heads.
            self.register_forward_pre_hook(_always_call)

    def _shrink_kv(self, device: Any, dtype: torch.dtype | None) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and {self.num_heads}")
        if not self._qkv_same_embed_dim:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} needs kdim and vdim equal to embed_dim")
        rows = self.embed_dim + 2 * self.num_kv_heads * self.head_dim
        self.in_proj_weight = nn.Parameter(torch.empty(rows, self.embed_dim, device=device, dtype=dtype))
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            self.in_proj_bias = nn.Parameter(torch.zeros(rows, device=device, dtype=dtype))

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query, key, value: (L, N, E), (N, L, E) with ``batch_first``, or unbatched (L, E), as in
                torch; (T, E) packed with ``cu_seqlens``. key and value default to query.
            key_padding_mask: (N, S), True (or -inf) = hidden key. Limits keys only, as in torch.
            need_weights: also return the attention weights, quadratic in memory. Default: True, as
                in torch, but False for packed input, which has none.
            attn_mask: read only as torch reads it together with ``is_causal``; otherwise not
                supported yet: say it with ``mask=Mask(...)``.
            average_attn_weights: average the weights over heads.
            is_causal: top-left causal, as in torch.
            cu_seqlens: (N + 1,) int32 boundaries of packed self-attention; rows beyond are 0.
            lengths: (N,) valid rows of query, key and value; output rows beyond are 0.
        Returns:
            out in query's layout, and weights (N, L, S), (N, H, L, S), or None.
        Raises:
            RuntimeError: ``is_causal`` without any mask, as in torch.
            NotImplementedError: what is not supported yet.
            ValueError, AssertionError: shapes that do not fit.
        """
        key, value = query if key is None else key, (query if key is None else key) if value is None else value
        packed = cu_seqlens is not None
        need_weights = not packed if need_weights is None else need_weights
        self._check(query, key_padding_mask, attn_mask, is_causal, need_weights, cu_seqlens, lengths)
        if packed or query.dim() == 2:
            if packed and (key.shape[0] != query.shape[0] or value.shape[0] != query.shape[0]):
                raise ValueError(f"cu_seqlens packs self-attention: query has {query.shape[0]} rows, key {key.shape[0]}")
        else:
            F._mha_shape_check(query, key, value, key_padding_mask, None, self.num_heads)
        to_rows = _Layout(packed, query.dim() == 3, self.batch_first)
        inputs = to_rows.enter_all(query, key, value)
        valid = _valid_rows(inputs[0], cu_seqlens, lengths)
        if valid is not None:  # what lies in slack rows must not reach the weight gradients
            same = inputs[0] is inputs[1] is inputs[2]
            first = torch.where(valid, inputs[0], 0.0)
            inputs = (first,) * 3 if same else (first, *(torch.where(valid, x, 0.0) for x in inputs[1:]))
        q, k, v = self.project(*inputs)
        arguments: dict[str, Any] = {
            "mask": self._mask(is_causal, q.shape[-3], k.shape[-3]),
            "attn_mask": _visible_keys(key_padding_mask, query, k),
            "cu_seqlens_q": cu_seqlens,
            "lengths_q": lengths,
            "lengths_k": lengths,
            "dropout_p": self.dropout if self.training else 0.0,
        }
        if need_weights and arguments["dropout_p"]:
            arguments["dropout_seed"] = draw_seed(q.device)
        out = self.merge(self.attend(q, k, v, **arguments))
        if valid is not None:
            out = torch.where(valid, out, 0.0)
        weights = self._weights(q, k, v, arguments, average_attn_weights) if need_weights else None
        return to_rows.leave(out), to_rows.leave_weights(weights)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., E) -> q (..., H, D), k and v (..., H_kv, D)."""
        kv_dim = self.num_kv_heads * self.head_dim
        sizes = (self.embed_dim, kv_dim, kv_dim)
        if self._qkv_same_embed_dim and query is key is value:
            parts = F.linear(query, self.in_proj_weight, self.in_proj_bias).split(sizes, -1)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self._qkv_same_embed_dim:
                weights = self.in_proj_weight.split(sizes)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
            parts = tuple(F.linear(*args) for args in zip((query, key, value), weights, biases, strict=True))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in parts)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        """The attention itself; a subclass may put another one here."""
        return flash_attention(q, k, v, backend=self.backend, tiles=self.tiles, **arguments)

    def merge(self, x: Tensor) -> Tensor:
        """(..., H, D) -> (..., E) through the output projection."""
        return F.linear(x.flatten(-2), self.out_proj.weight, self.out_proj.bias)

    def _check(
        self, query: Tensor, key_padding_mask: Any, attn_mask: Any, is_causal: bool, weights: bool, cu: Any, lengths: Any
    ) -> None:
        if query.is_nested:
            raise NotImplementedError(
                "NestedTensor input is not supported yet: build nn.TransformerEncoder with enable_nested_tensor=False"
            )
        if sum(x is not None for x in (key_padding_mask, cu, lengths)) > 1:
            raise ValueError("give one of key_padding_mask, cu_seqlens and lengths: each says where the tokens are")
        if weights and cu is not None:
            raise ValueError("packed input has no rectangular weights: pass need_weights=False")
        if is_causal and attn_mask is None and key_padding_mask is None and cu is None and lengths is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        if attn_mask is not None and (weights or key_padding_mask is not None or not is_causal):
            raise NotImplementedError(
                f"attn_mask of shape {tuple(attn_mask.shape)} is not supported yet: say it with "
                "FlashMultiheadAttention(..., mask=Mask(...)), or pass is_causal=True and need_weights=False"
            )

    def _mask(self, is_causal: bool, q_len: int, kv_len: int) -> Mask | None:
        if not is_causal:
            return self.mask
        if self.mask is None:
            return Mask(causal=True, align="top_left")
        if q_len != kv_len and self.mask.align != "top_left":
            raise ValueError(
                f"is_causal is top-left, the module's mask is bottom-right, and {q_len} queries meet {kv_len} keys: "
                "build the module with mask=Mask(causal=True, ...) instead"
            )
        return dataclasses.replace(self.mask, causal=True)

    def _weights(self, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any], average: bool) -> Tensor:
        _warn_once("need_weights=True returns weights that are quadratic in memory; pass need_weights=False")
        ready = prepare(q, k, v, **arguments)
        weights = call_weights(ready.q, ready.k, ready.call)
        return weights.mean(1) if average else weights


class _Layout:
    """torch's input layouts as rows: (N, L, E), or (T, E) when packed."""

    def __init__(self, packed: bool, batched: bool, batch_first: bool) -> None:
        self.packed, self.batched = packed, batched
        self.swap = batched and not batch_first

    def enter_all(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        done: dict[int, Tensor] = {}  # the same object stays the same object: one projection serves all
        for x in tensors:
            if id(x) not in done:
                done[id(x)] = x if self.packed else x.transpose(0, 1) if self.swap else x if self.batched else x[None]
        return tuple(done[id(x)] for x in tensors)

    def leave(self, x: Tensor) -> Tensor:
        return x if self.packed else x.transpose(0, 1).contiguous() if self.swap else x if self.batched else x[0]

    def leave_weights(self, weights: Tensor | None) -> Tensor | None:
        return weights if weights is None or self.batched else weights[0]


def _always_call(module: nn.Module, inputs: Any) -> None:
    """A hook that does nothing: torch's encoder layers call a module that has one."""


def _valid_rows(x: Tensor, cu_seqlens: Tensor | None, lengths: Tensor | None) -> Tensor | None:
    """(..., L, 1) bool: rows that belong to a sequence; None when all do."""
    rows = torch.arange(x.shape[-2], device=x.device)
    if cu_seqlens is not None:
        return (rows < cu_seqlens[-1:])[:, None]
    if lengths is not None:
        return (rows < lengths.to(x.device)[:, None])[..., None]
    return None


def _visible_keys(key_padding_mask: Tensor | None, query: Tensor, k: Tensor) -> Tensor | None:
    """torch's key_padding_mask (True or -inf = hidden) as ours: (N, 1, 1, S), True = visible."""
    if key_padding_mask is None:
        return None
    mask = F._canonical_mask(key_padding_mask, "key_padding_mask", None, "", query.dtype)
    if mask.shape[-1] != k.shape[-3]:
        raise AssertionError(f"Expected key_padded_mask.shape[1] to be {k.shape[-3]}, but got {mask.shape[-1]}")
    visible = mask == 0
    binary = (visible | (mask == float("-inf"))).all()
    if mask.device.type != "cpu":
        torch._assert_async(binary, "key_padding_mask must hold 0 and -inf only")
    elif not torch.compiler.is_compiling() and not binary:
        raise NotImplementedError("a key_padding_mask with other values than 0 and -inf is not supported yet")
    return visible.reshape(-1, 1, 1, mask.shape[-1])


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _log.warning("%s (logging.getLogger('flashmod').setLevel('ERROR') silences this)", message)
