"""The decisions of dropout as a tensor, from the device function that the kernels use."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import Limits, TileConfig
from .arguments import DropoutArg, Sequence
from .dropping import dropout_rows, kept
from .structs import on_device

_TILES = TileConfig(32, 64)


@triton.jit(do_not_specialize=["rows", "kv_rows"])
def _mask_kernel(
    out, ids, dropout, heads, rows, kv_rows,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, head, query tile, key tile)."""
    program = tl.program_id(0)
    kv_first = program % tl.cdiv(kv_rows, BLOCK_N) * BLOCK_N
    program = program // tl.cdiv(kv_rows, BLOCK_N)
    q_idx = program % tl.cdiv(rows, BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = program // tl.cdiv(rows, BLOCK_M)
    n, head = block // heads, block % heads
    limits = Limits(rows, 0, 0, 0, 0, 0, kv_rows)
    sequence = Sequence(n, tl.load(ids + n), n * rows, 0, n, 0, n, 0, kv_rows, limits)
    decides = dropout_rows(q_idx, q_idx < rows, sequence, head, dropout, True)
    keep = kept(decides, kv_first, dropout, BLOCK_N, TRANSPOSED)
    kv_idx = kv_first + tl.arange(0, BLOCK_N)
    at = (block.to(tl.int64) * rows + q_idx)[:, None] * kv_rows + kv_idx[None, :]
    inside = (q_idx < rows)[:, None] & (kv_idx < kv_rows)[None, :]
    if TRANSPOSED:
        at, inside = tl.trans(at), tl.trans(inside)
    tl.store(out + at, keep, mask=inside)


def dropout_mask(
    seed: Tensor,
    sequence_ids: Tensor,
    thresholds: Tensor | int,
    shape: tuple[int, int, int, int],
    transposed: bool = False,
    tiles: TileConfig | None = None,
) -> Tensor:
    """Which weights dropout keeps, (N, H, S, S_kv) bool, for sequences that start at row 0.

    Args:
        seed: 0-d int64, on the device that answers.
        sequence_ids: (N,) int32.
        thresholds: one 16-bit threshold, or one per query row, (N, S) int32.
        shape: of the result.
        transposed: decide as the gradient of keys and values does; the answer is the same.
        tiles: powers of two of 16 or more.
    """
    _, heads, rows, kv_rows = shape
    tiles = tiles or _TILES
    out = torch.empty(shape, dtype=torch.bool, device=seed.device)
    words = seed.reshape(1).view(torch.int32)
    if isinstance(thresholds, int):
        dropout = DropoutArg(thresholds, words, None)
    else:
        dropout = DropoutArg(0, words, thresholds.contiguous())
    if out.numel():
        blocks = triton.cdiv(rows, tiles.block_m) * triton.cdiv(kv_rows, tiles.block_n)
        with on_device(out):
            _mask_kernel[(shape[0] * heads * blocks,)](
                out, sequence_ids.contiguous(), dropout, heads, rows, kv_rows,
                BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, TRANSPOSED=transposed,
            )  # fmt: skip
    return out
