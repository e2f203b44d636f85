"""``F.scaled_dot_product_attention`` seen as a flash attention call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks import Mask
from ..patches import TORCH_SDPA, SdpaPatch


class SdpaCall(NamedTuple):
    """One call of torch's SDPA, which has not run yet."""

    fn: Callable[..., Tensor]
    q: Tensor  # (..., H, S, D)
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    def original(self) -> Tensor:
        return self._run(self.q, self.k, self.v, self.attn_mask)

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as (B, S, H, D), views where batch axes need no expanding."""
        q, k, v = (x.expand(*self._batch(), *x.shape[-3:]) for x in (self.q, self.k, self.v))
        return self.to_rows(q), self.to_rows(k), self.to_rows(v)

    @staticmethod
    def to_rows(x: Tensor) -> Tensor:
        """(..., H, S, D) -> (B, S, H, D); leading axes are one batch."""
        x = x[None] if x.dim() == 3 else x
        return x.flatten(0, -4).transpose(1, 2)

    def from_rows(self, out: Tensor) -> Tensor:
        """Undo :meth:`to_rows` for an output."""
        rows = self.q.shape[-3:-1]
        return out.transpose(1, 2).reshape(*self._batch(), *rows, out.shape[-1])

    def kwargs(self) -> dict[str, Any]:
        """Flash attention's arguments. Where torch takes both masks, a pair must pass both."""
        return {
            "mask": Mask(causal=True, align="top_left") if self.is_causal else None,
            "attn_mask": self._mask_of_rows(),
            "softmax_scale": self.scale,
            "dropout_p": self.dropout_p,
        }

    def _mask_of_rows(self) -> Tensor | None:
        """``attn_mask`` for operands that went through :meth:`to_rows`."""
        mask = self.attn_mask
        if mask is None or self.q.dim() <= 4 or mask.dim() <= 3:
            return mask
        return mask.expand(*self._batch(), *mask.shape[-3:]).flatten(0, -4)

    def repeat(
        self, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, **_: Any
    ) -> Tensor:
        """The call again on (B, S, H, D) operands."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self._run(q, k, v, attn_mask).transpose(1, 2)

    def unknown(self) -> str | None:
        """Why no reference exists for this call."""
        return "the dropout of torch's SDPA cannot be repeated" if self.dropout_p else None

    def _batch(self) -> torch.Size:
        return torch.broadcast_shapes(*(x.shape[:-3] for x in (self.q, self.k, self.v)))

    def _run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        p, causal = self.dropout_p, self.is_causal
        return self.fn(q, k, v, mask, p, causal, scale=self.scale, enable_gqa=self.enable_gqa)


@contextlib.contextmanager
def watching_sdpa(handler: Callable[[SdpaCall], Any]) -> Iterator[None]:
    """While active, ``F.scaled_dot_product_attention`` is ``handler(call)``.

    The attribute of ``torch.nn.functional`` is replaced, so ``nn.MultiheadAttention`` and whoever
    writes ``F.scaled_dot_product_attention`` is seen; a name imported earlier is not. Compiled
    code and nested or sparse tensors go straight through.
    """

    @functools.wraps(TORCH_SDPA)
    def watched(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        call = SdpaCall(
            patch.below, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        plain = all(x.layout == torch.strided and not x.is_nested for x in (query, key, value))
        if not patch.active or torch.compiler.is_compiling() or not plain or query.dim() < 3:
            return call.original()
        return handler(call)

    patch = SdpaPatch(watched)
    with patch.installed():
        yield
