"""What a case adds to its scores: rows of the table in ``cases.py``, and how to build them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

AXES = "nhqk"


class ScoreSpec(NamedTuple):
    """The arguments of a call that change scores, as plain values."""

    softcap: float = 0.0
    slopes: str = ""  # the axes of alibi_slopes: "h" or "nh"
    sink: bool = False
    bias: str = ""  # the axes of attn_mask among AXES that are not broadcast
    hides: bool = False  # some entries, and whole rows, are -inf
    boolean: bool = False  # attn_mask says what is visible and adds nothing


SCORES = {
    "none": ScoreSpec(),
    "softcap": ScoreSpec(softcap=1.5),
    "alibi": ScoreSpec(slopes="h"),
    "alibi_sequences": ScoreSpec(slopes="nh"),
    "sink": ScoreSpec(sink=True),
    "bias": ScoreSpec(bias="nhqk"),
    "bias_of_keys": ScoreSpec(bias="nk"),
    "bias_of_rows": ScoreSpec(bias="hq"),
    "bias_for_heads": ScoreSpec(bias="nqk"),
    "bias_for_batch": ScoreSpec(bias="hqk"),
    "bias_hides": ScoreSpec(bias="nhqk", hides=True),
    "bool": ScoreSpec(bias="nhqk", hides=True, boolean=True),
    "all": ScoreSpec(softcap=2.0, slopes="nh", sink=True, bias="nqk", hides=True),
}


class Sizes(NamedTuple):
    """The size of every axis in AXES: sequences, query heads, longest queries, longest keys."""

    n: int
    h: int
    q: int
    k: int

    def of(self, axes: str) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in axes)

    def broadcast(self, axes: str) -> tuple[int, ...]:
        return tuple(size if axis in axes else 1 for axis, size in zip(AXES, self, strict=True))


def score_arguments(
    spec: ScoreSpec, sizes: Sizes, keep: Tensor | None, randn: Callable[..., Tensor]
) -> dict[str, Any]:
    """The keyword arguments of ``flash_attention`` for one row.

    Args:
        keep: bool (N, 1, 1, K), a key-padding mask that the call carries as well, or None.
        randn: draws a tensor of a shape in the case's dtype and strides.
    """
    kwargs: dict[str, Any] = {"attn_mask": keep}
    if spec.softcap:
        kwargs["softcap"] = spec.softcap
    if spec.slopes:
        slopes = randn(*sizes.of(spec.slopes)).abs() * 0.3
        kwargs["alibi_slopes"] = slopes.to(torch.promote_types(slopes.dtype, torch.float32))
    if spec.sink:
        kwargs["learnable_sink"] = randn(sizes.h)
    if spec.bias:
        shape = sizes.broadcast(spec.bias)
        if keep is not None:
            shape = torch.broadcast_shapes(shape, keep.shape)
        kwargs["attn_mask"] = _attn_mask(spec, randn(*shape), keep)
    return kwargs


def _attn_mask(spec: ScoreSpec, bias: Tensor, keep: Tensor | None) -> Tensor:
    seen = torch.ones(bias.shape, dtype=torch.bool) if keep is None else keep.expand(bias.shape)
    if spec.hides:
        some = bias.sin().frac() > -0.5  # in another order than the sizes of the biases
        head, row = (torch.arange(bias.shape[axis]) for axis in (1, 2))
        seen = seen & some & ((head[:, None] + row) % 5 != 2)[..., None]
    return seen if spec.boolean else bias.masked_fill_(~seen, -torch.inf)  # keeps the strides
