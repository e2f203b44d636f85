"""The definition of attention spelled out once more, in plain Python and NumPy.

Nothing here is shared with the library: the loops follow the written definition, and the dropout
hash is computed in unsigned arithmetic.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

GOLDEN, WORD = 0x9E3779B9, (1 << 32) - 1


def sees(
    q_idx: int,
    kv_idx: int,
    lengths: tuple[int, int],
    *,
    left: int | None = None,
    right: int | None = None,
    prefix: int = 0,
    bottom_right: bool = True,
    keys: tuple[int, int] | None = None,
) -> bool:
    """Whether query ``q_idx`` sees key ``kv_idx`` in a sequence of ``lengths`` (queries, keys).

    ``keys`` is the first visible key and the end of the visible ones; None sides are unbounded.
    """
    q_len, kv_len = lengths
    if not (0 <= q_idx < q_len and 0 <= kv_idx < kv_len):
        return False
    if keys is not None and not keys[0] <= kv_idx < keys[1]:
        return False
    diagonal = q_idx + (kv_len - q_len if bottom_right else 0)
    if left is not None and kv_idx < diagonal - left:
        return False
    in_future = right is not None and kv_idx > diagonal + right
    return not in_future or kv_idx < prefix


def mix(x: np.ndarray) -> np.ndarray:
    """lowbias32 on uint32."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def random_bits(seed: int, sequence: int, head: Any, q_idx: Any, kv_idx: Any) -> np.ndarray:
    """The 16 bits that decide over one weight; the coordinates broadcast."""
    seed_lo, seed_hi = (_word(seed >> shift) for shift in (0, 32))
    sequence, head, q_idx, kv_idx = (_word(x) for x in (sequence, head, q_idx, kv_idx))
    with np.errstate(over="ignore"):
        first = mix(mix(mix(seed_lo) ^ seed_hi) + sequence * _word(GOLDEN))
        second = mix(mix(mix(seed_hi + _word(0x3C6EF372)) ^ seed_lo) + head * _word(0x85EBCA6B))
        first = mix(first + head * _word(0x165667B1))
        second = mix(second + sequence * _word(0x27D4EB2F))
        row_first = mix(first + q_idx * _word(GOLDEN))
        row_second = mix(second ^ (q_idx * _word(0xC2B2AE3D)))
        pair = (kv_idx >> _word(4)) * _word(8) + (kv_idx & _word(7))
        x = row_first + mix(pair * _word(GOLDEN) + _word(0x52DCE729))
        x = (x ^ (x >> _word(16))) * _word(0x7FEB352D)
        x = ((x ^ (x >> _word(15))) + row_second) * _word(0x846CA68B)
        x = x ^ (x >> _word(16))
    return (x >> (kv_idx >> _word(3) & _word(1)) * _word(16)) & _word(0xFFFF)


def _word(x: Any) -> np.ndarray:
    return np.asarray(np.asarray(x, dtype=object) & WORD, dtype=np.uint32)


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    visible: np.ndarray,
    weigh: Callable[..., Any],
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence: q (S, H, D), k and v (S_kv, H_kv, .), ``visible`` (H, S, S_kv).

    ``weigh(h, i, j)`` is the dropout factor of a weight. Returns out (S, H, D_v) and lse (H, S).
    """
    q_len, heads = q.shape[:2]
    group = heads // k.shape[1]
    out = np.zeros((q_len, heads, v.shape[-1]))
    lse = np.full((heads, q_len), -np.inf)
    for h in range(heads):
        for i in range(q_len):
            keys = [j for j in range(k.shape[0]) if visible[h, i, j]]
            if not keys:
                continue
            logits = np.array([scale * q[i, h] @ k[j, h // group] for j in keys])
            total = np.exp(logits - logits.max()).sum()
            lse[h, i] = logits.max() + np.log(total)
            for j, logit in zip(keys, logits, strict=True):
                out[i, h] += np.exp(logit - lse[h, i]) * weigh(h, i, j) * v[j, h // group]
    return out, lse
