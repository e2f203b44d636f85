"""Mask -> limits, and what a mask function may be made of."""

import dataclasses
import functools

import pytest
import torch
from cases import by_head, reference_attention, striped

from flashmod import Mask, flash_attention, mask_fn
from flashmod.grammar import grammar_offences
from flashmod.masks import registered_mask_fn
from flashmod.spec import UNBOUNDED

CPU = torch.device("cpu")
OUTSIDE = 3


def limits(mask, n=2):
    return mask.limits(n, CPU).tolist()


@pytest.mark.parametrize(
    ("mask", "row"),
    [
        (Mask(), [UNBOUNDED, UNBOUNDED, 0]),
        (Mask(causal=True), [UNBOUNDED, 0, 0]),
        (Mask(window=(3, 2)), [3, 2, 0]),
        (Mask(window=[3, 2]), [3, 2, 0]),
        (Mask(causal=True, window=(3, 2)), [3, 0, 0]),
        (Mask(causal=True, prefix_len=7), [UNBOUNDED, 0, 7]),
        (Mask(window=(2**40, None), prefix_len=2**31), [UNBOUNDED, UNBOUNDED, UNBOUNDED]),
    ],
)
def test_one_value_serves_every_sequence(mask, row):
    table = mask.limits(3, CPU)
    assert table.dtype == torch.int32
    assert table.tolist() == [[*row, 0, UNBOUNDED]] * 3


def test_one_value_per_sequence():
    mask = Mask(
        causal=[True, False, torch.tensor(True).item()],
        window=([None, 4, 2**40], torch.tensor([5, 6, 7])),
        prefix_len=torch.tensor([1, 2, 3], dtype=torch.int64),
    )
    assert [row[:3] for row in limits(mask, 3)] == [[UNBOUNDED, 0, 1], [4, 6, 2], [UNBOUNDED, 0, 3]]


@pytest.mark.parametrize(
    "causal", [torch.tensor([True, False]), torch.tensor([1, 0]), (True, False)]
)
def test_causal_per_sequence(causal):
    assert [row[1] for row in limits(Mask(causal=causal))] == [0, UNBOUNDED]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"window": (-1, 0)}, ["window left", "-1", "None"]),
        ({"window": (0, -2)}, ["window right", "-2", "None"]),
        ({"prefix_len": -3}, ["prefix_len", "-3"]),
        ({"align": "bottom"}, ["align", "bottom_right", "top_left", "'bottom'"]),
        ({"window": 3}, ["window", "pair", "3"]),
        ({"window": (1, 2, 3)}, ["window", "pair", "(1, 2, 3)"]),
        ({"fn_args": (3,)}, ["fn_args", "(3,)", "without fn"]),
    ],
)
def test_a_bad_mask_says_what_is_wrong(arguments, words):
    with pytest.raises(ValueError) as error:
        Mask(**arguments)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("name", ["causal", "prefix_len", "window"])
def test_the_wrong_number_of_sequences_names_both(name):
    value = ([1, 2, 3], None) if name == "window" else [1, 2, 3]
    with pytest.raises(ValueError, match=rf"{name}.*\(3,\).*2 sequences"):
        limits(Mask(**{name: value}))


@pytest.mark.parametrize(
    "arguments",
    [
        {"window": ([1, -1], None)},
        {"prefix_len": torch.tensor([0, -4])},
        {"window": (None, [0, -9])},
    ],
)
def test_a_negative_limit_of_one_sequence_is_refused_by_the_call(arguments):
    x = torch.zeros(2, 3, 1, 4)
    with pytest.raises(ValueError, match=r"0 or more, got -\d"):
        flash_attention(x, x, x, mask=Mask(**arguments))


@pytest.mark.parametrize("window", [2**31, 2**32, 2**63 - 1])
def test_a_very_wide_window_per_sequence_is_unbounded(window):
    """None of them may wrap around in 32 bits."""
    for value in ([window, 1], torch.tensor([window, 1])):
        assert limits(Mask(window=(value, None)))[0][0] == UNBOUNDED


@pytest.mark.parametrize("value", [1.5, [1, 1.5], torch.tensor([1.0, 2.0]), "12"], ids=repr)
def test_a_window_that_is_no_integer_is_a_type_error(value):
    with pytest.raises(TypeError, match="window left must"):
        limits(Mask(window=(value, None)))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"prefix_len": None}, "prefix_len"),
        ({"prefix_len": [None, 1]}, "prefix_len"),
        ({"causal": None}, "causal"),
        ({"causal": [None, True]}, "causal"),
        ({"causal": [1.0, 0.0]}, "causal"),
    ],
)
def test_only_a_window_side_may_be_none(arguments, name):
    with pytest.raises(TypeError, match=f"mask {name} must be an int or"):
        limits(Mask(**arguments))


@pytest.mark.parametrize("causal", [1, 0])
def test_causal_as_a_number(causal):
    assert limits(Mask(causal=causal)) == limits(Mask(causal=bool(causal)))


def test_a_mask_cannot_be_changed_but_replaced():
    mask = Mask(window=(3, 0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.causal = True
    assert dataclasses.replace(mask, causal=True).window == (3, 0)


def with_if(batch, head, q_idx, kv_idx):
    if kv_idx > q_idx:
        return kv_idx < 3
    return kv_idx >= 0


def with_conditional(batch, head, q_idx, kv_idx):
    return kv_idx < 3 if head == 0 else kv_idx >= 3


def with_and(batch, head, q_idx, kv_idx):
    return kv_idx < 3 and q_idx > 2


def with_not(batch, head, q_idx, kv_idx):
    return not kv_idx < 3


def with_chain(batch, head, q_idx, kv_idx):
    return 2 < kv_idx < 5


def with_call(batch, head, q_idx, kv_idx):
    return abs(kv_idx - q_idx) < 3


def with_torch(batch, head, q_idx, kv_idx):
    return torch.maximum(kv_idx, q_idx) < 3


def with_global(batch, head, q_idx, kv_idx):
    return kv_idx - q_idx < OUTSIDE


def with_item(batch, head, q_idx, kv_idx, table):
    return table[0] < kv_idx


def with_in(batch, head, q_idx, kv_idx):
    return kv_idx in (0, q_idx)


def with_loop(batch, head, q_idx, kv_idx):
    for _ in (0, 1):
        kv_idx = kv_idx + 1
    return kv_idx < 3


def with_inner_lambda(batch, head, q_idx, kv_idx):
    near = lambda a: a < 3  # noqa: E731
    return near(kv_idx)


def with_in_place(batch, head, q_idx, kv_idx):
    kv_idx -= q_idx
    return kv_idx < 3


def with_power(batch, head, q_idx, kv_idx):
    return kv_idx**2 < q_idx


def with_plus(batch, head, q_idx, kv_idx):
    return +kv_idx < q_idx


def with_two_targets(batch, head, q_idx, kv_idx):
    a = b = kv_idx - q_idx
    return (a < 3) & (b > -3)


def with_keyword(batch, head, q_idx, kv_idx):
    return maximum(kv_idx, b=q_idx) < 3  # noqa: F821


def with_default(batch, head, q_idx, kv_idx, width=OUTSIDE):
    return kv_idx - q_idx < width


def with_no_return(batch, head, q_idx, kv_idx):
    kv_idx - q_idx


class Holder:
    def method(self, batch, head, q_idx, kv_idx):
        return kv_idx < 3


def closure():
    width = 4

    def with_closure(batch, head, q_idx, kv_idx):
        return kv_idx - q_idx < width

    return with_closure


class Callable:
    def __call__(self, batch, head, q_idx, kv_idx):
        return kv_idx < 3


OFFENCES = {
    "if": (with_if, "where(condition, a, b)"),
    "conditional": (with_conditional, "where(condition, a, b)"),
    "and": (with_and, "& or |"),
    "not": (with_not, "~(...)"),
    "chain": (with_chain, "(a < b) & (b < c)"),
    "call": (with_call, "only maximum, minimum and where"),
    "torch": (with_torch, "only maximum, minimum and where"),
    "global": (with_global, "fn_args"),
    "item": (with_item, "fn_args"),
    "in": (with_in, "=="),
    "loop": (with_loop, "operators only"),
    "in_place": (with_in_place, "write x = x + y"),
    "power": (with_power, "write x * x"),
    "plus": (with_plus, "leave the + out"),
    "two_targets": (with_two_targets, "one name in an assignment"),
    "keyword": (with_keyword, "without keywords"),
    "default": (with_default, "fn_args"),
    "no_return": (with_no_return, "return"),
    "method": (Holder().method, "a method"),
    "inner_lambda": (with_inner_lambda, "write a def"),
    "lambda": (lambda batch, head, q_idx, kv_idx: kv_idx < 3, "write a def"),
    "closure": (closure(), "fn_args"),
}


@pytest.mark.parametrize(("fn", "remedy"), OFFENCES.values(), ids=OFFENCES)
def test_what_cannot_run_in_kernels_is_refused_with_a_remedy(fn, remedy):
    with pytest.raises(ValueError) as error:
        Mask(fn=fn)
    assert fn.__name__ in str(error.value)
    assert remedy in str(error.value)


@pytest.mark.parametrize("fn", [Callable(), max, torch.tril], ids=["instance", "builtin", "torch"])
def test_what_is_no_python_function_is_refused(fn):
    with pytest.raises(ValueError, match="cannot run inside kernels"):
        Mask(fn=fn)


def clipped(batch, head, q_idx, kv_idx, width):
    """Free names, an assignment and an annotation-free body are the grammar."""
    edge = maximum(q_idx - width, 0)  # noqa: F821
    return where(head == 0, kv_idx >= edge, kv_idx <= minimum(q_idx, 5))  # noqa: F821


@pytest.mark.parametrize(
    ("fn", "fn_args", "got"), [(clipped, (), 4), (clipped, (1, 2), 6), (striped, (1,), 5)]
)
def test_a_function_that_does_not_take_what_it_gets_is_refused(fn, fn_args, got):
    with pytest.raises(ValueError, match=rf"{fn.__name__}.* {got} arguments"):
        Mask(fn=fn, fn_args=fn_args)


@pytest.mark.parametrize("fn_args", [3, "3", (torch.tensor(3),), ("3",)], ids=repr)
def test_arguments_of_a_function_are_numbers(fn_args):
    with pytest.raises(TypeError, match="fn_args must be a tuple of numbers, got"):
        Mask(fn=clipped, fn_args=fn_args)


def with_a_default(batch, head, q_idx, kv_idx, /, width=3):
    return kv_idx - q_idx < width


@pytest.mark.parametrize("backend", ["tiled", "triton"])
def test_a_number_as_default_and_positional_arguments(backend):
    q = torch.randn(1, 8, 1, 4)
    out = flash_attention(q, q, q, mask=Mask(fn=with_a_default), backend=backend)
    expected = flash_attention(q, q, q, mask=Mask(window=(None, 2), align="top_left"))
    torch.testing.assert_close(out, expected)


def test_free_names_are_given():
    assert list(grammar_offences(clipped)) == []
    q = torch.zeros(1, 8, 2, 4)
    v = torch.arange(8.0).reshape(1, 8, 1, 1).expand(1, 8, 2, 4)
    out = flash_attention(q, q, v, mask=Mask(fn=clipped, fn_args=(2,)))[0, :, :, 0]
    seen = [[j for j in range(8) if j >= max(i - 2, 0)] for i in range(8)]
    also = [[j for j in range(8) if j <= min(i, 5)] for i in range(8)]
    for head, rows in enumerate((seen, also)):
        assert out[:, head].tolist() == pytest.approx([sum(row) / len(row) for row in rows])


def scattered(batch, head, q_idx, kv_idx):
    """Products that leave 32 bits."""
    return (q_idx * 1000003 + kv_idx * 2147483647 + (batch + head) * 1234567891) % 3 != 0


@pytest.mark.parametrize("attention", ["reference", "tiled", "triton"])
def test_arithmetic_of_mask_functions_is_int32_everywhere(attention):
    q, k, v = (torch.randn(2, 40, 2, 8) for _ in range(3))
    ids, at = torch.tensor([3, 77], dtype=torch.int32), torch.arange(40, dtype=torch.int32)
    seen = scattered(ids[:, None, None, None], at[:2, None, None], at[:, None], at)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    kwargs = {"mask": Mask(fn=scattered), "sequence_ids": ids}
    if attention == "reference":
        out = reference_attention(q, k, v, return_lse=False, **kwargs)
    else:
        out = flash_attention(q, k, v, backend=attention, **kwargs)
    by_hand = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    torch.testing.assert_close(out, by_hand, rtol=1e-5, atol=1e-5)


def test_registration_keeps_the_function_and_its_key():
    assert mask_fn(striped) is striped
    key = Mask(fn=striped, fn_args=(3, 2)).fn_key
    assert key == Mask(fn=striped, fn_args=(5, 1)).fn_key == "cases:striped"
    assert registered_mask_fn(key) is striped
    assert Mask(fn=by_head).fn_key != key
    assert Mask().fn_key == ""


def test_an_edited_function_of_the_same_name_is_another_one():
    first, second = (_edited(text) for text in ("kv_idx < 2", "kv_idx < 4"))
    x, v = torch.zeros(1, 6, 1, 4), torch.arange(6.0).reshape(1, 6, 1, 1).expand(1, 6, 1, 4)
    means = [
        flash_attention(x, x, v, mask=Mask(fn=fn))[0, 0, 0, 0].item()
        for fn in (first, second, first)
    ]
    assert means == [0.5, 1.5, 0.5]


def test_a_function_that_wraps_another_is_not_taken_for_it():
    first, second = (_edited(text) for text in ("kv_idx < 1", "kv_idx < 3"))
    key = Mask(fn=first).fn_key
    functools.update_wrapper(second, first)
    assert Mask(fn=second).fn_key != key
    assert registered_mask_fn(key) is first


def _edited(condition):
    """A function as a notebook cell defines it twice."""
    import linecache

    source = f"def cell(batch, head, q_idx, kv_idx):\n    return {condition}\n"
    name = f"<cell {condition}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope = {"__name__": "notebook"}
    exec(compile(source, name, "exec"), scope)
    return scope["cell"]


def test_an_unknown_key_says_what_to_import():
    with pytest.raises(ValueError, match=r"'gone:fn'.*import its module"):
        registered_mask_fn("gone:fn")
