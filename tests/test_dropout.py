"""Dropout bits: known answers, an independent replica, and how random they are.

Limits are standard deviations of the true distribution, six where millions of numbers are compared
and else five, so that a sound hash passes with near certainty; seeds are fixed.
"""

from functools import cache

import numpy as np
import pytest
import torch
from cases import SEED
from oracle import random_bits

from flashmod import Mask, flash_attention
from flashmod.functional import dropout_threshold
from flashmod.spec import on_ints, on_tensors

SHAPE = (16, 512, 512)  # heads, queries, keys of the sample that the statistics look at
SEEDS = (7, 8, 9)  # three samples are 12 million numbers


def bits(seed, sequence, head, q_idx, kv_idx):
    """The rules on tensors, as the reference and the backends call them."""
    seed_lo, seed_hi = torch.tensor(seed).reshape(1).view(torch.int32).unbind()
    sequence, head, q_idx, kv_idx = (
        torch.as_tensor(x, dtype=torch.int32) for x in (sequence, head, q_idx, kv_idx)
    )
    head_key = on_tensors.dropout_head_key(seed_lo, seed_hi, sequence, head)
    row_key = on_tensors.dropout_row_key(head_key, q_idx)
    word = on_tensors.dropout_word(
        *row_key, on_tensors.dropout_pair_key(on_tensors.dropout_pair(kv_idx))
    )
    return on_tensors.dropout_bits(word, kv_idx)


def grid(shape=SHAPE):
    axes = (torch.arange(n, dtype=torch.int32) for n in shape)
    return torch.meshgrid(*axes, indexing="ij")


@cache
def sample(seed=SEEDS[0], sequence=0):
    """(H, S, S_kv) int32, the 16 bits of every weight."""
    return bits(seed, sequence, *grid())


@pytest.mark.parametrize(
    ("coordinates", "answer"),
    [
        ((0, 0, 0, 0, 0), 0x80B2),
        ((0, 0, 0, 0, 8), 0x0026),
        ((1, 0, 0, 0, 0), 0xB7F2),
        ((1 << 32, 0, 0, 0, 0), 0xFE82),
        ((0, 1, 0, 0, 0), 0xB8AD),
        ((0, 0, 1, 0, 0), 0xED30),
        ((0, 0, 0, 1, 0), 0xCC74),
        ((0, 0, 0, 0, 1), 0xC3E3),
        ((SEED, 3, 5, 1000, 70001), 0x4C81),
    ],
)
def test_known_answers(coordinates, answer):
    """A seed keeps its meaning from one release to the next."""
    assert int(bits(*coordinates)) == answer


@pytest.mark.parametrize("seed", [0, -1, SEED, 2**63 - 1, -(2**63)])
def test_rules_equal_the_replica(seed):
    heads, rows, keys = grid((3, 20, 40))
    rows, keys = rows + 50_000, keys + 1_000_000
    ours = bits(seed, 11, heads, rows, keys)
    theirs = random_bits(seed, 11, heads.numpy(), rows.numpy(), keys.numpy())
    assert np.array_equal(ours.numpy(), theirs.astype(np.int32))


def test_a_word_serves_two_keys_eight_apart():
    pairs = [on_ints.dropout_pair(key) for key in range(64)]
    for key, pair in enumerate(pairs):
        assert [other for other in range(64) if pairs[other] == pair] == sorted({key, key ^ 8})
    assert on_ints.dropout_bits(0x12345678, 0) == 0x5678
    assert on_ints.dropout_bits(0x12345678, 8) == 0x1234
    negative = torch.tensor(-0x12345678, dtype=torch.int32)  # the shift must be logical
    assert int(on_tensors.dropout_bits(negative, 8)) == (-0x12345678 >> 16) & 0xFFFF


def test_threshold_is_the_nearest_step_and_only_one_drops_all():
    assert [dropout_threshold(p) for p in (0, 0.25, 0.1, 1)] == [0, 16384, 6554, 65536]
    assert dropout_threshold(1 - 1e-9) == 65535


@pytest.mark.parametrize("p", [1 / 65536, 0.1, 0.5, 0.9])
def test_share_of_dropped_weights(p):
    """Of 12 million: a rate in steps of 1/256 would miss 0.1 by 28 standard deviations."""
    threshold = dropout_threshold(p)
    exact = threshold / 65536
    assert abs(exact - p) <= 0.5 / 65536
    dropped = torch.stack([sample(seed) < threshold for seed in SEEDS])
    deviation = (exact * (1 - exact) / dropped.numel()) ** 0.5
    assert abs(dropped.double().mean() - exact) < 5 * deviation


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("axes", [(1, 2), (0, 2), (0, 1), (2,), (0,), (1,)])
def test_share_of_every_head_row_and_column(p, axes):
    threshold = dropout_threshold(p)
    exact = threshold / 65536
    mean = (sample() < threshold).double().mean(axes)
    count = sample().numel() / mean.numel()
    limit = 6 if count > 100 else 8  # few draws: the binomial has heavier tails
    assert (mean - exact).abs().max() < limit * (exact * (1 - exact) / count) ** 0.5


def test_bits_are_uniform():
    """Chi-square over all 65536 values; every bit, and every pair of bits, for itself."""
    numbers = torch.cat([sample(seed).flatten() for seed in SEEDS])
    counts = numbers.bincount(minlength=65536).double()
    expected = len(numbers) / 65536
    freedom = 65535
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_squared - freedom) < 5 * (2 * freedom) ** 0.5
    signs = torch.stack([(sample() >> bit & 1).flatten() * 2.0 - 1 for bit in range(16)])
    limit = 5 / signs.shape[1] ** 0.5
    assert signs.mean(1).abs().max() < limit
    assert (signs @ signs.T / signs.shape[1] - torch.eye(16)).abs().max() < limit


def correlation(a, b):
    a, b = (x.flatten() - x.mean() for x in (a, b))
    return float((a @ b) / (a.norm() * b.norm()))


def above(x):
    """The entries of every head above the diagonal."""
    return x[:, torch.ones(x.shape[1:]).triu(1).bool()]


NEIGHBOURS = {
    "next_key": lambda x: (x[..., 1:], x[..., :-1]),
    "pair_of_keys": lambda x: (
        x.unflatten(-1, (-1, 2, 8))[..., 0, :],
        x.unflatten(-1, (-1, 2, 8))[..., 1, :],
    ),
    "keys_16_apart": lambda x: (x[..., 16:], x[..., :-16]),
    "next_row": lambda x: (x[:, 1:], x[:, :-1]),
    "rows_32_apart": lambda x: (x[:, 32:], x[:, :-32]),
    "diagonal": lambda x: (x[:, 1:, 1:], x[:, :-1, :-1]),
    "antidiagonal": lambda x: (x[:, 1:, :-1], x[:, :-1, 1:]),
    "query_and_key_swapped": lambda x: (above(x), above(x.mT)),
    "next_head": lambda x: (x[1:], x[:-1]),
    "next_seed": lambda x: (x, sample(seed=8)),
    "high_word_of_seed": lambda x: (x, sample(seed=7 + (1 << 32))),
    "words_of_seed_swapped": lambda x: (x, sample(seed=7 << 32)),
    "negated_seed": lambda x: (x, sample(seed=~7)),
    "next_sequence": lambda x: (x, sample(sequence=1)),
    "head_against_sequence": lambda x: (x[1:], sample(sequence=1)[:-1]),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_do_not_correlate(name):
    """The bits, and the decisions at two rates, over a million pairs or more."""
    a, b = NEIGHBOURS[name](sample())
    assert a.numel() > 1_000_000
    assert abs(correlation(a.float(), b.float())) < 5 / a.numel() ** 0.5
    for p in (0.1, 0.5):
        decisions = ((x < p * 65536).float() for x in (a, b))
        assert abs(correlation(*decisions)) < 5 / a.numel() ** 0.5


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_no_two_rows_or_columns_of_a_head_agree_more_than_chance(axis):
    """All pairs: the Gram matrix of random signs is the identity, up to a normal error."""
    signs = (sample() < 32768).float() * 2 - 1
    signs = signs if axis == "rows" else signs.mT
    agreement = signs @ signs.mT - signs.shape[-1] * torch.eye(signs.shape[-2])
    assert agreement.abs().max() < 6.5 * signs.shape[-1] ** 0.5


def test_no_two_rows_heads_or_columns_have_one_key():
    """What decides a row is 64 bits, so that a million of them do not collide."""
    zero, many = torch.tensor(0, dtype=torch.int32), torch.arange(1 << 20, dtype=torch.int32)
    head_key = on_tensors.dropout_head_key(torch.tensor(7, dtype=torch.int32), zero, zero, zero)
    rows = on_tensors.dropout_row_key(head_key, many)
    sequence, head = many >> 8, many & 255
    heads = on_tensors.dropout_head_key(torch.tensor(7, dtype=torch.int32), zero, sequence, head)
    for first, second in (rows, heads):
        assert len((first.long() << 32 | second.long() & 0xFFFFFFFF).unique()) == len(many)
    columns = on_tensors.dropout_pair_key(on_tensors.dropout_pair(many))
    assert len(columns.unique()) == len(many) // 2


def test_rank_of_decisions_is_full():
    """Structure that pairs of cells do not show: a random 0/1 matrix is regular."""
    matrix = (sample()[0, :128, :128] < 32768).double()
    assert torch.linalg.matrix_rank(matrix) >= 127


def test_output_keeps_its_mean():
    q, k = torch.zeros(1, 64, 2, 4), torch.zeros(1, 256, 2, 4)
    v = torch.ones(1, 256, 2, 4)
    out = flash_attention(q, k, v, dropout_p=0.3, dropout_seed=1)
    count = 64 * 2 * 256
    assert abs(out.mean() - 1) < 5 * (0.3 / 0.7 / count) ** 0.5


def test_a_new_seed_each_call_repeatable_under_manual_seed():
    x = torch.randn(1, 9, 2, 4)

    def outputs():
        torch.manual_seed(3)
        return [flash_attention(x, x, x, dropout_p=0.5, mask=Mask(causal=True)) for _ in range(2)]

    first, second = outputs()
    assert not torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(outputs(), (first, second), strict=True))
