"""THE table of attention cases: layout x mask x dropout x grouping, and how to build one.

Every backend runs the table, and the reference is checked on it against ``oracle.py``. A new
feature is a new row here, not a new test function. Lengths are odd and tiny so that Triton's
interpreter affords them; they still cross tile borders of 16.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmod import Mask, flash_attention
from flashmod.functional import prepare
from flashmod.reference import dense_attention

SEED = -0x1234_5678_9ABC_DEF1  # negative and wider than 32 bits on purpose


class Layout(NamedTuple):
    """Sequence lengths and how they lie in memory."""

    q: tuple[int, ...]
    kv: tuple[int, ...]
    kind: str = "dense"  # or "padded" (lengths), "packed" (cu_seqlens)
    slack: int = 0  # rows past the last sequence, or beyond the longest length
    hidden: tuple[tuple[int, ...], ...] = ()  # keys hidden by a key-padding mask, per batch row


class MaskSpec(NamedTuple):
    """The arguments of Mask as plain values, one or one per sequence."""

    causal: Any = False
    left: Any = None
    right: Any = None
    prefix: Any = 0
    align: str = "bottom_right"
    fn: Callable[..., Any] | None = None
    fn_args: tuple[float, ...] = ()

    def build(self) -> Mask:
        return Mask(
            self.causal, (self.left, self.right), self.prefix, self.align, self.fn, self.fn_args
        )

    def of(self, n: int) -> dict[str, Any]:
        """The arguments of ``oracle.sees`` for sequence ``n``."""
        causal, left, right, prefix = (
            x[n] if isinstance(x, Sequence) else x
            for x in (self.causal, self.left, self.right, self.prefix)
        )
        if causal:
            right = 0 if right is None else min(right, 0)
        return {
            "left": left,
            "right": right,
            "prefix": prefix,
            "bottom_right": self.align == "bottom_right",
        }


def striped(batch, head, q_idx, kv_idx, period, step):
    """Hides one key in ``period``, others in every sequence, never the query's own."""
    return ((kv_idx + batch * step) % period != 0) | (kv_idx == q_idx)


def by_head(batch, head, q_idx, kv_idx):
    """Another set of keys per head; some rows see nothing."""
    near = (kv_idx - q_idx < 9) & (q_idx - kv_idx < 9)
    return ((kv_idx + q_idx) % (head + 2) == 0) & near


LAYOUTS = {
    "dense": Layout((17,), (17,)),
    "short_q": Layout((5,), (21,)),
    "long_q": Layout((21,), (6,)),
    "ragged": Layout((7, 1, 18), (7, 1, 18), "packed"),
    "cross": Layout((3, 9, 17), (17, 2, 9), "packed"),
    "padded": Layout((9, 4, 17), (5, 17, 3), "padded", slack=2),
    "holes": Layout((6, 6, 6), (18, 18, 18), hidden=((0, 1, 7), tuple(range(18)), (3, 16, 17))),
    "slack": Layout((0, 6, 0, 17), (3, 6, 0, 9), "packed", slack=3),
}
MASKS: dict[str, Callable[[int], MaskSpec]] = {
    "full": lambda n: MaskSpec(),
    "causal": lambda n: MaskSpec(causal=True),
    "causal_top_left": lambda n: MaskSpec(causal=True, align="top_left"),
    "window": lambda n: MaskSpec(left=4, right=2),
    "causal_window": lambda n: MaskSpec(causal=True, left=3),
    "prefix": lambda n: MaskSpec(causal=True, prefix=5),
    "mixed": lambda n: MaskSpec(
        causal=[i % 2 == 0 for i in range(n)],
        left=[(None, 3, 40)[i % 3] for i in range(n)],
        right=[(1, None, 6)[i % 3] for i in range(n)],
        prefix=[(2, 0, 7)[i % 3] for i in range(n)],
    ),
    "mask_fn": lambda n: MaskSpec(fn=striped, fn_args=(3, 2)),
    "head_fn": lambda n: MaskSpec(causal=True, align="top_left", fn=by_head),
}
DROPOUTS = (0.0, 0.25)
GROUPINGS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (3, 1)}  # query heads, key heads
HEAD_DIMS = ((8, 8), (5, 3), (16, 16), (12, 20))  # D, D_v


@dataclass(frozen=True)
class Case:
    layout: str
    mask: str
    dropout_p: float
    grouping: str
    dtype: torch.dtype = torch.float32

    @property
    def id(self) -> str:
        name = f"{self.layout}-{self.mask}-p{self.dropout_p}-{self.grouping}"
        return (
            name
            if self.dtype == torch.float32
            else f"{name}-{str(self.dtype).removeprefix('torch.')}"
        )

    @property
    def spec(self) -> MaskSpec:
        return MASKS[self.mask](len(LAYOUTS[self.layout].q))


class Inputs(NamedTuple):
    """What a case feeds in, and the gradients that come back into it."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    kwargs: dict[str, Any]

    def promoted(self) -> "Inputs":
        return Inputs(*(x.double() for x in self[:5]), self.kwargs)


class Output(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def all_cases() -> list[Case]:
    return [Case(*row) for row in product(LAYOUTS, MASKS, DROPOUTS, GROUPINGS)]


def covering_cases() -> list[Case]:
    """96 of them: every layout x mask, a third of the pairs with and without dropout.

    Dropout and grouping rotate, so that any two ideas still meet.
    """
    cases, groupings = [], list(GROUPINGS)
    for (i, layout), (j, mask) in product(enumerate(LAYOUTS), enumerate(MASKS)):
        rates = (DROPOUTS[:1], DROPOUTS[1:], DROPOUTS)[(i + j) % 3]
        for d, dropout_p in enumerate(rates):
            cases.append(Case(layout, mask, dropout_p, groupings[(i + 2 * j + d) % 3]))
    return cases


def build(case: Case) -> Inputs:
    """Inputs of a case, the same on every machine; a third of the cases has odd strides."""
    number = zlib.crc32(case.id.encode())
    generator = torch.Generator().manual_seed(number)
    layout, (heads, kv_heads) = LAYOUTS[case.layout], GROUPINGS[case.grouping]
    dim, value_dim = HEAD_DIMS[number % len(HEAD_DIMS)]
    strided = number % 3 == 0

    def randn(lengths: tuple[int, ...], heads: int, dim: int) -> Tensor:
        rows = (sum(lengths) if layout.kind == "packed" else max(lengths)) + layout.slack
        batch = () if layout.kind == "packed" else (len(lengths),)
        if not strided:
            x = torch.randn(*batch, rows, heads, dim, generator=generator)
        else:
            x = torch.randn(*batch, heads, rows, 2 * dim, generator=generator)[..., 1::2].transpose(
                -3, -2
            )
        return x.to(case.dtype)

    q, k = randn(layout.q, heads, dim), randn(layout.kv, kv_heads, dim)
    v, grad_out = randn(layout.kv, kv_heads, value_dim), randn(layout.q, heads, value_dim)
    grad_lse = randn(layout.q, heads, 1)[..., 0].transpose(-1, -2)
    grad_lse = grad_lse.to(torch.promote_types(case.dtype, torch.float32))
    return Inputs(q, k, v, grad_out, grad_lse, arguments(case))


def arguments(case: Case) -> dict[str, Any]:
    """The keyword arguments of ``flash_attention`` for a case."""
    layout = LAYOUTS[case.layout]
    kwargs: dict[str, Any] = {
        "mask": case.spec.build(),
        "dropout_p": case.dropout_p,
        "dropout_seed": SEED,
    }
    if layout.kind == "packed":
        kwargs["cu_seqlens_q"], kwargs["cu_seqlens_k"] = cu_seqlens(layout.q), cu_seqlens(layout.kv)
    if layout.kind == "padded":
        kwargs["lengths_q"], kwargs["lengths_k"] = torch.tensor(layout.q), torch.tensor(layout.kv)
    if layout.hidden:
        keep = torch.ones(len(layout.kv), 1, 1, max(layout.kv), dtype=torch.bool)
        for row, keys in zip(keep, layout.hidden, strict=True):
            row[..., list(keys)] = False
        kwargs["attn_mask"] = keep
    return kwargs


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def run(inputs: Inputs, attention: Callable[..., Any] = flash_attention, **options: Any) -> Output:
    """out, lse and the gradients of one attention function, a gradient into lse included."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, lse = attention(*leaves, return_lse=True, **inputs.kwargs, **options)
    grads = torch.autograd.grad((out, lse), leaves, (inputs.grad_out, inputs.grad_lse))
    return Output(out.detach(), lse.detach(), *grads)


def reference_attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **kwargs: Any) -> Any:
    """``flash_attention`` by the dense definition."""
    out, lse = dense_attention(*prepare(q, k, v, **kwargs))
    out, lse = (out[0], lse[0]) if q.dim() == 3 else (out, lse)
    return (out, lse) if return_lse else out


@cache
def expected(case: Case) -> Output:
    """The case in float64 on the same rounded inputs, computed once for all backends."""
    return run(build(case).promoted(), reference_attention)
