"""The public operation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import ops
from .arguments import Prepared, dropout_threshold, prepare
from .dispatch import refusals
from .intercept import interceptable
from .masks import Mask
from .spec import TileConfig

__all__ = ["Prepared", "dropout_threshold", "explain", "flash_attention", "prepare"]


@interceptable("flash")
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    attn_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lengths_q: Tensor | None = None,
    lengths_k: Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    sequence_ids: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    tiles: TileConfig | None = None,
) -> Any:
    """Exact attention in memory linear in the number of tokens.

    Online softmax over tiles (Milakov and Gimelshein 2018; Dao et al. 2022), with a backward pass
    that recomputes the tiles from saved row statistics.

    Args:
        q: (B, S, H, D), or (T, H, D) packed when ``cu_seqlens_q`` is given. float16, bfloat16,
            float32 or float64, any strides.
        k, v: (B, S_kv, H_kv, D) and (B, S_kv, H_kv, D_v), or packed likewise; H_kv divides H.
        mask: who may attend to whom; everybody by default.
        attn_mask: (B, 1, 1, S_kv) bool, True = visible: which keys of a batch row are not padding.
            Not for packed input. Other shapes and additive biases are not supported yet.
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32 cumulative lengths of packed sequences, starting
            at 0. ``cu_seqlens_k`` defaults to ``cu_seqlens_q``. Rows past the last entry are slack.
        lengths_q, lengths_k: (B,) valid rows of right-padded input; all rows by default.
        softmax_scale: factor of the logits, ``D ** -0.5`` by default.
        dropout_p: probability that a weight is dropped, in steps of 1/65536. The same weights fall
            for every tile size, backend and layout.
        dropout_seed: int or 0-d int64 tensor; drawn from torch's generator by default.
        sequence_ids: (N,) int32, the batch index that dropout and mask functions see; 0..N-1 by
            default.
        return_lse: also return the natural-log sum of exponentials, differentiable.
        backend: ``"triton"`` or ``"tiled"``; None takes Triton on a GPU and torch tiles elsewhere.
        tiles: tile sizes; the backend's table by default.
    Returns:
        out, shaped like q with D_v in place of D; with ``return_lse`` also lse, (B, H, S) or
        (H, T), float32 (float64 for float64 input). A query that sees no key, a row beyond its
        sequence's length and slack rows give 0, lse -inf and gradient 0.
    Raises:
        ValueError: shapes or contents that do not fit; names the argument and both values.
        TypeError: dtypes.
        NotImplementedError: what is not supported yet, or no backend for the call (with reasons).
    """
    call = prepare(
        q, k, v, mask=mask, attn_mask=attn_mask, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, lengths_q=lengths_q, lengths_k=lengths_k,
        softmax_scale=softmax_scale, dropout_p=dropout_p, dropout_seed=dropout_seed,
        sequence_ids=sequence_ids, backend=backend, tiles=tiles,
    )  # fmt: skip
    out, lse = ops.attend(call.q, call.k, call.v, call.call)
    if q.dim() == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def explain(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> str:
    """Which backend :func:`flash_attention` would take for this call, and why not the others."""
    if kwargs.get("dropout_seed") is None:
        kwargs["dropout_seed"] = 0  # the answer depends on no seed: draw none
    ready = prepare(q, k, v, **kwargs)
    answers = refusals(*ready)
    chosen = next((name for name, reasons in answers.items() if not reasons), None)
    lines = [f"backend: {chosen or 'none'}"]
    lines += [f"  not {name}: {'; '.join(reasons)}" for name, reasons in answers.items() if reasons]
    return "\n".join(lines)
