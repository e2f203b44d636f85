"""Which weights dropout keeps, inside a kernel, in either orientation of a tile."""

import triton
import triton.language as tl

from .arguments import DropoutRows
from .device_rules import (
    dropout_bits,
    dropout_head_key,
    dropout_pair,
    dropout_pair_key,
    dropout_row_key,
    dropout_word,
)
from .primitives import load_rows


@triton.jit
def dropout_rows(q_idx, in_rows, sequence, head, dropout, MASKED: tl.constexpr):
    """What decides over the weights of query rows; unused without dropout."""
    first, second, threshold = q_idx, q_idx, dropout.threshold
    if dropout.seed is not None:
        low, high = tl.load(dropout.seed), tl.load(dropout.seed + 1)
        head_key = dropout_head_key(low, high, sequence.id, head)
        first, second = dropout_row_key(head_key, q_idx)
    if dropout.thresholds is not None:
        rows = dropout.thresholds + sequence.q_start + q_idx
        threshold = load_rows(rows, in_rows, MASKED).to(tl.int32)
    return DropoutRows(first, second, threshold)


@triton.jit
def kept(rows, kv_start, dropout, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Which weights of a tile dropout keeps: (M, N), or (N, M) if TRANSPOSED.

    One hash serves columns j and j ^ 8; ``kv_start`` is a multiple of 16, so both lie in the tile.
    """
    BLOCK_M: tl.constexpr = rows.first.shape[0]
    pairs = dropout_pair_key(dropout_pair(kv_start) + tl.arange(0, BLOCK_N // 2))
    if TRANSPOSED:
        word = dropout_word(rows.first[None, :], rows.second[None, :], pairs[:, None])
        word = tl.reshape(word, [BLOCK_N // 16, 8, BLOCK_M])
        bits = tl.join(dropout_bits(word, 0), dropout_bits(word, 8))
        bits = tl.reshape(tl.permute(bits, (0, 3, 1, 2)), [BLOCK_N, BLOCK_M])
    else:
        word = dropout_word(rows.first[:, None], rows.second[:, None], pairs[None, :])
        word = tl.reshape(word, [BLOCK_M, BLOCK_N // 16, 8])
        bits = tl.join(dropout_bits(word, 0), dropout_bits(word, 8))
        bits = tl.reshape(tl.permute(bits, (0, 1, 3, 2)), [BLOCK_M, BLOCK_N])
    if dropout.thresholds is None:
        return bits >= rows.threshold
    elif TRANSPOSED:
        return bits >= rows.threshold[None, :]
    else:
        return bits >= rows.threshold[:, None]
