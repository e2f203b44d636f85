"""The rules by brute force: intervals, tile ranges and their transpose."""

import inspect
import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import sees

from flashmod import rules
from flashmod.grammar import grammar_offences
from flashmod.spec import UNBOUNDED, Limits, on_ints, on_tensors, sequence_limits

RULES = {name: fn for name, fn in vars(rules).items() if inspect.isfunction(fn)}


def limits_of(lengths, left, right, prefix, bottom_right, keys):
    sides = [UNBOUNDED if side is None else side for side in (left, right)]
    return sequence_limits(*lengths, int(bottom_right), [*sides, prefix, *keys])


def visibility(lengths, left, right, prefix, bottom_right, keys):
    """The set of visible keys of every query, by the written definition."""
    options = {
        "left": left,
        "right": right,
        "prefix": prefix,
        "bottom_right": bottom_right,
        "keys": keys,
    }
    q_len, kv_len = lengths
    return [{j for j in range(kv_len) if sees(i, j, lengths, **options)} for i in range(q_len)]


def check_key_intervals(args):
    limits = limits_of(*args)
    for q_idx, seen in enumerate(visibility(*args)):
        lo, hi = on_ints.key_interval(q_idx, limits)
        assert set(range(lo, hi)) == seen, (args, q_idx)
        for kv_idx in range(args[0][1]):
            assert on_ints.is_visible(kv_idx, lo, hi) == (kv_idx in seen)


def check_key_ranges(args):
    limits, seen = limits_of(*args), visibility(*args)
    for first, last in tiles_of(args[0][0]):
        rows = seen[first : last + 1]
        assert set(range(*on_ints.key_range(first, last, limits))) == set().union(*rows), (
            args,
            first,
            last,
        )
        full = on_ints.full_key_range(first, last, limits)
        assert set(range(*full)) == set.intersection(*rows), (args, first, last)


def check_query_ranges(args):
    limits, seen = limits_of(*args), visibility(*args)
    for first, last in tiles_of(args[0][1]):
        keys = set(range(first, last + 1))
        some = {i for i, row in enumerate(seen) if row & keys}
        every = {i for i, row in enumerate(seen) if keys <= row}
        assert set(range(*on_ints.query_range(first, last, limits))) == some, (args, first, last)
        assert set(range(*on_ints.full_query_range(first, last, limits))) == every, (
            args,
            first,
            last,
        )


CHECKS = {
    "intervals": check_key_intervals,
    "key_ranges": check_key_ranges,
    "query_ranges": check_query_ranges,
}


def tiles_of(length):
    return [(first, last) for first in range(length) for last in range(first, length)]


SIDES = (None, 0, 1, 3)


@pytest.mark.parametrize("bottom_right", [True, False], ids=["bottom_right", "top_left"])
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_rules_by_brute_force(check, bottom_right):
    """Every small sequence and mask, with keys hidden at either end as key padding does."""
    for lengths in product(range(5), range(5)):
        kv_len = lengths[1]
        ends = {(0, kv_len), (1, kv_len), (0, max(kv_len - 1, 0)), (2, 3), (kv_len, 0)}
        for left, right, prefix, keys in product(SIDES, SIDES, (0, 2, 9), ends):
            check((lengths, left, right, prefix, bottom_right, keys))


@st.composite
def masks(draw):
    lengths = draw(st.tuples(st.integers(0, 24), st.integers(0, 24)))
    left, right = (draw(st.none() | st.integers(0, 30)) for _ in range(2))
    prefix, bottom_right = draw(st.integers(0, 30)), draw(st.booleans())
    keys = draw(st.tuples(st.integers(0, 24), st.integers(0, 24)))
    return lengths, left, right, prefix, bottom_right, keys


@given(masks())
def test_rules_on_longer_sequences(args):
    for check in CHECKS.values():
        check(args)


@given(masks())
def test_both_ends_grow_with_the_query(args):
    """What makes the tile ranges closed forms."""
    limits = limits_of(*args)
    ends = [on_ints.key_interval(q_idx, limits) for q_idx in range(args[0][0])]
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(ends))


def test_queries_past_the_sequence_see_nothing():
    limits = limits_of((3, 5), None, None, 4, True, (0, 5))
    for q_idx in (3, 4, 100):
        lo, hi = on_ints.key_interval(q_idx, limits)
        assert hi <= lo


@given(masks())
def test_tensors_and_ints_agree(args):
    limits, (q_len, kv_len) = limits_of(*args), args[0]
    as_tensors = Limits(*(torch.tensor(x, dtype=torch.int32) for x in limits))
    q_idx = torch.arange(q_len + 2, dtype=torch.int32)
    for bound in (limits, as_tensors):
        lo, hi = on_tensors.key_interval(q_idx, bound)
        pairs = [on_ints.key_interval(i, limits) for i in range(q_len + 2)]
        assert list(zip(lo.tolist(), hi.tolist(), strict=True)) == pairs
    for name, length in (("key_range", q_len), ("full_key_range", q_len), ("query_range", kv_len)):
        firsts, lasts = (
            (torch.tensor(x, dtype=torch.int32) for x in zip(*tiles_of(length), strict=True))
            if length
            else (q_idx[:0],) * 2
        )
        start, end = getattr(on_tensors, name)(firsts, lasts, as_tensors)
        pairs = [getattr(on_ints, name)(a, b, limits) for a, b in tiles_of(length)]
        assert list(zip(start.tolist(), end.tolist(), strict=True)) == pairs


@given(st.lists(st.integers(0, 70), min_size=4, max_size=4), st.sampled_from([1, 3, 16, 32]))
def test_split_tiles(numbers, block):
    """Head, middle and tail cover the range in whole tiles, and the middle needs no mask."""
    start, full_start, full_end, end = sorted(numbers)
    cuts = on_ints.split_tiles(start, end, full_start, full_end, block)
    assert list(cuts) == sorted(cuts)
    assert all(cut % block == 0 for cut in cuts)
    tiles = [range(first, first + block) for first in range(cuts[0], cuts[3], block)]
    assert {x for tile in tiles for x in tile} >= set(range(start, end))
    for tile in tiles:
        assert set(tile) & set(range(start, end)), "an empty tile"
        whole = full_start <= tile.start and tile.stop <= full_end
        in_middle = cuts[1] <= tile.start < cuts[2]
        assert in_middle == whole


@pytest.mark.parametrize("block", [1, 16])
def test_split_tiles_of_nothing(block):
    cuts = on_ints.split_tiles(21, 21, 21, 21, block)
    assert cuts[0] == cuts[3]


def test_split_tiles_without_a_full_part():
    for full in ((5, 5), (0, 0), (70, 70), (40, 3)):
        start, full_start, full_end, end = on_ints.split_tiles(3, 50, *full, 16)
        assert (start, end) == (0, 64)
        assert start <= full_start == full_end <= end


@pytest.mark.parametrize("name", RULES)
def test_rules_keep_the_grammar_of_leaf_functions(name):
    """Beside the names of mask functions a rule may call ``exp`` and other rules."""
    assert list(grammar_offences(RULES[name], structs=True, calls=("exp", *RULES))) == []


def test_only_rules_may_call_exp():
    assert any("may be called" in text for text in grammar_offences(rules.tanh))
    called = {name: fn.__code__.co_names for name, fn in RULES.items()}
    assert [name for name, names in called.items() if "exp" in names] == ["tanh"]


def test_unbounded_sides_stay_inside_int32():
    longest = 1 << 28
    limits = limits_of((longest, longest), None, None, 0, True, (0, longest))
    q_idx = torch.tensor([0, longest - 1], dtype=torch.int32)
    lo, hi = on_tensors.key_interval(
        q_idx, Limits(*(torch.tensor(x, dtype=torch.int32) for x in limits))
    )
    assert lo.dtype == hi.dtype == torch.int32
    assert (lo == 0).all() and (hi == longest).all()


def magnitudes(dtype):
    """From 1e-30 to 1e6, dense where the two halves of :func:`rules.tanh` meet, both signs."""
    wide = torch.logspace(-30, 6, 20_001, dtype=torch.float64)
    near = torch.linspace(0.5, 0.8, 20_001, dtype=torch.float64)
    knee = torch.tensor(0.625, dtype=torch.float64)
    ends = [knee, knee.nextafter(knee + 1), knee.nextafter(knee - 1)]
    x = torch.cat([wide, near, torch.stack(ends)]).to(dtype)
    return torch.cat([x, -x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_to_two_units_in_the_last_place(dtype):
    x = magnitudes(dtype)
    truth = torch.tensor([math.tanh(value) for value in x.tolist()], dtype=torch.float64)
    unit = torch.from_numpy(np.spacing(truth.to(dtype).abs().numpy())).double()
    got = on_tensors.tanh(x)
    assert got.dtype == dtype
    assert ((got.double() - truth).abs() / unit).max() <= 2
    assert torch.equal(on_tensors.tanh(-x), -got)
    assert (got.abs() <= 1).all()


def test_tanh_of_numbers_and_of_what_is_none():
    for x in (0.0, 1e-30, 0.3, -0.7, 5.0, -1e6):
        assert math.isclose(on_ints.tanh(x), math.tanh(x), rel_tol=1e-15)
    odd = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    got = on_tensors.tanh(odd)
    assert got[:2].tolist() == [1.0, -1.0] and got[2].isnan() and (got[3:] == 0).all()


def test_derivative_of_tanh():
    """By autograd, as the reference takes it: 1 at 0, 0 far out, never NaN."""
    x = torch.cat([torch.zeros(1, dtype=torch.float64), magnitudes(torch.float64)])
    x.requires_grad_()
    (slope,) = torch.autograd.grad(on_tensors.tanh(x).sum(), x)
    assert slope[0] == 1.0
    torch.testing.assert_close(slope, 1 - x.detach().tanh() ** 2, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("cap", [0.5, 3.0, 1e4])
def test_soft_cap_and_its_slope(cap):
    score = torch.linspace(-40, 40, 1001, dtype=torch.float64, requires_grad=True)
    capped = on_tensors.soft_cap(score, cap)
    torch.testing.assert_close(capped, cap * (score / cap).tanh())
    (slope,) = torch.autograd.grad(capped.sum(), score)
    torch.testing.assert_close(on_tensors.soft_cap_slope(capped.detach(), cap), slope)


def test_alibi_by_brute_force():
    for lengths, bottom_right in product(((4, 4), (3, 7), (7, 3)), (True, False)):
        limits = limits_of(lengths, None, None, 0, bottom_right, (0, lengths[1]))
        shift = lengths[1] - lengths[0] if bottom_right else 0
        for i, j in product(*map(range, lengths)):
            assert on_ints.alibi(i, j, 0.5, limits) == 0.5 * abs(i + shift - j)


@pytest.mark.parametrize("threshold", [0, 1, 6554, 16384, 65535, 65536])
def test_keep_scale_is_one_over_the_exact_keep_probability(threshold):
    scale = on_ints.keep_scale(threshold)
    assert scale == (0 if threshold == 65536 else 65536 / (65536 - threshold))
    assert on_tensors.keep_scale(torch.tensor(float(threshold), dtype=torch.float64)) == scale
