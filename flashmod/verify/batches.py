"""Ragged batches: a call as plain values, its tensors, and what the definition is told of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks import Mask
from . import truth

Sides = tuple[int | None, ...]  # one per sequence


class Spec(NamedTuple):
    """A call as plain values; lengths, sides, prefixes and ids hold one entry per sequence."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    layout: str  # "packed", "padded" or "dense"
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    slack: int = 0  # rows past the last sequence, or beyond the longest length
    causal: tuple[bool, ...] | bool = False
    left: Sides | int | None = None
    right: Sides | int | None = None
    prefix: tuple[int, ...] | int = 0
    align: str = "bottom_right"
    fn: Callable[..., Any] | None = None
    fn_args: tuple[int, ...] = ()
    labels: bool = False
    mask: str = ""  # "bool" or "bias"
    mask_axes: str = ""  # those of "nhqk" that are not broadcast
    softcap: float = 0.0
    slopes: str = ""  # "h" or "nh"
    sink: bool = False
    rate: float = 0.0
    rates: bool = False  # one per query token instead
    seed: int = 0
    ids: tuple[int, ...] | None = None
    scale: float | None = None
    strided: bool = False

    @property
    def num_sequences(self) -> int:
        return len(self.q_lens)

    @property
    def packed(self) -> bool:
        return self.layout == "packed"


class Batch(NamedTuple):
    """The tensors of a spec. What no query may read holds NaN."""

    spec: Spec
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    attn_mask: Tensor | None
    sink: Tensor | None
    slopes: Tensor | None
    labels: tuple[Tensor, Tensor] | None
    rates: Tensor | None

    def to(self, dtype: torch.dtype) -> Batch:
        """Everything that is differentiated in another dtype; rows of lse in 32 bits or more."""
        wide = torch.promote_types(dtype, torch.float32)
        mask = self.attn_mask
        return self._replace(
            q=self.q.to(dtype),
            k=self.k.to(dtype),
            v=self.v.to(dtype),
            grad_out=self.grad_out.to(dtype),
            grad_lse=self.grad_lse.to(wide),
            attn_mask=mask if mask is None or mask.dtype == torch.bool else mask.to(dtype),
            sink=None if self.sink is None else self.sink.to(dtype),
        )

    def on(self, device: str) -> Batch:
        """Every tensor on another device."""
        fields = self._asdict()
        moved: dict[str, Any] = {
            name: x.to(device) for name, x in fields.items() if isinstance(x, Tensor)
        }
        if self.labels is not None:
            moved["labels"] = tuple(x.to(device) for x in self.labels)
        return Batch(**{**fields, **moved})

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.spec.scale is None else self.spec.scale

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``flash_attention``."""
        spec = self.spec
        kwargs: dict[str, Any] = {
            "mask": Mask(
                spec.causal, (spec.left, spec.right), spec.prefix, spec.align,  # type: ignore[arg-type]
                spec.fn, spec.fn_args, self.labels,
            ),
            "attn_mask": self.attn_mask,
            "softmax_scale": spec.scale,
            "softcap": spec.softcap,
            "alibi_slopes": self.slopes,
            "learnable_sink": self.sink,
            "dropout_p": spec.rate if self.rates is None else self.rates,
            "dropout_seed": spec.seed,
        }  # fmt: skip
        if spec.ids is not None:
            kwargs["sequence_ids"] = self._numbers(spec.ids)
        sides = {"q": spec.q_lens, "k": spec.kv_lens}
        if spec.packed:
            ends = {name: [0, *accumulate(lens)] for name, lens in sides.items()}
            kwargs |= {f"cu_seqlens_{name}": self._numbers(x) for name, x in ends.items()}
        elif spec.layout == "padded":
            kwargs |= {f"lengths_{name}": self._numbers(lens) for name, lens in sides.items()}
        return kwargs

    def _numbers(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.q.device)

    def rows(self, n: int, lens: tuple[int, ...]) -> Any:
        """Where sequence ``n`` lies in a tensor of one side."""
        if not self.spec.packed:
            return n, slice(0, lens[n])
        first = sum(lens[:n])
        return slice(first, first + lens[n])

    def sequence(self, n: int) -> truth.Sequence:
        """What the definition needs to know about sequence ``n``."""
        spec, rates = self.spec, self.rates
        left, right, prefix, causal = (
            x[n] if isinstance(x, tuple) else x
            for x in (spec.left, spec.right, spec.prefix, spec.causal)
        )
        q_rows, kv_rows = self.rows(n, spec.q_lens), self.rows(n, spec.kv_lens)
        if rates is None and spec.rate:
            rates = torch.full(self.q.shape[:-2], spec.rate, dtype=torch.float64)
        mask, slopes, labels = self.attn_mask, self.slopes, self.labels
        if mask is not None:
            mask = mask[n if len(mask) > 1 else 0][:, : spec.q_lens[n], : spec.kv_lens[n]]
        return truth.Sequence(
            left=left,
            right=0 if causal else right,
            prefix=prefix or 0,
            bottom_right=spec.align == "bottom_right",
            fn=spec.fn,
            fn_args=spec.fn_args,
            labels=None if labels is None else (labels[0][q_rows], labels[1][kv_rows]),
            mask=mask,
            scale=self.scale,
            softcap=spec.softcap,
            slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[n],
            sink=self.sink,
            rates=None if rates is None else rates[q_rows],
            seed=spec.seed,
            identity=n if spec.ids is None else spec.ids[n],
        )


def build(spec: Spec, seed: int, dtype: torch.dtype = torch.float64) -> Batch:
    """Tensors of a spec, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        if spec.strided and len(shape) > 2:
            shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            return x.transpose(-3, -2).to(dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    q_tokens, kv_tokens = (_tokens(spec, lens) for lens in (spec.q_lens, spec.kv_lens))
    batch = Batch(
        spec,
        q=normal(*q_tokens, spec.heads, spec.dim),
        k=normal(*kv_tokens, spec.kv_heads, spec.dim),
        v=normal(*kv_tokens, spec.kv_heads, spec.v_dim),
        grad_out=normal(*q_tokens, spec.heads, spec.v_dim),
        grad_lse=normal(*q_tokens, spec.heads).transpose(-1, -2),
        attn_mask=_mask(spec, generator, dtype),
        sink=normal(spec.heads) if spec.sink else None,
        slopes=_slopes(spec, generator, dtype),
        labels=None,
        rates=None,
    )
    if spec.labels:
        pair = (torch.randint(0, 3, x, generator=generator) for x in (q_tokens, kv_tokens))
        q_labels, kv_labels = pair
        batch = batch._replace(labels=(q_labels, kv_labels))
    if spec.rates:
        steps = torch.randint(0, 5, q_tokens, generator=generator)
        batch = batch._replace(rates=torch.tensor([0.0, 0.1, 0.5, 0.75, 1.0])[steps])
    _poison(batch)
    return batch


def _tokens(spec: Spec, lens: tuple[int, ...]) -> tuple[int, ...]:
    if spec.packed:
        return (sum(lens) + spec.slack,)
    return len(lens), max(lens) + (spec.slack if spec.layout == "padded" else 0)


def _mask(spec: Spec, generator: torch.Generator, dtype: torch.dtype) -> Tensor | None:
    if not spec.mask:
        return None
    sides = (spec.q_lens, spec.kv_lens)
    longest = [max(lens) if spec.packed else _tokens(spec, lens)[-1] for lens in sides]
    sizes = zip("nhqk", (spec.num_sequences, spec.heads, *longest), strict=True)
    shape = [size if axis in spec.mask_axes else 1 for axis, size in sizes]
    seen = torch.rand(shape, generator=generator) > 0.3
    if spec.mask == "bool":
        return seen
    bias = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return bias.masked_fill(~seen, float("-inf"))


def _slopes(spec: Spec, generator: torch.Generator, dtype: torch.dtype) -> Tensor | None:
    if not spec.slopes:
        return None
    shape = (spec.num_sequences, spec.heads)[2 - len(spec.slopes) :]
    slopes = torch.rand(shape, generator=generator) * 0.3
    return slopes.to(torch.promote_types(dtype, torch.float32))


def _poison(batch: Batch) -> None:
    for x, lens in (
        (batch.q, batch.spec.q_lens),
        (batch.grad_out, batch.spec.q_lens),
        (batch.k, batch.spec.kv_lens),
        (batch.v, batch.spec.kv_lens),
    ):
        real = torch.zeros(x.shape[:-2], dtype=torch.bool)
        for n in range(batch.spec.num_sequences):
            real[batch.rows(n, lens)] = True
        x[~real] = float("nan")
