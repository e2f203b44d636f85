"""Where rows lie in memory: device functions shared by all kernels."""

import triton
import triton.language as tl

from ...spec import Limits
from .arguments import KeySide, QuerySide, Sequence
from .device_rules import diagonal_shift

# The interpreter multiplies bfloat16 as bit patterns: widen to float32 there, on load.
WIDEN_BFLOAT16 = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def load_sequence(table, tile, rows, kv_rows, ALIGN: tl.constexpr):
    """The sequence of a work item, and the item's first position."""
    n, first = tl.load(table.tiles + 2 * tile), tl.load(table.tiles + 2 * tile + 1)
    return sequence_at(table, n, rows, kv_rows, ALIGN), first


@triton.jit
def sequence_at(table, n, rows, kv_rows, ALIGN: tl.constexpr):
    """Sequence ``n``; lengths are clamped so that no row outside the buffers is touched."""
    q_start = tl.load(table.q_starts + n)
    kv_start = tl.load(table.kv_starts + n)
    q_len = tl.minimum(tl.load(table.q_lengths + n), rows - q_start % rows)
    kv_len = tl.minimum(tl.load(table.kv_lengths + n), kv_rows - kv_start % kv_rows)
    row = table.limits + n * 5
    limits = Limits(
        q_len,
        diagonal_shift(q_len, kv_len, ALIGN),
        tl.load(row),
        tl.load(row + 1),
        tl.load(row + 2),
        tl.load(row + 3),
        tl.minimum(tl.load(row + 4), kv_len),
    )
    return Sequence(
        n,
        tl.load(table.ids + n),
        q_start,
        kv_start,
        q_start // rows,
        q_start % rows,
        kv_start // kv_rows,
        kv_start % kv_rows,
        kv_len,
        limits,
    )


@triton.jit
def tile_pointers(x, batch, row, head, positions, BLOCK_D: tl.constexpr):
    """Pointers to (positions, BLOCK_D) of one head, ``row`` being position 0; 64-bit offsets."""
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    base = x.ptr + batch.to(tl.int64) * x.strides[0] + row.to(tl.int64) * x.strides[1]
    rows = positions.to(tl.int64)[:, None] * x.strides[1]
    return base + head.to(tl.int64) * x.strides[2] + rows + dims[None, :] * x.strides[3]


@triton.jit
def key_side(
    operands, sequence, kv_head, seen,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Pointers to the first key tile of a head, of which the interval ``seen`` will be read."""
    offsets = tl.arange(0, BLOCK_N)
    batch, row = sequence.kv_batch, sequence.kv_row
    return KeySide(
        tile_pointers(operands.k, batch, row, kv_head, offsets, BLOCK_D),
        tile_pointers(operands.v, batch, row, kv_head, offsets, BLOCK_V),
        operands.k.strides[1],
        operands.v.strides[1],
        seen[0],
        seen[1],
    )


@triton.jit
def query_side(
    operands, stats, sequence, head, heads, rows, seeing,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Pointers to the first query tile of a head, its output gradient and its row statistics."""
    offsets = tl.arange(0, BLOCK_M)
    batch, row = sequence.q_batch, sequence.q_row
    block = stats_block(sequence, head, heads)
    return QuerySide(
        tile_pointers(operands.q, batch, row, head, offsets, BLOCK_D),
        tile_pointers(operands.grad_out, batch, row, head, offsets, BLOCK_V),
        operands.q.strides[1],
        operands.grad_out.strides[1],
        stats.saved + 2 * block * rows + row,
        stats.saved + (2 * block + 1) * rows + row,
        stats.last + block * rows + row,
        seeing[0],
        seeing[1],
    )


@triton.jit
def stats_block(sequence, head, heads):
    """Which of the (B, H) blocks of row statistics belongs to a head of a sequence."""
    return sequence.q_batch.to(tl.int64) * heads + head


@triton.jit
def load_tile(pointers, in_rows, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """A (rows, BLOCK_D) tile; columns past HEAD_DIM are 0, and if MASKED rows not ``in_rows``."""
    BLOCK_D: tl.constexpr = pointers.shape[1]
    if MASKED:
        mask = in_rows[:, None]
        if BLOCK_D != HEAD_DIM:
            mask = mask & (tl.arange(0, BLOCK_D)[None, :] < HEAD_DIM)
        tile = tl.load(pointers, mask=mask, other=0.0)
    else:
        if BLOCK_D == HEAD_DIM:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=tl.arange(0, BLOCK_D)[None, :] < HEAD_DIM, other=0.0)
    if WIDEN_BFLOAT16 and tile.dtype == tl.bfloat16:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def load_rows(pointers, in_rows, MASKED: tl.constexpr):
    """One number per row; 0 for rows not ``in_rows`` if MASKED."""
    if MASKED:
        return tl.load(pointers, mask=in_rows, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def load_row_stats(side, at, in_rows, MASKED: tl.constexpr):
    """Row maximum, log-sum and delta of query rows ``at``; 0 for rows not ``in_rows``."""
    row_max = load_rows(side.row_max + at, in_rows, MASKED)
    log_sum = load_rows(side.log_sum + at, in_rows, MASKED)
    return row_max, log_sum, load_rows(side.delta + at, in_rows, MASKED)


@triton.jit
def store_tile(pointers, tile, in_rows, HEAD_DIM: tl.constexpr):
    """Round to the tensor's dtype and store what lies inside it."""
    BLOCK_D: tl.constexpr = pointers.shape[1]
    mask = in_rows[:, None] & (tl.arange(0, BLOCK_D)[None, :] < HEAD_DIM)
    tl.store(pointers, rounded(tile, pointers.dtype.element_ty), mask=mask)


@triton.jit
def rounded(tile, dtype: tl.constexpr):
    """A tile in another dtype, rounded to nearest."""
    if WIDEN_BFLOAT16 and dtype == tl.bfloat16:
        return tile.to(tl.bfloat16, fp_downcast_rounding="rtne")  # the interpreter truncates
    else:
        return tile.to(dtype)
