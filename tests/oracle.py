"""The definition of attention spelled out once more, in plain Python and NumPy.

Nothing here is shared with the library: the loops follow the written definition, and the dropout
hash is computed in unsigned arithmetic.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Scores(NamedTuple):
    """What a product ``q . k`` of one sequence becomes before the softmax."""

    scale: float
    softcap: float = 0.0
    slopes: np.ndarray | None = None  # (H,), taken off per step from the diagonal
    shift: int = 0  # the diagonal of query i is key i + shift
    bias: np.ndarray | None = None  # (H, S, S_kv), -inf hides
    sink: np.ndarray | None = None  # (H,)


def logits(q: np.ndarray, k: np.ndarray, visible: np.ndarray, scores: Scores) -> np.ndarray:
    """(H, S, S_kv) of one sequence, -inf where hidden. Shapes as in :func:`attend`."""
    group = q.shape[1] // k.shape[1]
    table = np.full(visible.shape, -np.inf)
    for h, i, j in np.argwhere(visible):
        x = scores.scale * float(q[i, h] @ k[j, h // group])
        if scores.softcap:
            x = scores.softcap * math.tanh(x / scores.softcap)
        if scores.slopes is not None:
            x -= scores.slopes[h] * abs(i + scores.shift - j)
        if scores.bias is not None:
            x += scores.bias[h, i, j]
        table[h, i, j] = x
    return table


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    visible: np.ndarray,
    scores: Scores,
    weigh: Callable[..., Any],
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence: q (S, H, D), k and v (S_kv, H_kv, .), ``visible`` (H, S, S_kv).

    ``weigh(h, i, j)`` is the dropout factor of a weight. Returns out (S, H, D_v) and lse (H, S).
    """
    q_len, heads = q.shape[:2]
    group = heads // k.shape[1]
    table = logits(q, k, visible, scores)
    out = np.zeros((q_len, heads, v.shape[-1]))
    lse = np.full((heads, q_len), -np.inf)
    for h, i in np.ndindex(heads, q_len):
        keys = [j for j in range(k.shape[0]) if table[h, i, j] > -np.inf]
        terms = [table[h, i, j] for j in keys]
        if scores.sink is not None:
            terms.append(scores.sink[h])
        if not terms:
            continue
        largest = max(terms)
        lse[h, i] = largest + math.log(sum(math.exp(x - largest) for x in terms))
        for j in keys:
            out[i, h] += math.exp(table[h, i, j] - lse[h, i]) * weigh(h, i, j) * v[j, h // group]
    return out, lse


class Trace(NamedTuple):
    """What the tile by tile recurrence of one sequence did: (H, query tiles, key tiles)."""

    rescales: np.ndarray
    updates: np.ndarray
    kinds: np.ndarray  # 0 skipped, 1 partial, 2 full
    max_logit: np.ndarray  # (H, S)
    entropy: np.ndarray  # (H, S), in nats


def recurrence(
    table: np.ndarray, reach: np.ndarray, tiles: tuple[int, int], any_hidden: bool
) -> Trace:
    """Online softmax over a table of logits (H, S, S_kv), one row and one key tile at a time.

    Args:
        reach: (S, S_kv), the pairs inside the key intervals: a tile with none of them is skipped.
        tiles: queries and keys per tile.
        any_hidden: a mask function or an attention mask may hide any pair: no tile counts as full,
            and neither does one that reaches past the last key.
    """
    heads, q_len, kv_len = table.shape
    block_m, block_n = tiles
    shape = heads, -(-q_len // block_m), -(-kv_len // block_n)
    rescales, updates, kinds = (np.zeros(shape, dtype=np.int32) for _ in range(3))
    for m, n in np.ndindex(*shape[1:]):
        pairs = reach[m * block_m : (m + 1) * block_m, n * block_n : (n + 1) * block_n]
        whole = pairs.all() and pairs.shape[1] == block_n and not any_hidden
        kinds[:, m, n] = 0 if not pairs.any() else 2 if whole else 1
    max_logit = np.full((heads, q_len), -np.inf)
    entropy = np.zeros((heads, q_len))
    for h, i in np.ndindex(heads, q_len):
        running = -math.inf
        for n in range(shape[2]):
            if kinds[h, i // block_m, n] == 0:
                continue
            largest = max(table[h, i, n * block_n : (n + 1) * block_n])
            if largest > running:
                updates[h, i // block_m, n] += 1
                rescales[h, i // block_m, n] += running > -math.inf
                running = largest
        max_logit[h, i] = running
        entropy[h, i] = _entropy([x for x in table[h, i] if x > -math.inf])
    return Trace(rescales, updates, kinds, max_logit, entropy)


def _entropy(terms: list[float]) -> float:
    if not terms:
        return 0.0
    weights = [math.exp(x - max(terms)) for x in terms]
    shares = [w / sum(weights) for w in weights]
    return -sum(p * math.log(p) for p in shares if p > 0)
