"""Rescales of the online softmax, per tile and in total, beside a plain tile by tile recurrence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .. import flash_attention
from ..spec import TileConfig
from . import drawing, truth
from .batches import Batch, Spec, build
from .context import Context, Runner
from .rows import Row, Target

NONE = Target("=", 0.0)


class _Counts(NamedTuple):
    """Of all sequences, tile after tile."""

    rescales: torch.Tensor
    updates: torch.Tensor


def run(context: Context) -> Iterator[Row]:
    """Tiles with another count than the recurrence's per backend, and between the backends."""
    found: dict[str, _Counts] = {}
    cases = {kind: build(spec, context.seed + 4) for kind, spec in _specs().items()}
    tiles = TileConfig(16, 16)
    plain = _joined([_recurrence(batch, tiles) for batch in cases.values()])
    for runner in context.runners:
        names = [f"tiles with {what} unlike the recurrence's: {runner.title}" for what in _ROWS]
        if runner.missing:
            yield from (runner.not_run(name, NONE) for name in names)
            continue
        own = _joined([_counted(batch, runner, tiles) for batch in cases.values()])
        found[runner.name] = own
        for name, kind in zip(names, _Counts._fields, strict=True):
            ours, theirs = getattr(own, kind), getattr(plain, kind)
            total = f"{int(ours.sum())} in {len(ours)} tiles, recurrence {int(theirs.sum())}"
            yield Row(name, NONE, int((ours != theirs).sum()), total)
    name = "tiles where the backends count otherwise"
    missing = [runner for runner in context.runners if runner.missing]
    if missing:
        yield missing[0].not_run(name, NONE)
    elif len(found) == 2:
        one, other = found.values()
        differ = sum(int((a != b).sum()) for a, b in zip(one, other, strict=True))
        totals = (int(x.sum()) for x in (*one, *other))
        yield Row(name, NONE, differ, "totals {} and {} beside {} and {}".format(*totals))


_ROWS = ("rescales", "rescales and first maxima")


def _specs() -> dict[str, Spec]:
    return {
        "causal": Spec((97,), (97,), "dense", 2, 1, 16, 16, causal=True),
        "ragged": Spec((40, 0, 33), (61, 5, 20), "packed", 2, 2, 8, 8, causal=(True, False, True)),
        "window": Spec((50,), (50,), "dense", 1, 1, 8, 8, left=20, right=3, slopes="h"),
        "function": Spec(
            (48,), (48,), "dense", 2, 1, 8, 8, fn=drawing.striped, fn_args=(3,), sink=True
        ),
    }


def _counted(batch: Batch, runner: Runner, tiles: TileConfig) -> _Counts:
    batch = batch.on(runner.device)
    kwargs = batch.arguments() | {"return_stats": True, "backend": runner.name, "tiles": tiles}
    _, stats = flash_attention(batch.q, batch.k, batch.v, **kwargs)
    rescales, updates = (
        torch.cat([getattr(s, kind).flatten().cpu() for s in stats.sequences])
        for kind in _Counts._fields
    )
    if (stats.rescales, stats.updates) != (int(rescales.sum()), int(updates.sum())):
        raise AssertionError(f"the totals of {stats} are not the sums of its tiles")
    return _Counts(rescales, updates)


def _recurrence(batch: Batch, tiles: TileConfig) -> _Counts:
    spec, traces = batch.spec, []
    for n in range(spec.num_sequences):
        q, k = batch.q[batch.rows(n, spec.q_lens)], batch.k[batch.rows(n, spec.kv_lens)]
        sequence = batch.sequence(n)
        pairs = truth.reach(len(q), len(k), sequence)
        traces.append(truth.tile_recurrence(truth.logits(q, k, sequence), pairs, tiles[:2]))
    return _Counts(
        torch.cat([trace.rescales.flatten() for trace in traces]),
        torch.cat([trace.updates.flatten() for trace in traces]),
    )


def _joined(counts: list[_Counts]) -> _Counts:
    return _Counts(*(torch.cat(parts) for parts in zip(*counts, strict=True)))
