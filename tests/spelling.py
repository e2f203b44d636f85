"""The cases, spelled out for ``oracle.py``: what it needs to know of one sequence."""

import numpy as np
from cases import LAYOUTS, Case, Inputs, sizes
from oracle import Scores, sees


def attn_mask_of(case: Case, inputs: Inputs, n: int) -> np.ndarray | None:
    """(H, S, S_kv) of sequence ``n``, every axis written out."""
    layout, mask = LAYOUTS[case.layout], inputs.kwargs.get("attn_mask")
    if mask is None:
        return None
    return mask.expand(sizes(case))[n, :, : layout.q[n], : layout.kv[n]].numpy()


def visible_pairs(case: Case, inputs: Inputs, n: int) -> np.ndarray:
    """(H, S, S_kv) of sequence ``n``, by the written definition."""
    layout, spec = LAYOUTS[case.layout], case.mask_spec
    lengths = layout.q[n], layout.kv[n]
    mask = attn_mask_of(case, inputs, n)
    seen = np.zeros((sizes(case).h, *lengths), dtype=bool)
    for h, i, j in np.ndindex(*seen.shape):
        seen[h, i, j] = sees(i, j, lengths, **spec.of(n))
        if spec.fn is not None:
            labels = (spec.label(n, i), spec.label(n, j)) if spec.label else ()
            seen[h, i, j] &= bool(spec.fn(n, h, i, j, *labels, *spec.fn_args))
        if mask is not None:
            seen[h, i, j] &= bool(seen_by(mask[h, i, j]))
    return seen


def seen_by(mask: np.ndarray) -> np.ndarray:
    """What an attention mask shows: True, or any bias but -inf."""
    return mask if mask.dtype == bool else mask != -np.inf


def scores_of(case: Case, inputs: Inputs, n: int) -> Scores:
    kwargs, layout = inputs.kwargs, LAYOUTS[case.layout]
    slopes, sink = kwargs.get("alibi_slopes"), kwargs.get("learnable_sink")
    if slopes is not None:
        slopes = slopes[n if slopes.dim() == 2 else slice(None)].numpy()
    bias = attn_mask_of(case, inputs, n)
    bottom_right = case.mask_spec.align == "bottom_right"
    return Scores(
        scale=inputs.q.shape[-1] ** -0.5,
        softcap=kwargs.get("softcap", 0.0),
        slopes=slopes,
        shift=layout.kv[n] - layout.q[n] if bottom_right else 0,
        bias=None if bias is None or bias.dtype == bool else bias,
        sink=None if sink is None else sink.numpy(),
    )


def rows_of(case: Case, lengths: tuple[int, ...], n: int) -> tuple:
    """Index of the rows of sequence ``n`` in a tensor of the case's layout."""
    if LAYOUTS[case.layout].kind == "packed":
        return (slice(sum(lengths[:n]), sum(lengths[: n + 1])),)
    return n, slice(lengths[n])


def reachable_pairs(case: Case, inputs: Inputs, n: int) -> np.ndarray:
    """(S, S_kv) of sequence ``n``: the pairs in the key intervals, which a mask of keys narrows."""
    layout, mask = LAYOUTS[case.layout], inputs.kwargs.get("attn_mask")
    lengths, keys = (layout.q[n], layout.kv[n]), None
    if mask is not None and mask.shape[1:3] == (1, 1) and mask.shape[3] > 1:
        shown = np.flatnonzero(seen_by(mask[n if mask.shape[0] > 1 else 0, 0, 0].numpy()))
        keys = (shown[0], shown[-1] + 1) if len(shown) else (0, 0)
    pairs = [
        [sees(i, j, lengths, **case.mask_spec.of(n), keys=keys) for j in range(lengths[1])]
        for i in range(lengths[0])
    ]
    return np.array(pairs, dtype=bool).reshape(lengths)
