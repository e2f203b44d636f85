"""Attention spelled out once more in plain torch, sharing nothing with the library.

It imports torch alone, which a contract of import-linter watches. Everything is computed in the
dtype of the input: float64 is the truth, a half dtype is what dense torch makes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_WORD = (1 << 32) - 1
_GOLDEN = 0x9E3779B9


class Sequence(NamedTuple):
    """What a call says about one sequence beside q, k and v; None is unbounded, off or absent."""

    left: int | None = None
    right: int | None = None  # 0 is causal
    prefix: int = 0
    bottom_right: bool = True
    fn: Callable[..., Any] | None = None
    fn_args: tuple[int, ...] = ()
    labels: tuple[Tensor, Tensor] | None = None  # (S,) and (S_kv,)
    mask: Tensor | None = None  # (H|1, S|1, S_kv|1), bool or a bias
    scale: float = 1.0
    softcap: float = 0.0
    slopes: Tensor | None = None  # (H,)
    sink: Tensor | None = None  # (H,)
    rates: Tensor | None = None  # (S,), float64
    seed: int = 0
    identity: int = 0


def reach(q_len: int, kv_len: int, sequence: Sequence) -> Tensor:
    """(S, S_kv) bool: the pairs inside window, causal limit and prefix."""
    i, j = torch.arange(q_len)[:, None], torch.arange(kv_len)
    diagonal = i + (kv_len - q_len if sequence.bottom_right else 0)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if sequence.left is not None:
        seen &= j >= diagonal - sequence.left
    if sequence.right is not None:
        seen &= (j <= diagonal + sequence.right) | (j < sequence.prefix)
    return seen


def visible(heads: int, q_len: int, kv_len: int, sequence: Sequence) -> Tensor:
    """(H, S, S_kv) bool."""
    seen = reach(q_len, kv_len, sequence).expand(heads, q_len, kv_len)
    if sequence.mask is not None:
        mask = sequence.mask.detach()
        seen = seen & (mask if mask.dtype == torch.bool else mask != float("-inf"))
    if sequence.fn is not None:
        h = torch.arange(heads)[:, None, None]
        i, j = torch.arange(q_len)[:, None], torch.arange(kv_len)
        labels: tuple[Tensor, ...] = ()
        if sequence.labels is not None:
            labels = sequence.labels[0][:, None], sequence.labels[1]
        seen = seen & sequence.fn(sequence.identity, h, i, j, *labels, *sequence.fn_args)
    return seen


def logits(q: Tensor, k: Tensor, sequence: Sequence) -> Tensor:
    """(H, S, S_kv), -inf where hidden. q: (S, H, D), k: (S_kv, H_kv, D)."""
    q_len, heads, _ = q.shape
    keys = k.repeat_interleave(heads // k.shape[1], 1)
    scores = torch.einsum("ihd,jhd->hij", q * sequence.scale, keys)
    if sequence.softcap:
        scores = sequence.softcap * torch.tanh(scores / sequence.softcap)
    if sequence.slopes is not None:
        shift = len(k) - q_len if sequence.bottom_right else 0
        distance = (torch.arange(q_len)[:, None] + shift - torch.arange(len(k))).abs()
        scores = scores - sequence.slopes.to(scores.dtype)[:, None, None] * distance
    if sequence.mask is not None and sequence.mask.dtype != torch.bool:
        scores = scores + sequence.mask
    return scores.masked_fill(~visible(heads, q_len, len(k), sequence), float("-inf"))


def attend(q: Tensor, k: Tensor, v: Tensor, sequence: Sequence) -> tuple[Tensor, Tensor]:
    """Dense attention of one sequence, differentiated by autograd.

    Args:
        q: (S, H, D). k, v: (S_kv, H_kv, D) and (S_kv, H_kv, D_v).
    Returns:
        out (S, H, D_v) and lse (H, S).
    """
    terms = logits(q, k, sequence)
    if sequence.sink is not None:
        column = sequence.sink.to(terms.dtype)[:, None, None].expand(*terms.shape[:2], 1)
        terms = torch.cat((terms, column), -1)
    if not terms.shape[-1]:
        return q.new_zeros(*q.shape[:2], v.shape[-1]), terms.new_full(terms.shape[:2], -torch.inf)
    dead = (terms == float("-inf")).all(-1, keepdim=True)
    terms = terms.masked_fill(dead, 0.0)
    lse = terms.logsumexp(-1).masked_fill(dead[..., 0], float("-inf"))
    weights = terms.softmax(-1).masked_fill(dead, 0.0)[..., : len(k)]
    if sequence.rates is not None:
        weights = weights * weight_factors(weights.shape, sequence).to(weights.dtype)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hij,jhe->ihe", weights, values), lse


def per_key_recurrence(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Online softmax in its plainest form, one key after the other; causal, one head.

    Args:
        q: (S, D). k, v: (S_kv, D) and (S_kv, D_v).
    Returns:
        out (S, D_v) and lse (S,).
    """
    largest = q.new_full((len(q),), float("-inf"))
    total = q.new_zeros(len(q))
    sums = q.new_zeros(len(q), v.shape[-1])
    for j in range(len(k)):
        rows = slice(max(0, j - (len(k) - len(q))), None)  # the queries that see key j
        score = scale * (q[rows] @ k[j])
        new = torch.maximum(largest[rows], score)
        shrink, weight = (largest[rows] - new).exp(), (score - new).exp()
        largest[rows] = new
        total[rows] = total[rows] * shrink + weight
        sums[rows] = sums[rows] * shrink[:, None] + weight[:, None] * v[j]
    dead = total == 0
    return sums / total.masked_fill(dead, 1.0)[:, None], largest + total.log()


class Trace(NamedTuple):
    """What the tile by tile recurrence did, (H, query tiles, key tiles) int."""

    rescales: Tensor
    updates: Tensor
    processed: Tensor  # bool


def tile_recurrence(table: Tensor, pairs: Tensor, tiles: tuple[int, int]) -> Trace:
    """Row maxima over a table of logits (H, S, S_kv), one key tile after the other.

    Args:
        pairs: (S, S_kv) bool of :func:`reach`: a tile with none of them is skipped.
        tiles: queries and keys per tile.
    """
    heads, q_len, kv_len = table.shape
    block_m, block_n = tiles
    shape = heads, -(-q_len // block_m), -(-kv_len // block_n)
    trace = Trace(*(torch.zeros(shape, dtype=kind) for kind in (torch.int, torch.int, torch.bool)))
    for m in range(shape[1]):
        rows = slice(m * block_m, (m + 1) * block_m)
        running = torch.full(table[:, rows].shape[:2], float("-inf"), dtype=table.dtype)
        for n in range(shape[2]):
            keys = slice(n * block_n, (n + 1) * block_n)
            trace.processed[:, m, n] = bool(pairs[rows, keys].any())
            largest = table[:, rows, keys].amax(-1)
            grew = largest > running
            trace.updates[:, m, n] = grew.sum(-1)
            trace.rescales[:, m, n] = (grew & (running > float("-inf"))).sum(-1)
            running = torch.maximum(running, largest)
    return trace


def weight_factors(shape: tuple[int, ...], sequence: Sequence) -> Tensor:
    """(H, S, S_kv) float64: what dropout multiplies every weight by."""
    if sequence.rates is None:
        return torch.ones(shape, dtype=torch.float64)
    steps = (sequence.rates.double() * 65536).round().clamp(max=65535)
    steps = torch.where(sequence.rates == 1, 65536.0, steps)[:, None]
    kept = random_bits(sequence.seed, sequence.identity, shape) >= steps
    return torch.where(kept, 65536 / (65536 - steps).clamp(min=1), 0.0)


def random_bits(seed: int, sequence: int, shape: tuple[int, ...]) -> Tensor:
    """(H, S, S_kv): the 16 bits that decide over every weight, in unsigned 32-bit arithmetic."""
    heads, q_len, kv_len = shape
    head = torch.arange(heads)[:, None, None]
    i, j = torch.arange(q_len)[:, None], torch.arange(kv_len)
    low, high = (torch.tensor(seed >> shift & _WORD) for shift in (0, 32))
    first = _mix(_mix(_mix(low) ^ high) + sequence * _GOLDEN)
    second = _mix(_mix(_mix(high + 0x3C6EF372) ^ low) + head * 0x85EBCA6B)
    first = _mix(first + head * 0x165667B1)
    second = _mix(second + sequence * 0x27D4EB2F)
    row_first = _mix(first + i * _GOLDEN)
    row_second = _mix(second ^ (i * 0xC2B2AE3D & _WORD))
    pair = (j >> 4) * 8 + (j & 7)
    x = row_first + _mix(pair * _GOLDEN + 0x52DCE729) & _WORD
    x = (x ^ (x >> 16)) * 0x7FEB352D & _WORD
    x = ((x ^ (x >> 15)) + row_second) * 0x846CA68B & _WORD
    x = x ^ (x >> 16)
    return (x >> (j >> 3 & 1) * 16) & 0xFFFF


def _mix(x: Tensor) -> Tensor:
    """lowbias32 (Wellons 2018)."""
    x = x & _WORD
    x = (x ^ (x >> 16)) * 0x7FEB352D & _WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & _WORD
    return x ^ (x >> 16)
