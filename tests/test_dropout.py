"""Dropout bits: known answers, an independent replica, and how random they are."""

import numpy as np
import pytest
import torch
from cases import SEED
from oracle import random_bits

from flashmod import Mask, flash_attention
from flashmod.functional import dropout_threshold
from flashmod.spec import on_ints, on_tensors

SHAPE = (8, 128, 256)  # heads, queries, keys of the sample that the statistics look at


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


def sample(seed=7, sequence=0):
    """(H, S, S_kv) of uniform numbers in [0, 1)."""
    return bits(seed, sequence, *grid()).double() / 65536


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


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_share_of_dropped_weights(p):
    """Within 5 standard deviations of the binomial; also of every head, of every row and column."""
    dropped = (sample() * 65536 < dropout_threshold(p)).double()
    for axes, limit in (((0, 1, 2), 5), ((1, 2), 5), ((0, 2), 5), ((0, 1), 5)):
        mean = dropped.mean(axes)
        count = dropped.numel() / mean.numel()
        assert (mean - p).abs().max() < limit * (p * (1 - p) / count) ** 0.5 + 1 / 65536


def test_bits_are_uniform():
    counts = torch.histc(sample(), bins=64, min=0, max=1)
    expected = counts.sum() / 64
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert 20 < chi_squared < 130  # 63 degrees of freedom: 63 +- 6 standard deviations
    for bit in range(16):
        share = ((sample() * 65536).long() >> bit & 1).double().mean()
        assert abs(share - 0.5) < 5 * 0.5 / sample().numel() ** 0.5


def correlation(a, b):
    a, b = a.flatten() - 0.5, b.flatten() - 0.5
    return float((a @ b) / (a.norm() * b.norm()))


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
    "transpose": lambda x: (x[:, :, :128], x[:, :, :128].mT),
    "next_head": lambda x: (x[1:], x[:-1]),
    "next_seed": lambda x: (x, sample(seed=8)),
    "high_seed": lambda x: (x, sample(seed=7 + (1 << 32))),
    "negated_seed": lambda x: (x, sample(seed=~7)),
    "next_sequence": lambda x: (x, sample(sequence=1)),
    "head_against_sequence": lambda x: (x[1], sample(sequence=1)[0]),
}


@pytest.mark.parametrize("pick", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_neighbours_do_not_correlate(pick):
    a, b = pick(sample())
    limit = 5 / a.numel() ** 0.5
    assert abs(correlation(a, b)) < limit
    low = [(x < 0.1).double() - 0.1 + 0.5 for x in (a, b)]  # the decisions themselves
    assert abs(correlation(*low)) < limit


def test_no_two_rows_or_heads_share_their_decisions():
    dropped = (sample() < 0.5).flatten(0, 1)
    assert len(dropped.unique(dim=0)) == len(dropped)
    columns = (sample() < 0.5).permute(2, 0, 1).flatten(1)
    assert len(columns.unique(dim=0)) == len(columns)


def test_rank_of_decisions_is_full():
    """Structure that pairs of cells do not show: a random 0/1 matrix is regular."""
    matrix = (sample()[0, :, :128] < 0.5).double()
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
