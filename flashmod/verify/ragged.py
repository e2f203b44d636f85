"""Random ragged batches with every feature, in every layout, with random tile sizes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ..spec import TileConfig
from . import drawing, results
from .context import Context, Runner
from .rows import Row, Target, worst

TARGET = Target("<", 1e-9)


class Sizes(NamedTuple):
    """What a backend can afford."""

    batches: int
    longest: int  # tokens of a sequence
    widest: int  # head dimension
    tiles: tuple[int, ...]


SIZES = {
    "tiled": Sizes(200, 97, 48, (2, 7, 16, 32, 50, 64, 128)),
    "triton": Sizes(40, 37, 24, (16, 32)),
}


def run(context: Context) -> Iterator[Row]:
    """One row per backend: outputs, lse and all gradients against the definition, float64."""
    for runner in context.runners:
        sizes = SIZES[runner.name]
        sizes = sizes._replace(batches=context.count(sizes.batches))
        name = f"{sizes.batches} random ragged batches, fp64: {runner.title}"
        if runner.missing:
            yield runner.not_run(name, TARGET)
        else:
            yield _row(context, runner, sizes, name)


def _row(context: Context, runner: Runner, sizes: Sizes, name: str) -> Row:
    rng = random.Random(context.seed)
    errors, features = {}, Counter[str]()
    drawn = drawing.each(context.seed + 1, sizes.batches, sizes.longest, sizes.widest)
    for number, batch in enumerate(drawn):
        tiles = TileConfig(rng.choice(sizes.tiles), rng.choice(sizes.tiles))
        got = results.run(batch, runner, tiles)
        found = got.errors(results.definition(batch), results.units(batch))
        result, error = worst(found)
        errors[f"{result} of batch {number}, tiles {tiles.block_m}x{tiles.block_n}"] = error
        features.update(drawing.features(batch.spec))
        context.tick(number + 1, sizes.batches)
    where, error = worst(errors)
    listed = ", ".join(f"{feature} {count}" for feature, count in sorted(features.items()))
    return Row(name, TARGET, error, f"{where}; batches with {listed}", {"features": features})
