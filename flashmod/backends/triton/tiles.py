"""Tile sizes per architecture, kernel and head dimension: measured facts, kept as data.

They come from published tables and from what compiling each candidate shows (registers, spills,
shared memory); sizes depend on device, dtype and head dimension only, never on the batch.
"""

from __future__ import annotations

import torch
import triton

from ...spec import AttentionCall, TileConfig

_HALF = {
    # architecture -> kernel -> largest head dimension -> tiles
    "sm_80": {
        "forward": {64: (128, 32, 4, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)},
        "dq": {64: (128, 32, 4, 2), 128: (64, 32, 4, 2), 256: (64, 32, 8, 1)},
        "dkv": {64: (64, 64, 4, 2), 128: (32, 128, 8, 2), 256: (16, 64, 8, 1)},
    },
    "sm_90": {
        "forward": {64: (128, 128, 8, 3), 128: (128, 128, 8, 2), 256: (128, 32, 8, 2)},
        "dq": {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (128, 32, 8, 2)},
        "dkv": {64: (64, 128, 8, 2), 128: (32, 128, 8, 2), 256: (32, 64, 8, 1)},
    },
    "sm_100": {
        "forward": {64: (128, 128, 8, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 2)},
        "dq": {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (128, 32, 8, 2)},
        "dkv": {64: (64, 128, 8, 2), 128: (32, 128, 8, 2), 256: (32, 32, 8, 1)},
    },
    "gfx942": {
        "forward": {64: (128, 64, 4, 1), 128: (128, 64, 4, 1), 256: (64, 32, 4, 1)},
        "dq": {64: (64, 64, 4, 1), 128: (64, 32, 4, 1), 256: (32, 32, 4, 1)},
        "dkv": {64: (32, 64, 4, 1), 128: (32, 64, 4, 1), 256: (16, 64, 4, 1)},
    },
}
_WIDE = {  # float32 and float64, by bytes per row of the head dimension
    256: (32, 32, 8, 2),
    512: (32, 32, 8, 1),
    1024: (16, 16, 4, 1),
    2048: (16, 16, 4, 1),
}
_INTERPRETER = TileConfig(32, 32, 4, 1)


def architecture() -> str:
    """``sm_90``, ``gfx942`` and so on, of the device that Triton would launch on."""
    target = triton.runtime.driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def choose(kernel: str, head_dim: int, dtype: torch.dtype, call: AttentionCall) -> TileConfig:
    """Tiles of ``kernel``: "forward", "dq", "dkv" or "dbias"; what the call asks for comes first.

    Args:
        head_dim: the larger of D and D_v.
    """
    asked = call.tile_config()
    if asked is not None:
        return asked
    if triton.knobs.runtime.interpret:
        return _INTERPRETER
    if dtype.itemsize > 2:
        return TileConfig(*_smallest(_WIDE, head_dim * dtype.itemsize))
    if kernel == "dbias":  # dq that also holds the sum of a whole tile
        tiles = choose("dq", head_dim, dtype, call)
        return tiles._replace(block_m=min(tiles.block_m, 64), block_n=min(tiles.block_n, 64))
    family = _family(architecture())
    tiles = TileConfig(*_smallest(_HALF[family][kernel], head_dim))
    return _lightened(tiles, kernel, family, call)


def _lightened(tiles: TileConfig, kernel: str, family: str, call: AttentionCall) -> TileConfig:
    """Shorter steps along the loop where what the call asks for would spill registers in it.

    What is read or computed for every pair needs registers of its own: a mask or bias most, then
    one per key, then dropout and ALiBi.
    """
    mask = call.attn_mask
    pairs = bool(call.mask_fn) or (mask is not None and mask.shape[2] > 1)
    keys = mask is not None and not pairs
    busy = call.dropout_seed is not None or call.alibi_slopes is not None
    ampere, hopper = family == "sm_80", family in ("sm_90", "sm_100")
    step = 128
    if pairs or (keys and ampere):
        step = 32
    elif (keys and hopper) or (busy and family == "sm_100"):
        step = 64
    if kernel == "dkv":
        rows = 32 if step < 128 else 128
        columns = 64 if ampere and step == 32 else 128
        return tiles._replace(block_m=min(tiles.block_m, rows), block_n=min(tiles.block_n, columns))
    if ampere and step == 32:  # 16 rows per warp
        tiles = tiles._replace(block_m=min(tiles.block_m, 16 * tiles.num_warps))
    return tiles._replace(block_n=min(tiles.block_n, step))


def table() -> dict[str, TileConfig]:
    """Every row of the tables under a name that says what it serves, for people to read."""
    half = {
        f"{name} {kernel}, 16 bit, D <= {limit}": TileConfig(*tiles)
        for name, kernels in _HALF.items()
        for kernel, rows in kernels.items()
        for limit, tiles in rows.items()
    }
    wide = {f"all, wider, D <= {n} bytes": TileConfig(*tiles) for n, tiles in _WIDE.items()}
    return {**half, **wide, "interpreter": _INTERPRETER}


def _family(architecture: str) -> str:
    """The table that serves a device. Consumer cards (sm_86, sm_89, sm_120) use that of sm_80."""
    if not architecture.startswith("sm_"):
        return "gfx942"
    number = int(architecture[3:])
    if number < 90 or number >= 120:
        return "sm_80"
    return "sm_90" if number < 100 else "sm_100"


def _smallest(table: dict[int, tuple[int, int, int, int]], size: int) -> tuple[int, int, int, int]:
    return next(tiles for limit, tiles in table.items() if size <= limit)
