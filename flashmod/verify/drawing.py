"""Which batches to build: random ones, and one with every feature at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from .batches import Batch, Spec, build


def striped(batch, head, q_idx, kv_idx, period):  # type: ignore[no-untyped-def]
    """Other stripes in every sequence and head; a row may see nothing."""
    return (kv_idx + q_idx * 2 + batch + head) % period != 0


def same_label(batch, head, q_idx, kv_idx, q_label, kv_label):  # type: ignore[no-untyped-def]
    return q_label == kv_label


def label_or_near(batch, head, q_idx, kv_idx, q_label, kv_label, near):  # type: ignore[no-untyped-def]
    distance = q_idx - kv_idx
    return (q_label == kv_label) | ((distance >= 0) & (distance < near + head))


def draw(rng: random.Random, longest: int, widest: int) -> Spec:
    """A random call: any layout, mask and score feature.

    Args:
        longest: most tokens of a sequence.
        widest: largest head dimension.
    """
    layout = rng.choice(("packed", "packed", "padded", "dense"))
    count = rng.randint(1, 4)
    lens = [_length(rng, longest) for _ in range(2 * count)]
    q_lens, kv_lens = tuple(lens[:count]), tuple(lens[count:])
    if rng.random() < 0.5:
        kv_lens = q_lens
    if layout == "dense":
        q_lens, kv_lens = ((lens[0],) * count for lens in (q_lens, kv_lens))
    kv_heads = rng.choice((1, 1, 2, 3))
    fn, fn_args, labels = rng.choice(_FUNCTIONS)
    per_sequence = lambda pick: rng.choice((pick(), tuple(pick() for _ in range(count))))  # noqa: E731
    spec = Spec(
        q_lens, kv_lens, layout,
        heads=kv_heads * rng.choice((1, 2, 3)), kv_heads=kv_heads,
        dim=rng.randint(1, widest), v_dim=rng.randint(1, widest),
        slack=rng.choice((0, 0, 3)),
        causal=per_sequence(lambda: rng.random() < 0.5),
        left=per_sequence(lambda: rng.choice((None, None, 0, 3, longest // 3))),
        right=per_sequence(lambda: rng.choice((None, None, 0, 2, longest // 2))),
        prefix=per_sequence(lambda: rng.choice((0, 0, 1, longest // 2))),
        align=rng.choice(("bottom_right", "top_left")),
        fn=fn, fn_args=fn_args, labels=labels,
        scale=rng.choice((None, None, 0.3)), strided=rng.random() < 0.3,
    )  # fmt: skip
    return _with_scores(_with_dropout(spec, rng), rng)


_FUNCTIONS: tuple[tuple[Callable[..., Any] | None, tuple[int, ...], bool], ...] = (
    (None, (), False),
    (None, (), False),
    (striped, (3,), False),
    (same_label, (), True),
    (label_or_near, (4,), True),
)


def _with_scores(spec: Spec, rng: random.Random) -> Spec:
    mask = rng.choice(("", "", "bool", "bias"))
    return spec._replace(
        mask=mask,
        mask_axes="".join(a for a in "nhqk" if rng.random() < 0.5) if mask else "",
        softcap=rng.choice((0.0, 0.0, 1.5)),
        slopes=rng.choice(("", "", "h", "nh")),
        sink=rng.random() < 0.3,
    )


def _with_dropout(spec: Spec, rng: random.Random) -> Spec:
    rate = rng.choice((0.0, 0.3, -1.0))
    return spec._replace(
        rate=max(rate, 0.0),
        rates=rate < 0,
        seed=rng.randrange(-(2**63), 2**63),
        ids=rng.choice((None, tuple(rng.sample(range(1000), spec.num_sequences)))),
    )


def _length(rng: random.Random, longest: int) -> int:
    return rng.choice((0, 1, rng.randint(1, longest), rng.randint(1, longest), longest))


def everything(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], dim: int) -> Spec:
    """A packed call with every feature at once."""
    return Spec(
        q_lens, kv_lens, "packed", heads=4, kv_heads=2, dim=dim, v_dim=dim, slack=2, causal=True,
        left=2 * max(kv_lens) // 3, prefix=3, fn=label_or_near, fn_args=(9,), labels=True,
        mask="bias", mask_axes="hqk", softcap=3.0, slopes="nh", sink=True, rates=True,
        seed=-(2**40) - 7,
    )  # fmt: skip


def features(spec: Spec) -> list[str]:
    """What a call has, in words."""
    found = {
        spec.layout: True,
        "empty sequences": 0 in spec.q_lens + spec.kv_lens,
        "mixed causal flags": isinstance(spec.causal, tuple) and len(set(spec.causal)) == 2,
        "windows": spec.left is not None or spec.right is not None,
        "prefixes": spec.prefix != 0,
        "mask functions": spec.fn is not None,
        "labels": spec.labels,
        "masks": spec.mask == "bool",
        "biases": spec.mask == "bias",
        "soft caps": spec.softcap > 0,
        "ALiBi": bool(spec.slopes),
        "sinks": spec.sink,
        "dropout": spec.rate > 0,
        "per-row dropout": spec.rates,
        "grouped heads": spec.heads > spec.kv_heads,
    }
    return [feature for feature, has in found.items() if has]


def each(seed: int, count: int, longest: int, widest: int) -> Iterator[Batch]:
    """``count`` random batches in float64."""
    rng = random.Random(seed)
    for number in range(count):
        yield build(draw(rng, longest, widest), seed + number)
