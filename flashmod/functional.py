"""The public operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops
from .arguments import Prepared, prepare
from .dispatch import choose_backend, refusals
from .intercept import interceptable
from .masks import Mask
from .nested import takes_jagged
from .operands import dropout_threshold
from .spec import TileConfig
from .stats import read_stats

__all__ = ["Prepared", "dropout_threshold", "explain", "flash_attention", "prepare"]


# The defaults are int: Dynamo makes an input of every float, and under dynamic=True traces twice.
@takes_jagged
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
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    dropout_p: float | Tensor = 0,
    dropout_seed: int | Tensor | None = None,
    sequence_ids: Tensor | None = None,
    return_lse: bool = False,
    return_stats: bool = False,
    backend: str | None = None,
    tiles: TileConfig | None = None,
) -> Any:
    """Exact attention in memory linear in the number of tokens.

    Online softmax over tiles (Milakov and Gimelshein 2018; Dao et al. 2022), with a backward pass
    that recomputes the tiles from saved row statistics.

    Args:
        q: (B, S, H, D), or (T, H, D) packed when ``cu_seqlens_q`` is given, or a NestedTensor
            (B, j, H, D) of layout torch.jagged. float16, bfloat16, float32 or float64, any strides.
        k, v: (B, S_kv, H_kv, D) and (B, S_kv, H_kv, D_v), or packed likewise; H_kv divides H.
        mask: who may attend to whom; everybody by default.
        attn_mask: bool, True = visible, or a bias added to the scores (-inf hides), broadcastable
            to (B, H, S, S_kv); packed, to (N, H, longest, longest) by positions within a sequence.
            Broadcast axes cost no memory. One value per key, as for padding, also keeps hidden
            keys at both ends from being visited. A bias may require grad.
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32 cumulative lengths of packed sequences, starting
            at 0. ``cu_seqlens_k`` defaults to ``cu_seqlens_q``. Rows past the last entry are slack.
        lengths_q, lengths_k: (B,) valid rows of right-padded input; all rows by default.
        softmax_scale: factor of the logits, ``D ** -0.5`` by default.
        softcap: squeeze scores into (-softcap, softcap) by ``softcap * tanh(score / softcap)``;
            0 is off.
        alibi_slopes: (H,) or (N, H), subtracts ``slope * |diagonal - kv_idx|`` after the cap.
        learnable_sink: (H,) logits that join the denominator and lse, with gradient.
        dropout_p: probability that a weight is dropped, in steps of 1/65536, or one per query
            token, (B, S) or (T,). The same weights fall for every tile size, backend and layout.
        dropout_seed: int or 0-d int64 tensor; drawn from torch's generator by default.
        sequence_ids: (N,) int32, the batch index that dropout and mask functions see; 0..N-1 by
            default.
        return_lse: also return the natural-log sum of exponentials, differentiable.
        return_stats: also return :class:`flashmod.AttentionStats`; not under torch.compile.
        backend: ``"triton"`` or ``"tiled"``; None takes Triton on a GPU and torch tiles elsewhere.
        tiles: tile sizes; the backend's table by default.
    Returns:
        out, shaped like q with D_v in place of D; with ``return_lse`` also lse, (B, H, S) or
        (H, T), float32 (float64 for float64 input); with ``return_stats`` also the statistics, in
        this order. For NestedTensors out has q's offsets and lse is (H, T). A query that sees no
        key gives 0, lse -inf (or the sink) and gradient 0; a row beyond its sequence's length and
        slack rows give 0 and lse -inf.
    Raises:
        ValueError: shapes or contents that do not fit; names the argument and both values.
        TypeError: dtypes.
        NotImplementedError: what is not supported yet, or no backend for the call (with reasons).
    """
    if return_stats and torch.compiler.is_compiling():
        raise NotImplementedError("return_stats cannot be traced: call it outside torch.compile")
    ready = prepare(
        q, k, v, mask=mask, attn_mask=attn_mask, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, lengths_q=lengths_q, lengths_k=lengths_k,
        softmax_scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes,
        learnable_sink=learnable_sink, dropout_p=dropout_p, dropout_seed=dropout_seed,
        sequence_ids=sequence_ids, return_stats=return_stats, backend=backend, tiles=tiles,
    )  # fmt: skip
    packed = q.dim() == 3
    forward = ops.attend(*ready)
    results: list[Any] = [forward.out, forward.lse] if return_lse else [forward.out]
    if packed:
        results = [x[0] for x in results]
    if return_stats:
        used = choose_backend(*ready).forward_tiles(ready.q, ready.v, ready.call)
        results.append(read_stats(ready.call, forward, ready.q.shape[2], used, packed))
    return tuple(results) if len(results) > 1 else results[0]


@takes_jagged
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
