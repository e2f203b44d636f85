"""Group runs of one configuration: which share a line in a chart, which are repeats."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from flashmod.report.records import Run

TWIN = "dense twin"
IGNORED = {"seq_len", "seed", "path", "root", "cache", "cache_dir", "num_workers", "workers"}
KINDS = ("flash", "sdpa", "dense", TWIN)


@dataclass(frozen=True)
class Point:
    """The median of ``runs`` values of one metric at one length, with their range."""

    metric: str
    kind: str
    workload: str
    tiles: str
    precision: str
    seq_len: int
    value: float
    low: float
    high: float
    runs: int
    predicted: bool

    @property
    def variant(self) -> str:
        return ", ".join(filter(None, (self.tiles, self.workload)))

    @property
    def series(self) -> str:
        return f"{self.kind} ({self.variant})" if self.variant else self.kind


class Variants:
    """Short labels for what distinguishes the workloads (and tiles) of some runs.

    Two runs differ in workload when device, precision, or a data or model setting differs. A
    token budget that grows with the length counts as the same setting.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        features = [_features(run) for run in runs]
        for key in {key for found in features for key in found if "token" in key}:
            _normalise(features, key)
        labels = _labels(features)
        self._workload = {run.path: label for run, label in zip(runs, labels, strict=True)}
        self._tiles = _tile_labels(runs)

    def workload(self, run: Run) -> str:
        return self._workload[run.path]

    def tiles(self, run: Run) -> str:
        """The tile sizes where one attention ran with several, else empty."""
        return self._tiles[run.path]


def points(runs: Iterable[Run], metric: str, variants: Variants) -> list[Point]:
    """One point per attention, workload, tiles, length and measured-or-predicted, by length."""
    return _aggregate(metric, ((run, run.attention, variants.tiles(run)) for run in runs), variants)


def memory_points(runs: Sequence[Run], variants: Variants) -> list[Point]:
    """Attention peaks in MiB, with the dense twins of the runs that are not dense themselves."""
    twins = ((run, TWIN, "") for run in runs if run.attention != "dense")
    own = points(runs, "memory/attention_peak_mib", variants)
    return own + _aggregate("memory/dense_attention_peak_mib", twins, variants)


def split(found: Sequence[Point]) -> tuple[list[Point], list[Point], str]:
    """Points of workloads with several lengths, of those with one, and what the first share.

    Where all the first are of one workload, its label leaves their names and is returned.
    """
    lengths: dict[str, set[int]] = defaultdict(set)
    for point in found:
        lengths[point.workload].add(point.seq_len)
    lines = [point for point in found if len(lengths[point.workload]) > 1]
    alone = [point for point in found if len(lengths[point.workload]) == 1]
    shared = {point.workload for point in lines}
    if len(shared) != 1:
        return lines, alone, ""
    return [replace(point, workload="") for point in lines], alone, shared.pop()


def _aggregate(
    metric: str, values: Iterable[tuple[Run, str, str]], variants: Variants
) -> list[Point]:
    groups: dict[tuple[str, str, str, str, int, bool], list[float]] = defaultdict(list)
    for run, kind, tiles in values:
        if run.seq_len is not None and metric in run.summary:
            workload = variants.workload(run)
            key = (kind, workload, tiles, run.precision, run.seq_len, metric in run.predicted)
            groups[key].append(run.summary[metric])
    found = [
        Point(metric, *key[:5], median(group), min(group), max(group), len(group), key[5])
        for key, group in groups.items()
    ]
    return sorted(found, key=lambda p: (kind_order(p.kind), p.series, p.seq_len, p.predicted))


def kind_order(kind: str) -> tuple[int, str]:
    return (KINDS.index(kind) if kind in KINDS else len(KINDS), kind)


def _features(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {"device": run.device, "precision": run.precision, "data": None}
    for key, value in run.config.items():
        section, _, name = key.partition(".")
        if section in ("data", "model", "batch") and not name.startswith("attention"):
            leaf = name.rpartition(".")[2]
            grows = "len" in leaf and value == run.seq_len
            if leaf not in IGNORED and not grows:
                short = section if leaf == "name" else leaf.lstrip("_")
                found[short] = (value, run.seq_len) if "token" in short else value
    return found


def _normalise(features: list[dict[str, Any]], key: str) -> None:
    """Replace (tokens, seq_len) by tokens or by tokens per length, whichever varies less."""
    pairs = [found.get(key) for found in features]
    plain = [pair and pair[0] for pair in pairs]
    ratio = [_per_length(*pair) if pair else None for pair in pairs]
    chosen = ratio if len(set(map(_hashable, ratio))) < len(set(map(_hashable, plain))) else plain
    for found, value in zip(features, chosen, strict=True):
        found[key] = value


def _per_length(value: Any, length: int | None) -> Any:
    return f"{value / length:g}/length" if isinstance(value, int | float) and length else value


def _labels(features: list[dict[str, Any]]) -> list[str]:
    """Label each entry by the fewest keys that keep all distinct entries apart."""
    keys = list(dict.fromkeys(key for found in features for key in found))
    wanted = len({tuple(_hashable(found.get(key)) for key in keys) for found in features})
    chosen: list[str] = []
    count = 1
    for key in keys:
        new = len({tuple(_hashable(f.get(k)) for k in [*chosen, key]) for f in features})
        if new > count:
            chosen, count = [*chosen, key], new
        if count >= wanted:
            break
    return [", ".join(_label(key, found.get(key)) for key in chosen) for found in features]


def _label(key: str, value: Any) -> str:
    if key == "data":
        return f"{value} data"
    return str(value) if key in ("device", "precision") else f"{key}={value}"


def _tile_labels(runs: Sequence[Run]) -> dict[Path, str]:
    by_kind: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        by_kind[run.attention].add(run.tiles)
    return {
        run.path: f"tiles {run.tiles}" if len(by_kind[run.attention]) > 1 else "" for run in runs
    }


def _hashable(value: Any) -> Hashable:
    return value if isinstance(value, Hashable) else repr(value)
