"""``FlashMultiheadAttention``: torch's module and parameters, our attention."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .extra_keys import ExtraKeys
from .functional import flash_attention, prepare
from .layouts import Layout, Tokens, check_widths
from .masks import Mask
from .nested_input import unnest
from .ops import draw_seed
from .options import OptionalFeatures, Options
from .reference import call_weights
from .spec import TileConfig
from .torch_masks import TorchMasks, what_is_read

_log = logging.getLogger(__name__)
_warned: set[str] = set()


class FlashMultiheadAttention(OptionalFeatures):
    """Multi-head attention with the parameters of ``nn.MultiheadAttention`` and linear memory.

    State dicts load both ways and ``torch.manual_seed`` gives torch's initial values. Differences
    from torch: rows that see no key give ``out_proj.bias`` rather than NaN, ``is_causal`` never
    hides the keys of ``add_bias_kv`` and ``add_zero_attn``, and dropout has another random stream.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first,
            device, dtype: as in torch.
        num_kv_heads: key and value heads, each shared by ``num_heads / num_kv_heads`` query heads;
            ``in_proj_weight`` is then (E + 2 * num_kv_heads * head_dim, E). Default ``num_heads``.
        mask: who may attend to whom, for the life of the module.
        softcap: squeeze scores into (-softcap, softcap); 0 is off.
        alibi: True for ALiBi's standard slopes, or slopes (H,): a buffer outside the state dict.
        sink: add a parameter ``sink`` (H,), at first 0, that joins every softmax as a logit.
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
        softcap: float = 0,
        alibi: bool | Tensor = False,
        sink: bool = False,
        backend: str | None = None,
        tiles: TileConfig | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim,
            batch_first, device, dtype,
        )  # fmt: skip
        options = Options(num_kv_heads, mask, softcap, alibi, sink, backend=backend, tiles=tiles)
        self.configure(options)

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
                torch; (T, E) packed with ``cu_seqlens``; or NestedTensors (N, j, E), strided only
                for self-attention without gradient. key and value default to query.
            key_padding_mask: (N, S), True = hidden key, or numbers added to the scores of each key.
                Limits keys only, as in torch.
            need_weights: also return the attention weights, quadratic in memory. Default: True, as
                in torch, but False for packed and nested input, which have none.
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
            out in query's layout, and weights (N, L, S), (N, H, L, S), or None; the keys of
            ``add_bias_kv`` and ``add_zero_attn`` come last in S.
        Raises:
            RuntimeError: ``is_causal`` without any mask, as in torch.
            ValueError, AssertionError, RuntimeError: shapes that do not fit.
        """
        key = query if key is None else key
        value = key if value is None else value
        tokens = Tokens(key_padding_mask, cu_seqlens, lengths)
        nested = unnest(query, key, value, tokens, self.parameters())
        if nested is not None:
            (query, key, value), tokens = nested.rows, nested.tokens
        if need_weights is None or self.need_weights is False:
            need_weights = self.need_weights is None and not tokens.packed
        tokens.check(query, key, value, attn_mask, self.num_heads, self.batch_first)
        check_widths(query, key, value, self.embed_dim, self.kdim, self.vdim)
        attn_mask, causal = what_is_read(
            attn_mask, is_causal, need_weights, tokens.packed, tokens.rectangular
        )
        layout = Layout(tokens.packed, query.dim() == 3, self.batch_first)
        q, k, v = self.project(*tokens.without_slack(*layout.enter_all(query, key, value)))
        arguments: dict[str, Any] = {
            "mask": self._mask(causal, q.shape[-3], k.shape[-3]),
            "attn_mask": TorchMasks(key_padding_mask, attn_mask).merged(q, k),
            "cu_seqlens_q": tokens.cu_seqlens,
            "cu_seqlens_k": tokens.cu_seqlens_k,
            "lengths_q": lengths,
            "lengths_k": lengths,
            "softcap": self.softcap,
            "alibi_slopes": self.slopes(q.device),
            "learnable_sink": self.sink,
            "dropout_p": self.dropout if self.training and self.drops else 0,
        }
        out, weights = self._attend(q, k, v, need_weights, arguments)
        (out,) = tokens.without_slack(self.merge(out))
        if weights is not None and average_attn_weights:
            weights = weights.mean(-3)
        out = layout.leave(out) if nested is None else nested.nest(out)
        return out, layout.leave_weights(weights)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., E) -> q (..., H, D), k and v (..., H_kv, D)."""
        kv_dim = self.num_kv_heads * self.head_dim
        sizes = (self.embed_dim, kv_dim, kv_dim)
        if self._qkv_same_embed_dim and query is key is value:
            parts = _linear(query, self.in_proj_weight, self.in_proj_bias).split(sizes, -1)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self._qkv_same_embed_dim:
                weights = self.in_proj_weight.split(sizes)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
            parts = tuple(
                _linear(*args) for args in zip((query, key, value), weights, biases, strict=True)
            )
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in parts)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
        """The attention itself; a subclass may put another one here.

        Args:
            arguments: of :func:`flashmod.flash_attention`; ``return_lse`` asks for (out, lse).
        """
        return flash_attention(q, k, v, backend=self.backend, tiles=self.tiles, **arguments)

    def merge(self, x: Tensor) -> Tensor:
        """(..., H, D) -> (..., E) through the output projection."""
        return _linear(x.flatten(-2), self.out_proj.weight, self.out_proj.bias)

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

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, need_weights: bool, arguments: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """out (..., H, D), and weights (N, H, L, S), extra keys last, if they are wanted."""
        dropout_p, weights = arguments["dropout_p"], None
        if need_weights:
            _warn_once("need_weights=True returns a quadratic matrix; pass need_weights=False")
            if dropout_p:
                arguments["dropout_seed"] = draw_seed(q.device)
            ready = prepare(q, k, v, **arguments)
            weights = call_weights(ready.q, ready.k, ready.call)
        extra = ExtraKeys.of(self.bias_k, self.bias_v, self.add_zero_attn, q)
        if extra is None:
            return self.attend(q, k, v, **arguments), weights
        out, lse = self.attend(q, k, v, return_lse=True, **arguments)
        shares = extra.shares(q, lse, self.softcap)
        return extra.append(shares, out, weights, dropout_p)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """With a bias of any dtype, as torch's own fused path takes it."""
    return F.linear(x, weight, None if bias is None else bias.to(weight.dtype))


def _warn_once(message: str) -> None:
    if message not in _warned and not torch.compiler.is_compiling():
        _warned.add(message)
        _log.warning("%s (logging.getLogger('flashmod').setLevel('ERROR') silences this)", message)
