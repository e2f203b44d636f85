"""The gradient of a bias: gradients of logits, summed over the axes that the bias lacks."""

import triton
import triton.language as tl

from .arguments import Head
from .backward_q import tile_gradient
from .masking import query_tile, seeing_queries, seen_keys
from .primitives import (
    key_side,
    load_row_stats,
    load_tile,
    query_side,
    rounded,
    sequence_at,
)
from .scores import head_scores


@triton.jit
def _accumulate(
    total, first, start, end, sequence, index, operands, stats, mask, dropout, score, scale,
    heads, rows,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    LINEAR: tl.constexpr,
):  # fmt: skip
    """Add the gradients of one head's logits of a query tile and key tiles [start, end)."""
    query = query_tile(first, sequence, index, mask, dropout, BLOCK_M)
    own = (first, sequence.limits.q_len)
    side = query_side(operands, stats, sequence, index, heads, rows, own, BLOCK_M, BLOCK_D, BLOCK_V)
    at, sees = tl.cast(first, tl.int64), query.lo < query.hi
    q = load_tile(side.q + at * side.q_stride, sees, HEAD_DIM, True)
    grad_out = load_tile(side.grad_out + at * side.grad_stride, sees, V_DIM, True)
    row_stats = load_row_stats(side, query.idx, sees, True)
    seen, cuts = seen_keys(first, sequence.limits, BLOCK_M, BLOCK_N, True)
    keys = key_side(operands, sequence, index // GROUP, seen, BLOCK_N, BLOCK_D, BLOCK_V)
    scores = head_scores(score, sequence, index, scale, LINEAR)
    head = Head(sequence, index, dropout, score, scores)
    for tile in tl.range(start, end, BLOCK_N):
        grad, k = tile_gradient(
            q, grad_out, row_stats, query, keys, tile, head, mask,
            HEAD_DIM, V_DIM, BLOCK_N, PRECISION, LINEAR, True, False,
        )  # fmt: skip
        total += grad
    return total


@triton.jit(do_not_specialize=["rows", "kv_rows", "q_size", "kv_size", "sequences", "members"])
def bias_kernel(
    operands, grad_bias, stats, table, mask, dropout, score, score_scale: tl.float64,
    q_size, kv_size, bias_heads, sequences, members, heads, rows, kv_rows,
    ALIGN: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, LINEAR: tl.constexpr, EVERYWHERE: tl.constexpr,
    OVER_Q: tl.constexpr, OVER_K: tl.constexpr,
):  # fmt: skip
    """One program per tile of the bias: what shares it, one after another.

    Args:
        q_size, kv_size: of the bias, 1 where it has no such axis (OVER_Q, OVER_K).
        sequences, members: how many sequences and heads share one entry.
    """
    program = tl.program_id(0)
    kv_first = program % tl.cdiv(kv_size, BLOCK_N) * BLOCK_N
    program = program // tl.cdiv(kv_size, BLOCK_N)
    q_first = program % tl.cdiv(q_size, BLOCK_M) * BLOCK_M
    program = program // tl.cdiv(q_size, BLOCK_M)
    bias_head, bias_n = program % bias_heads, program // bias_heads
    accumulate: tl.constexpr = stats.saved.dtype.element_ty
    total = tl.zeros([BLOCK_M, BLOCK_N], accumulate)
    for n in range(bias_n * sequences, (bias_n + 1) * sequences):
        sequence = sequence_at(table, tl.cast(n, tl.int32), rows, kv_rows, ALIGN)
        limits = sequence.limits
        q_start, q_end = q_first, tl.minimum(q_first + BLOCK_M, limits.q_len)
        if OVER_Q:
            q_end = limits.q_len
            if not OVER_K:
                seeing, cuts = seeing_queries(kv_first, limits, BLOCK_M, BLOCK_N, True)
                q_start, q_end = cuts[0], cuts[3]
        for first in range(q_start, q_end, BLOCK_M):
            seen, cuts = seen_keys(first, limits, BLOCK_M, BLOCK_N, True)
            start, end = cuts[0], cuts[3]
            if not OVER_K:
                start, end = tl.maximum(start, kv_first), tl.minimum(end, kv_first + BLOCK_N)
            if start < end:
                for member in range(bias_head * members, (bias_head + 1) * members):
                    index = tl.cast(member, tl.int32)  # an int in the interpreter
                    total = _accumulate(
                        total, first, start, end, sequence, index, operands, stats, mask, dropout,
                        score, tl.full((), score_scale, accumulate), heads, rows,
                        GROUP, HEAD_DIM, V_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, PRECISION,
                        LINEAR,
                    )  # fmt: skip
    at = grad_bias.ptr + bias_n.to(tl.int64) * grad_bias.strides[0]
    at += bias_head.to(tl.int64) * grad_bias.strides[1]
    q_idx, kv_idx = q_first + tl.arange(0, BLOCK_M), kv_first + tl.arange(0, BLOCK_N)
    if OVER_Q:
        total, q_idx = tl.sum(total, 0, keep_dims=True), tl.zeros([1], tl.int32)
    if OVER_K:
        total, kv_idx = tl.sum(total, 1, keep_dims=True), tl.zeros([1], tl.int32)
    at += q_idx.to(tl.int64)[:, None] * grad_bias.strides[2]
    at = at + kv_idx.to(tl.int64)[None, :] * grad_bias.strides[3]
    inside = (q_idx < q_size)[:, None] & (kv_idx < kv_size)[None, :]
    tl.store(at, rounded(total, grad_bias.ptr.dtype.element_ty), mask=inside)
