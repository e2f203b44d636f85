"""``FlashMultiheadAttention``: torch's module and parameters, our attention."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .functional import flash_attention, prepare
from .layouts import Layout, Tokens, TorchMasks, check_widths
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
        if not isinstance(mask, Mask | None):
            raise TypeError(f"mask must be a Mask or None, got {mask!r}: e.g. Mask(causal=True)")
        if add_bias_kv or add_zero_attn:
            raise NotImplementedError(
                "add_bias_kv and add_zero_attn are not supported yet: leave them False"
            )
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim,
            batch_first, device, dtype,
        )  # fmt: skip
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.mask, self.backend, self.tiles = mask, backend, tiles
        if self.num_kv_heads != num_heads:
            self._shrink_kv(device, dtype)
        if mask is not None or self.num_kv_heads != num_heads:
            # torch's encoder layers skip an attention module in eval mode unless it has a hook;
            # their fused path knows neither this mask nor grouped heads.
            self.register_forward_pre_hook(_always_call)

    def _shrink_kv(self, device: Any, dtype: torch.dtype | None) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and {self.num_heads}"
            )
        if not self._qkv_same_embed_dim:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} needs kdim and vdim equal to embed_dim"
            )
        rows = self.embed_dim + 2 * self.num_kv_heads * self.head_dim
        self.in_proj_weight = nn.Parameter(
            torch.empty(rows, self.embed_dim, device=device, dtype=dtype)
        )
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            self.in_proj_bias = nn.Parameter(torch.zeros(rows, device=device, dtype=dtype))

    def forward(
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
            key_padding_mask: (N, S), True = hidden key, or numbers added to the scores of each key.
                Limits keys only, as in torch.
            need_weights: also return the attention weights, quadratic in memory. Default: True, as
                in torch, but False for packed input, which has none.
            attn_mask: (L, S) or (N * num_heads, L, S), True = hidden, or numbers added to the
                scores; with ``cu_seqlens`` by positions within a sequence. May require grad. It
                holds L * S numbers: ``mask=Mask(...)`` says causal, windows and more without.
            average_attn_weights: average the weights over heads.
            is_causal: top-left causal where no ``attn_mask`` is given. With one it is torch's
                hint: the mask is not read and causal is meant if there is neither padding nor
                ``need_weights``; otherwise the mask decides.
            cu_seqlens: (N + 1,) int32 boundaries of packed self-attention; rows beyond are 0.
            lengths: (N,) valid rows of query, key and value; output rows beyond are 0.
        Returns:
            out in query's layout, and weights (N, L, S), (N, H, L, S), or None.
        Raises:
            RuntimeError: ``is_causal`` without any mask, as in torch.
            NotImplementedError: what is not supported yet.
            ValueError, AssertionError, RuntimeError: shapes that do not fit.
        """
        key = query if key is None else key
        value = key if value is None else value
        tokens = Tokens(key_padding_mask, cu_seqlens, lengths)
        need_weights = not tokens.packed if need_weights is None else need_weights
        tokens.check(query, key, value, attn_mask, self.num_heads, self.batch_first)
        check_widths(query, key, value, self.embed_dim, self.kdim, self.vdim)
        attn_mask, causal = _what_is_read(tokens, attn_mask, is_causal, need_weights)
        layout = Layout(tokens.packed, query.dim() == 3, self.batch_first)
        q, k, v = self.project(*tokens.without_slack(*layout.enter_all(query, key, value)))
        arguments: dict[str, Any] = {
            "mask": self._mask(causal, q.shape[-3], k.shape[-3]),
            "attn_mask": TorchMasks(key_padding_mask, attn_mask).merged(q, k),
            "cu_seqlens_q": cu_seqlens,
            "lengths_q": lengths,
            "lengths_k": lengths,
            "dropout_p": self.dropout if self.training else 0.0,
        }
        if need_weights and arguments["dropout_p"]:
            arguments["dropout_seed"] = draw_seed(q.device)
        (out,) = tokens.without_slack(self.merge(self.attend(q, k, v, **arguments)))
        weights = self._weights(q, k, v, arguments, average_attn_weights) if need_weights else None
        return layout.leave(out), layout.leave_weights(weights)

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
            parts = tuple(
                F.linear(*args) for args in zip((query, key, value), weights, biases, strict=True)
            )
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in parts)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        """The attention itself; a subclass may put another one here."""
        return flash_attention(q, k, v, backend=self.backend, tiles=self.tiles, **arguments)

    def merge(self, x: Tensor) -> Tensor:
        """(..., H, D) -> (..., E) through the output projection."""
        return F.linear(x.flatten(-2), self.out_proj.weight, self.out_proj.bias)

    def _mask(self, is_causal: bool, q_len: int, kv_len: int) -> Mask | None:
        if not is_causal:
            return self.mask
        if self.mask is None:
            return Mask(causal=True, align="top_left")
        if q_len != kv_len and self.mask.align != "top_left":
            raise ValueError(
                f"is_causal is top-left, the module's mask is bottom-right, and {q_len} queries "
                f"meet {kv_len} keys: build the module with mask=Mask(causal=True, ...) instead"
            )
        return dataclasses.replace(self.mask, causal=True)

    def _weights(
        self, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any], average: bool
    ) -> Tensor:
        _warn_once("need_weights=True returns a quadratic matrix; pass need_weights=False")
        ready = prepare(q, k, v, **arguments)
        weights = call_weights(ready.q, ready.k, ready.call)
        return weights.mean(1) if average else weights


def _what_is_read(
    tokens: Tokens, attn_mask: Tensor | None, is_causal: bool, need_weights: bool
) -> tuple[Tensor | None, bool]:
    """The ``attn_mask`` that decides, if any, and whether ``is_causal`` does."""
    if need_weights and tokens.packed:
        raise ValueError("packed input has no rectangular weights: pass need_weights=False")
    if attn_mask is None:
        if is_causal and tokens.rectangular:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        return None, is_causal
    if is_causal and tokens.rectangular and not need_weights:
        return None, True
    return attn_mask, False


def _always_call(module: nn.Module, inputs: Any) -> None:
    """A hook that does nothing: torch's encoder layers call a module that has one."""


def _warn_once(message: str) -> None:
    if message not in _warned and not torch.compiler.is_compiling():
        _warned.add(message)
        _log.warning("%s (logging.getLogger('flashmod').setLevel('ERROR') silences this)", message)
