"""Which weights fall is the same for every tiling, layout and backend, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import flash_attention
from ..dropout import dropout_mask
from ..spec import TileConfig
from . import truth
from .context import Context, Runner
from .rows import Row, Target

NONE = Target("=", 0.0)
SEED = -0x1234_5678_9ABC_DEF1  # wider than 32 bits
_LENGTHS = (37, 21)  # of two sequences; values and gradients are identities as wide
_IDS = (3, 70_001)
_HEADS = 2
_RATE = 0.3
_RATES = (0.0, 0.1, 0.5, 0.75, 1.0)


class _Fates(NamedTuple):
    """(H, S, S) bool of every sequence: the weights that are not zero, as two passes saw them."""

    forward: list[Tensor]
    backward: list[Tensor]  # empty where there is no such pass


def run(context: Context) -> Iterator[Row]:
    """Weights with another fate than the definition's, per backend, over tilings and layouts."""
    found: dict[str, list[Tensor]] = {}
    for runner in context.runners:
        names = [f"{what}: {runner.title}" for what in ("one rate", "rate per token")]
        if runner.missing:
            yield from (runner.not_run(_name(name), NONE) for name in names)
            continue
        tilings = (16, 32) if runner.interpreted else (16, 32, 64, 128)
        for name, per_token in zip(names, (False, True), strict=True):
            ways = [
                (f"{layout}, tiles {m}x{n}", _fates(runner, layout, TileConfig(m, n), per_token))
                for layout in ("packed", "padded", "alone")
                for m, n in _tilings(tilings, layout)
            ]
            ways.append(("dropout_mask", _masks(runner, per_token)))
            found[f"{runner.name} {per_token}"] = ways[0][1].forward
            yield _compare(_name(name), ways, per_token)
    yield _between(context, found)


def _name(what: str) -> str:
    return f"weights dropped unlike the hash says, {what}"


def _tilings(sizes: tuple[int, ...], layout: str) -> list[tuple[int, int]]:
    """Several for packed input, one for the other layouts."""
    pairs = list(zip(sizes, reversed(sizes), strict=True))
    return pairs if layout == "packed" else pairs[:1]


def _compare(name: str, ways: list[tuple[str, _Fates]], per_token: bool) -> Row:
    expected = _expected(per_token)
    wrong, total, where = 0, 0, ""
    for way, fates in ways:
        for side in filter(None, fates):
            differ = sum(int((a != b).sum()) for a, b in zip(side, expected, strict=True))
            total += sum(x.numel() for x in expected)
            if differ and not where:
                where = f"first in {way}"
            wrong += differ
    said = f"{len(ways) - 1} tilings and layouts, forward and backward, and dropout_mask"
    detail = where or f"of {total}; {said}"
    return Row(name, NONE, wrong, detail)


def _between(context: Context, found: dict[str, list[Tensor]]) -> Row:
    name = "weights dropped on one backend alone"
    missing = [runner for runner in context.runners if runner.missing]
    if missing:
        return missing[0].not_run(name, NONE)
    differ = total = 0
    for per_token in (False, True):
        sides = [found[f"{runner.name} {per_token}"] for runner in context.runners]
        for other in sides[1:]:
            differ += sum(int((a != b).sum()) for a, b in zip(sides[0], other, strict=True))
            total += sum(x.numel() for x in other)
    return Row(name, NONE, differ, f"of {total}")


def _rates(length: int, per_token: bool) -> Tensor:
    """(length,) float64."""
    if not per_token:
        return torch.full((length,), _RATE, dtype=torch.float64)
    return torch.tensor(_RATES, dtype=torch.float64)[torch.arange(length) % len(_RATES)]


def _expected(per_token: bool) -> list[Tensor]:
    """By the plain hash."""
    kept = []
    for length, identity in zip(_LENGTHS, _IDS, strict=True):
        sequence = truth.Sequence(rates=_rates(length, per_token), seed=SEED, identity=identity)
        kept.append(truth.weight_factors((_HEADS, length, length), sequence) != 0)
    return kept


def _fates(runner: Runner, layout: str, tiles: TileConfig, per_token: bool) -> _Fates:
    """Where weights and the gradients of values are not zero, with identities as values."""
    if layout == "alone":
        parts = [_attend(runner, layout, tiles, per_token, [n]) for n in range(len(_LENGTHS))]
        return _Fates(*(list(chain(*sides)) for sides in zip(*parts, strict=True)))
    return _attend(runner, layout, tiles, per_token, list(range(len(_LENGTHS))))


def _attend(
    runner: Runner, layout: str, tiles: TileConfig, per_token: bool, which: list[int]
) -> _Fates:
    lengths, width = [_LENGTHS[n] for n in which], max(_LENGTHS)
    lens = torch.tensor(lengths, dtype=torch.int32)
    rates = torch.cat([_rates(length, per_token) for length in lengths])
    eye = torch.cat([torch.eye(width, dtype=torch.float32)[:length] for length in lengths])
    kwargs: dict[str, Any] = {"sequence_ids": torch.tensor([_IDS[n] for n in which]).int()}
    if layout == "packed":
        kwargs["cu_seqlens_q"] = torch.tensor([0, *lens.cumsum(0).tolist()], dtype=torch.int32)
    else:
        kwargs |= {"lengths_q": lens, "lengths_k": lens}
        rates, eye = (_padded(x, lengths) for x in (rates, eye))
    kwargs = {name: x.to(runner.device) for name, x in kwargs.items()}
    values = eye.unsqueeze(-2).expand(*eye.shape[:-1], _HEADS, width).to(runner.device)
    q = torch.zeros(*eye.shape[:-1], _HEADS, 16, device=runner.device)  # every weight is the same
    v = values.clone().requires_grad_()
    out = flash_attention(
        q, q, v, dropout_p=rates.to(runner.device) if per_token else _RATE, dropout_seed=SEED,
        backend=runner.name, tiles=tiles, **kwargs,
    )  # fmt: skip
    (dv,) = torch.autograd.grad(out, v, values)
    forward = _sequences(out.detach().cpu(), lengths, layout)
    backward = _sequences(dv.cpu(), lengths, layout)  # columns are queries, rows keys
    return _Fates(forward, [x.mT for x in backward])


def _masks(runner: Runner, per_token: bool) -> _Fates:
    """As the public function tells them."""
    rates = [_rates(length, per_token) for length in _LENGTHS]
    width = max(_LENGTHS)
    kept = dropout_mask(
        _padded(torch.cat(rates), list(_LENGTHS)) if per_token else _RATE, SEED,
        (len(_LENGTHS), _HEADS, width, width), device=runner.device, backend=runner.name,
        sequence_ids=torch.tensor(_IDS, dtype=torch.int32, device=runner.device),
    )  # fmt: skip
    return _Fates([x[:, :n, :n].cpu() for x, n in zip(kept, _LENGTHS, strict=True)], [])


def _padded(x: Tensor, lengths: list[int]) -> Tensor:
    rows = torch.zeros(len(lengths), max(lengths), *x.shape[1:], dtype=x.dtype)
    for row, part, length in zip(rows, x.split(lengths), lengths, strict=True):
        row[:length] = part
    return rows


def _sequences(x: Tensor, lengths: list[int], layout: str) -> list[Tensor]:
    """(H, S, S) bool of every sequence."""
    parts = (
        x.split(lengths) if layout == "packed" else [r[:n] for r, n in zip(x, lengths, strict=True)]
    )
    return [part.transpose(0, 1)[..., : len(part)] != 0 for part in parts]
