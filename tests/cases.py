"""THE table of attention cases: layout x mask x scores x dropout x grouping, and how to build one.

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
from scores import SCORES, ScoreSpec, Sizes, score_arguments
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

    def tokens(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """The leading axes of a tensor of one side."""
        if self.kind == "packed":
            return (sum(lengths) + self.slack,)
        return len(lengths), max(lengths) + self.slack

    def per_token(self, lengths: tuple[int, ...], of: Callable[[int, int], int]) -> Tensor:
        """``of(n, position)`` for every token of one side; large numbers in slack."""
        x = torch.full(self.tokens(lengths), 1 << 20)
        for n, length in enumerate(lengths):
            first = sum(lengths[:n])
            rows = x[first : first + length] if self.kind == "packed" else x[n, :length]
            rows.copy_(torch.tensor([of(n, i) for i in range(length)]))
        return x


class MaskSpec(NamedTuple):
    """The arguments of Mask as plain values, one or one per sequence."""

    causal: Any = False
    left: Any = None
    right: Any = None
    prefix: Any = 0
    align: str = "bottom_right"
    fn: Callable[..., Any] | None = None
    fn_args: tuple[float, ...] = ()
    label: Callable[[int, int], int] | None = None  # of a sequence and a position

    def build(self, layout: Layout) -> Mask:
        labels = None
        if self.label is not None:
            q, k = (layout.per_token(x, self.label) for x in (layout.q, layout.kv))
            labels = q, k.int()
        sides = (self.left, self.right)
        return Mask(self.causal, sides, self.prefix, self.align, self.fn, self.fn_args, labels)

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


def same_document(batch, head, q_idx, kv_idx, q_label, kv_label):
    return q_label == kv_label


def document(n: int, position: int) -> int:
    return (position + n) // 6


def text_and_images(batch, head, q_idx, kv_idx, q_label, kv_label, reach):
    """Causal text with a reach, tokens of one image see each other; 0 is text."""
    past = (kv_idx <= q_idx) & (kv_idx > q_idx - reach)
    return past | ((q_label == kv_label) & (q_label > 0))


def image(n: int, position: int) -> int:
    run = (position + 2 * n) // 4
    return run if run % 3 else 0


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
    "documents": lambda n: MaskSpec(causal=True, fn=same_document, label=document),
    "images": lambda n: MaskSpec(fn=text_and_images, fn_args=(9,), label=image),
}
PER_TOKEN = -1.0  # stands for one rate per query token
RATES = (0.0, 0.1, 0.5, 0.75, 1.0)
DROPOUTS = (0.0, 0.25, PER_TOKEN)
GROUPINGS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (3, 1)}  # query heads, key heads
HEAD_DIMS = ((8, 8), (5, 3), (16, 16), (12, 20))  # D, D_v


AXES = {
    "layout": LAYOUTS,
    "mask": MASKS,
    "scores": SCORES,
    "dropout_p": DROPOUTS,
    "grouping": GROUPINGS,
}


@dataclass(frozen=True)
class Case:
    layout: str
    mask: str
    dropout_p: float
    grouping: str
    scores: str = "none"
    dtype: torch.dtype = torch.float32

    @property
    def id(self) -> str:
        rate = "tokens" if self.dropout_p == PER_TOKEN else f"p{self.dropout_p}"
        parts = [self.layout, self.mask, rate, self.grouping]
        parts += [self.scores] if self.scores != "none" else []
        parts += [str(self.dtype).removeprefix("torch.")] if self.dtype != torch.float32 else []
        return "-".join(parts)

    @property
    def mask_spec(self) -> MaskSpec:
        return MASKS[self.mask](len(LAYOUTS[self.layout].q))

    @property
    def score_spec(self) -> ScoreSpec:
        return SCORES[self.scores]


class Inputs(NamedTuple):
    """What a case feeds in, and the gradients that come back into it."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    kwargs: dict[str, Any]

    def promoted(self) -> "Inputs":
        scores = {name: self.kwargs.get(name) for name in ("attn_mask", "learnable_sink")}
        wide = {n: x.double() for n, x in scores.items() if x is not None and x.is_floating_point()}
        return Inputs(*(x.double() for x in self[:5]), self.kwargs | wide)


class Output(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class ScoredOutput(NamedTuple):
    """What a call with a bias or a sink gives; None where it has only one of them."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsink: Tensor | None


def all_cases() -> list[Case]:
    return [
        Case(layout, mask, dropout_p, grouping, scores)
        for layout, mask, scores, dropout_p, grouping in product(*AXES.values())
    ]


def common_cases() -> list[Case]:
    """A third of them: every layout x mask x scores x dropout; grouping rotates."""
    groupings = list(GROUPINGS)
    rows = list(product(LAYOUTS, MASKS, SCORES, DROPOUTS))
    return [
        Case(layout, mask, dropout_p, groupings[(i + i // 3) % 3], scores)
        for i, (layout, mask, scores, dropout_p) in enumerate(rows)
    ]


def covering_cases() -> list[Case]:
    """143 of them: every mask x scores; layout, dropout and grouping rotate.

    Any two rows of different axes still meet.
    """
    layouts, groupings = list(LAYOUTS), list(GROUPINGS)
    return [
        Case(
            layouts[(i + j) % len(layouts)],
            mask,
            DROPOUTS[(j + i // 3) % len(DROPOUTS)],
            groupings[(i + j // 3) % len(groupings)],
            scores,
        )
        for (i, mask), (j, scores) in product(enumerate(MASKS), enumerate(SCORES))
    ]


def build(case: Case) -> Inputs:
    """Inputs of a case, the same on every machine; a third of the cases has odd strides."""
    number = zlib.crc32(case.id.encode())
    generator = torch.Generator().manual_seed(number)
    layout, (heads, kv_heads) = LAYOUTS[case.layout], GROUPINGS[case.grouping]
    dim, value_dim = HEAD_DIMS[number % len(HEAD_DIMS)]

    def randn(*shape: int) -> Tensor:
        if number % 3:
            return torch.randn(*shape, generator=generator).to(case.dtype)
        *batch, rows, heads, dim = (1,) * (3 - len(shape)) + shape
        x = torch.randn(*batch, heads, rows, 2 * dim, generator=generator).to(case.dtype)
        return x[..., 1::2].transpose(-3, -2).view(shape)

    q_tokens, kv_tokens = layout.tokens(layout.q), layout.tokens(layout.kv)
    q, k = randn(*q_tokens, heads, dim), randn(*kv_tokens, kv_heads, dim)
    v, grad_out = randn(*kv_tokens, kv_heads, value_dim), randn(*q_tokens, heads, value_dim)
    grad_lse = randn(*q_tokens, heads).transpose(-1, -2)
    grad_lse = grad_lse.to(torch.promote_types(case.dtype, torch.float32))
    kwargs = arguments(case) | score_arguments(case.score_spec, sizes(case), _keep(layout), randn)
    return Inputs(q, k, v, grad_out, grad_lse, kwargs)


def sizes(case: Case) -> Sizes:
    """The axes of attn_mask: padded rows count, since they have a place in dense tensors."""
    layout = LAYOUTS[case.layout]
    slack = 0 if layout.kind == "packed" else layout.slack
    heads = GROUPINGS[case.grouping][0]
    return Sizes(len(layout.q), heads, max(layout.q) + slack, max(layout.kv) + slack)


def arguments(case: Case) -> dict[str, Any]:
    """The keyword arguments of ``flash_attention`` for a case, but those of its scores."""
    layout = LAYOUTS[case.layout]
    kwargs: dict[str, Any] = {
        "mask": case.mask_spec.build(layout),
        "dropout_p": case.dropout_p,
        "dropout_seed": SEED,
    }
    if case.dropout_p == PER_TOKEN:
        index = layout.per_token(layout.q, rate_index)
        kwargs["dropout_p"] = torch.tensor(RATES)[index % len(RATES)]
    if layout.kind == "packed":
        kwargs["cu_seqlens_q"], kwargs["cu_seqlens_k"] = cu_seqlens(layout.q), cu_seqlens(layout.kv)
    if layout.kind == "padded":
        kwargs["lengths_q"], kwargs["lengths_k"] = torch.tensor(layout.q), torch.tensor(layout.kv)
    return kwargs


def rate_index(n: int, position: int) -> int:
    return 3 * position + n


def rate_of(case: Case, n: int, position: int) -> float:
    """The dropout rate of a query."""
    if case.dropout_p != PER_TOKEN:
        return case.dropout_p
    return RATES[rate_index(n, position) % len(RATES)]


def _keep(layout: Layout) -> Tensor | None:
    """The key-padding mask of a layout with hidden keys."""
    if not layout.hidden:
        return None
    keep = torch.ones(len(layout.kv), 1, 1, max(layout.kv), dtype=torch.bool)
    for row, keys in zip(keep, layout.hidden, strict=True):
        row[..., list(keys)] = False
    return keep


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def run(
    inputs: Inputs, attention: Callable[..., Any] = flash_attention, **options: Any
) -> Output | ScoredOutput:
    """out, lse and the gradients of one attention function, a gradient into lse included."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    scored = {}
    for name in ("attn_mask", "learnable_sink"):
        x = inputs.kwargs.get(name)
        if x is not None and x.is_floating_point():
            scored[name] = x.detach().requires_grad_()
    out, lse = attention(*leaves, return_lse=True, **inputs.kwargs | scored, **options)
    wanted = (*leaves, *scored.values())
    grads = torch.autograd.grad((out, lse), wanted, (inputs.grad_out, inputs.grad_lse))
    own = dict(zip(scored, grads[3:], strict=True))
    results = (out.detach(), lse.detach(), *grads[:3])
    if not own:
        return Output(*results)
    return ScoredOutput(*results, own.get("attn_mask"), own.get("learnable_sink"))


def reference_attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **kwargs: Any) -> Any:
    """``flash_attention`` by the dense definition."""
    out, lse = dense_attention(*prepare(q, k, v, **kwargs))
    out, lse = (out[0], lse[0]) if q.dim() == 3 else (out, lse)
    return (out, lse) if return_lse else out


@cache
def expected(case: Case) -> Output:
    """The case in float64 on the same rounded inputs, computed once for all backends."""
    return run(build(case).promoted(), reference_attention)
