"""attn_mask: how it broadcasts, what its gradient looks like, and what padding costs."""

import math

import pytest
import torch
from cases import Inputs, cu_seqlens, reference_attention, run

from flashmod import Mask, TileConfig, flash_attention
from flashmod.functional import prepare
from flashmod.spec import END_KEY, FIRST_KEY
from flashmod.stats import SKIPPED

BACKENDS = ("tiled", "triton")
TINY = TileConfig(16, 16)
SIZES = (2, 2, 19, 37)  # B, H, S, S_kv


def qkv(dtype=torch.float32, heads=(2, 1)):
    batch, _, q_len, kv_len = SIZES
    shapes = ((q_len, heads[0]), (kv_len, heads[1]), (kv_len, heads[1]))
    return [torch.randn(batch, *shape, 8, dtype=dtype, requires_grad=True) for shape in shapes]


def gradients(attention, tensors, **kwargs):
    """out, lse and the gradients of q, k, v and whatever else requires one."""
    out, lse = attention(*tensors, return_lse=True, **kwargs)
    leaves = [*tensors, *(x for x in kwargs.values() if getattr(x, "requires_grad", False))]
    loss = out.sin().sum() + torch.where(lse.isfinite(), lse, 0.0).cos().sum()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


SHAPES = [
    (), (1,), (37,), (19, 1), (19, 37), (2, 1, 1), (2, 19, 37), (1, 1, 1, 37), (2, 1, 1, 37),
    (2, 1, 19, 1), (1, 2, 1, 37), (1, 2, 19, 37), (2, 2, 19, 37),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "backend"),
    [*((x, "tiled") for x in SHAPES), *((x, "triton") for x in SHAPES[::2])],  # they are slow
    ids=str,
)
def test_a_bias_broadcasts_and_its_gradient_has_its_shape(shape, backend):
    tensors = qkv()
    bias = torch.randn(shape, requires_grad=True)
    got = gradients(flash_attention, tensors, attn_mask=bias, backend=backend, tiles=TINY)
    wide = [x.detach().double().requires_grad_() for x in (*tensors, bias)]
    *truth, whole = gradients(reference_attention, wide[:3], attn_mask=spelled_out(wide[3]))
    assert got[-1].shape == bias.shape
    for x, y in zip(got, (*truth, whole.sum_to_size(shape)), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


def spelled_out(bias):
    return bias.detach().expand(SIZES).clone().requires_grad_()


EXPANDED = {"rows": (1, 1, 1, 37), "keys": (1, 1, 19, 1), "heads": (2, 1, 19, 37), "all": (1,) * 4}


@pytest.mark.parametrize("small", EXPANDED.values(), ids=EXPANDED)
def test_an_expanded_mask_is_not_copied(small):
    """Stride 0 is a broadcast axis, whoever wrote it: the call holds the entries that exist."""
    for x in (torch.randn(small), torch.rand(small) < 0.5):
        held = prepare(*qkv(), attn_mask=x.expand(SIZES)).call.attn_mask
        assert held.shape == small and held.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("small", EXPANDED.values(), ids=EXPANDED)
def test_an_expanded_bias_with_gradient_gets_one_per_entry(small, backend):
    tensors, leaf = qkv(), torch.randn(small, requires_grad=True)
    options = {"backend": backend, "tiles": TINY}
    narrow = gradients(flash_attention, tensors, attn_mask=leaf, **options)
    bias = leaf.detach().expand(SIZES).requires_grad_()
    assert prepare(*tensors, attn_mask=bias).call.attn_mask.shape == SIZES
    wide = gradients(flash_attention, tensors, attn_mask=bias, **options)
    assert wide[-1].shape == SIZES
    torch.testing.assert_close(wide[-1].sum_to_size(small), narrow[-1], rtol=1e-4, atol=1e-5)
    through = leaf.expand(SIZES)  # autograd sums what arrives at an expanded tensor
    flash_attention(*tensors, attn_mask=through, **options).sin().sum().backward()
    assert leaf.grad.shape == small


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_without_gradient_gives_the_others_theirs_bitwise(backend):
    tensors, bias = qkv(), torch.randn(2, 19, 37)
    options = {"backend": backend, "tiles": TINY}
    without = gradients(flash_attention, tensors, attn_mask=bias, **options)
    *others, _ = gradients(flash_attention, tensors, attn_mask=bias.requires_grad_(), **options)
    assert all(torch.equal(x, y) for x, y in zip(without, others, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["attn_mask", "learnable_sink"])
def test_a_bias_or_a_sink_alone_may_want_a_gradient(name, backend):
    tensors = [x.detach() for x in qkv()]
    scores = {"attn_mask": torch.randn(19, 37), "learnable_sink": torch.randn(2)}
    options = {"backend": backend, "tiles": TINY}
    both = {key: x.clone().requires_grad_() for key, x in scores.items()}
    flash_attention(*tensors, **both, **options).sin().sum().backward()
    scores[name].requires_grad_()
    flash_attention(*tensors, **scores, **options).sin().sum().backward()
    assert torch.equal(scores[name].grad, both[name].grad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "bias_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_a_bias_and_a_sink_keep_their_dtypes(dtype, bias_dtype, backend):
    tensors = qkv(dtype)
    scored = {
        "attn_mask": torch.randn(2, 19, 37, dtype=bias_dtype, requires_grad=True),
        "learnable_sink": torch.randn(2, dtype=bias_dtype, requires_grad=True),
    }
    got = gradients(flash_attention, tensors, backend=backend, tiles=TINY, **scored)
    wide = {name: x.detach().double().requires_grad_() for name, x in scored.items()}
    wide_tensors = [x.detach().double().requires_grad_() for x in tensors]
    truth = gradients(reference_attention, wide_tensors, **wide)
    assert [x.dtype for x in got[-2:]] == [bias_dtype] * 2
    coarse = max(torch.finfo(x).eps for x in (dtype, bias_dtype, torch.float32))
    for x, y in zip(got, truth, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=16 * coarse, atol=16 * coarse)


PADDING = {  # hidden keys of the two sequences -> their first visible key and the end of them
    "left": ((range(20), range(3)), [[20, 37], [3, 37]]),
    "right": ((range(17, 37), range(36, 37)), [[0, 17], [0, 36]]),
    "two_sided": (([*range(18), *range(30, 37)], range(16)), [[18, 30], [16, 37]]),
    "holes": (([0, 5, 6, 36], range(16, 32)), [[1, 36], [0, 37]]),
    "one_key": (([*range(20), *range(21, 37)], ()), [[20, 21], [0, 37]]),
    "everything": ((range(37), ()), [[37, 0], [0, 37]]),
}


def key_mask(hidden, kind):
    seen = torch.ones(2, 1, 1, 37, dtype=torch.bool)
    for row, keys in zip(seen, hidden, strict=True):
        row[..., list(keys)] = False
    return seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, -math.inf)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("name", PADDING)
def test_a_mask_of_keys_narrows_the_limits(name, kind):
    hidden, ends = PADDING[name]
    call = prepare(*qkv(), attn_mask=key_mask(hidden, kind)).call
    assert call.limits[:, [FIRST_KEY, END_KEY]].tolist() == ends
    shared = prepare(*qkv(), attn_mask=key_mask(hidden, kind)[:1, 0, 0]).call
    assert shared.limits[:, [FIRST_KEY, END_KEY]].tolist() == [ends[0]] * 2


def test_other_masks_leave_the_limits_alone():
    plain = prepare(*qkv()).call.limits
    for shape in ((2, 1, 19, 37), (2, 2, 1, 37), (1, 1, 19, 1), (2, 1, 1, 1)):
        held = prepare(*qkv(), attn_mask=torch.zeros(shape, dtype=torch.bool)).call.limits
        assert torch.equal(held, plain)


def test_packed_masks_of_keys_narrow_by_positions_within_a_sequence():
    q, k, v = (torch.randn(26, 1, 4) for _ in range(3))
    cu = cu_seqlens([3, 23])
    seen = torch.ones(2, 1, 1, 30, dtype=torch.bool)  # longer than the longest
    seen[0, ..., :2], seen[1, ..., 20:] = False, False
    call = prepare(q, k, v, cu_seqlens_q=cu, attn_mask=seen).call
    assert call.limits[:, [FIRST_KEY, END_KEY]].tolist() == [[2, 30], [0, 20]]
    out = flash_attention(q, k, v, cu_seqlens_q=cu, attn_mask=seen)
    torch.testing.assert_close(out[:3], v[2:3].expand(3, 1, 4))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PADDING)
def test_a_mask_of_keys_is_the_same_in_both_writings_and_padding_is_not_read(name, backend):
    """NaN in hidden keys and in the rows that see nothing, forward and backward."""
    hidden, _ = PADDING[name]
    tensors = [x.detach() for x in qkv()]
    gone = ~key_mask(hidden, "bool")[:, 0, 0, :, None, None]
    dead = gone.all(1, keepdim=True)
    poison = [tensors[0].masked_fill(dead, math.nan)]
    poison += [x.masked_fill(gone, math.nan) for x in tensors[1:]]
    grad_out, grad_lse = torch.randn(2, 19, 2, 8), torch.randn(2, 2, 19)
    poisoned_out = grad_out.masked_fill(dead, math.nan)
    poisoned_lse = grad_lse.masked_fill(dead[..., 0], math.nan)
    results = []
    for kind in ("bool", "float"):
        kwargs = {"attn_mask": key_mask(hidden, kind), "mask": Mask(window=(30, 12))}
        for inputs in ((*tensors, grad_out, grad_lse), (*poison, poisoned_out, poisoned_lse)):
            results.append(run(Inputs(*inputs, kwargs), backend=backend, tiles=TINY))
    clean, poisoned, clean_bias, poisoned_bias = results
    for one, two in ((clean, poisoned), (clean_bias, poisoned_bias)):
        assert all(torch.equal(a, b) for a, b in zip(one[:6], two[:6], strict=True))
    for a, b in zip(clean, clean_bias, strict=False):  # a bias has a gradient beside the five
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    dbias = results[-1].dbias
    assert dbias.isfinite().all()
    assert (dbias[key_mask(hidden, "float") == -math.inf] == 0).all()
    assert (clean.dk[gone.expand_as(clean.dk)] == 0).all()


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PADDING)
def test_tiles_of_padding_are_not_visited(name, backend, kind):
    hidden, ends = PADDING[name]
    options = {"attn_mask": key_mask(hidden, kind), "backend": backend, "tiles": TINY}
    _, stats = flash_attention(*qkv(), return_stats=True, **options)
    for sequence, (first, end) in zip(stats.sequences, ends, strict=True):
        visited = [tile * 16 < end and (tile + 1) * 16 > first for tile in range(3)]
        kinds = (sequence.kinds != SKIPPED).tolist()
        assert kinds == [[visited] * 2] * 2
