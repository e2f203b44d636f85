"""Rows with no key, empty sequences, tiles past the causal boundary: exactly zero, not visited."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import flash_attention
from ..masks import Mask
from ..spec import TileConfig
from . import results, truth
from .batches import Batch, Spec, build
from .context import Context, Runner
from .results import Results
from .rows import Row, Target

NONE = Target("=", 0.0)


def nothing_on_odd_rows(batch, head, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (q_idx + head) % 2 == 0


class _Dead(NamedTuple):
    """Which rows have no key and which keys no row, like q's and k's leading axes with heads."""

    rows: Tensor
    keys: Tensor


def run(context: Context) -> Iterator[Row]:
    """Numbers that are not zero, lse that is not -inf, and tiles counted wrongly, per backend."""
    for runner in context.runners:
        names = [f"{what}: {runner.title}" for what in _ROWS]
        if runner.missing:
            yield from (runner.not_run(name, NONE) for name in names)
            continue
        cases = {kind: _case(spec) for kind, spec in _SPECS.items()}
        found = {kind: results.run(b, runner) for kind, b in cases.items()}
        dead = {kind: _dead(batch) for kind, batch in cases.items()}
        for name, count in zip(names[:3], (_not_zero, _wrong_lse, _not_finite), strict=True):
            wrong = {kind: count(found[kind], dead[kind]) for kind in cases}
            listed = ", ".join(f"{kind} {n}" for kind, n in wrong.items() if n)
            rows = sum(int(d.rows.sum()) for d in dead.values())
            detail = listed or f"of {rows} rows with no key: {', '.join(cases)}"
            yield Row(name, NONE, sum(wrong.values()), detail)
        yield _skipped(runner, names[3])


_ROWS = (
    "nonzero out or gradient without a key",
    "lse other than -inf there",
    "not finite, with NaN in unread memory",
    "skipped tiles, counted wrongly",
)
_SPECS = {
    "fewer keys than queries": Spec((37,), (9,), "dense", 2, 1, 16, 16, causal=True),
    "empty sequences": Spec((0, 6, 0, 17), (3, 0, 0, 9), "packed", 2, 2, 8, 8, slack=3),
    "mask function": Spec((21,), (21,), "dense", 2, 1, 8, 8, fn=nothing_on_odd_rows),
    "bias of -inf": Spec((19,), (23,), "dense", 2, 2, 8, 8, mask="bias", mask_axes="hq"),
    "padding": Spec((5, 9), (17, 0), "padded", 2, 1, 8, 8, slack=2, causal=True),
    "window past the keys": Spec((30,), (12,), "dense", 1, 1, 8, 8, left=2, align="top_left"),
}


def _case(spec: Spec) -> Batch:
    return build(spec, 3)


def _dead(batch: Batch) -> _Dead:
    """By the definition; rows of slack and beyond a length are dead too."""
    spec = batch.spec
    rows = torch.ones(batch.q.shape[:-1], dtype=torch.bool)
    keys = torch.ones(batch.k.shape[:-1], dtype=torch.bool)
    for n, (q_len, kv_len) in enumerate(zip(spec.q_lens, spec.kv_lens, strict=True)):
        seen = truth.visible(spec.heads, q_len, kv_len, batch.sequence(n))
        rows[batch.rows(n, spec.q_lens)] = ~seen.any(-1).T
        of_group = seen.unflatten(0, (spec.kv_heads, -1)).any(1)
        keys[batch.rows(n, spec.kv_lens)] = ~of_group.any(-2).T
    return _Dead(rows, keys)


def _not_zero(got: Results, dead: _Dead) -> int:
    sides = ((got.out, dead.rows), (got.dq, dead.rows), (got.dk, dead.keys), (got.dv, dead.keys))
    return sum(int((x[where] != 0).sum()) for x, where in sides)


def _wrong_lse(got: Results, dead: _Dead) -> int:
    return int(((got.lse == float("-inf")) != dead.rows.transpose(-1, -2)).sum())


def _not_finite(got: Results, dead: _Dead) -> int:
    results = (got.out, got.dq, got.dk, got.dv)
    return sum(int((~x.isfinite()).sum()) for x in results) + int(got.lse.isnan().sum())


def _skipped(runner: Runner, name: str) -> Row:
    """Tiles of a causal call with more queries than keys, one by one."""
    lens, tiles = ((70, 50), (16, 32)) if runner.interpreted else ((500, 400), (32, 64))
    spec = Spec((lens[0],), (lens[1],), "dense", 2, 1, 16, 16, causal=True)
    batch = _case(spec)
    q, k, v = (x.to(runner.device) for x in (batch.q, batch.k, batch.v))
    _, stats = flash_attention(
        q, k, v, mask=Mask(causal=True), return_stats=True, backend=runner.name,
        tiles=TileConfig(*tiles),
    )  # fmt: skip
    pairs = truth.reach(*lens, batch.sequence(0))
    table = torch.zeros(2, *lens, dtype=torch.float64)
    processed = truth.tile_recurrence(table, pairs, tiles).processed
    skipped = stats.sequences[0].kinds.cpu() == 0
    wrong = int((skipped == processed).sum())
    return Row(name, NONE, wrong, f"{stats.tiles_skipped} of {processed.numel()} tiles skipped")
