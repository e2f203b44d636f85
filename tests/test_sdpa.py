"""The SDPA twin: torch's samples, every clause of torch's contract, random shapes and masks."""

import inspect
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.flop_counter import FlopCounterMode

import flashmod
from flashmod import scaled_dot_product_attention as twin
from flashmod.integrations import sdpa as module
from flashmod.numerics import FP32_ERROR, FP32_LOGIT, FP64_ERROR, error, largest

# torch's forward mode, and its samples' dropout, which comes as a tensor.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar"),
]

SDPA = F.scaled_dot_product_attention
LOWER = (torch.float16, torch.bfloat16)


def samples(dtype):
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    return list(info.sample_inputs("cpu", dtype, requires_grad=True))


def operands(*shapes, dtype=torch.float64, requires_grad=True):
    return [torch.randn(s, dtype=dtype, requires_grad=requires_grad) for s in shapes]


def gradients(function, tensors, **kwargs):
    """The output and the gradient of everything that has one."""
    wanted = [x for x in (*tensors, kwargs.get("attn_mask")) if x is not None and x.requires_grad]
    out = function(*tensors, **kwargs)
    return [out, *torch.autograd.grad(out, wanted, grad_of(out).to(out.dtype))]


def grad_of(out):
    """The same for every function and dtype; float16 holds it exactly."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-64, 65, out.shape, generator=generator).double() / 32


def assert_same(tensors, **kwargs):
    ours, theirs = (gradients(fn, tensors, **kwargs) for fn in (twin, SDPA))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return ours[0]


def double(x):
    return x.detach().double().requires_grad_() if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("number", range(25))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOWER], ids=str)
def test_torchs_own_samples(dtype, number):
    """Dropout has another stream: only its shape is compared."""
    every = samples(dtype)
    assert len(every) == 25
    sample = every[number]
    tensors, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
    if kwargs.get("dropout_p"):
        assert twin(*tensors, **kwargs).shape == SDPA(*tensors, **kwargs).shape
        kwargs["dropout_p"] = 0.0
    ours, theirs = (gradients(fn, tensors, **kwargs) for fn in (twin, SDPA))
    doubles = [double(x) for x in tensors]
    exact = {name: double(x) if name == "attn_mask" else x for name, x in kwargs.items()}
    if kwargs.get("attn_mask") is not None and kwargs["attn_mask"].dtype == torch.bool:
        exact["attn_mask"] = kwargs["attn_mask"]
    truth = gradients(SDPA, doubles, **exact)
    limits = {torch.float32: FP32_ERROR, torch.float64: FP64_ERROR}
    sizes, logit = units(*doubles, grad_of(truth[0]), kwargs)
    for a, b, true, unit in zip(ours, theirs, truth, sizes, strict=False):
        assert a.shape == b.shape and a.dtype == b.dtype == dtype
        if dtype in LOWER:
            limit = 2 * error(b, true, unit) + 2 * torch.finfo(dtype).eps
        else:
            limit = limits[dtype] * max(1.0, logit / FP32_LOGIT)
        assert error(a, true, unit) <= limit


def units(q, k, v, grad, kwargs):
    """The size of the terms that each result sums, as in flashmod.numerics; the largest logit."""
    q, k, v, grad = (x.detach() for x in (q, k, v, grad))
    if kwargs.get("enable_gqa"):
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scale = abs(kwargs.get("scale") or q.shape[-1] ** -0.5)
    slope = largest(grad @ v.mT)
    sizes = (largest(v), scale * slope * largest(k), scale * slope * largest(q), largest(grad))
    return (*sizes, slope), scale * largest(q @ k.mT)


def test_torch_samples_are_reached():
    assert {len(samples(dtype)) for dtype in (torch.float32, torch.float64, *LOWER)} == {25}


def test_the_signature_is_torchs():
    names = list(inspect.signature(twin).parameters)
    assert names == [
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ]  # fmt: skip
    q, k, v = operands((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4), requires_grad=False)
    mask = torch.ones(3, 5, dtype=torch.bool)
    assert torch.equal(twin(q, k, v, mask, 0.0, False), twin(query=q, key=k, value=v))
    with pytest.raises(TypeError):
        twin(q, k, v, None, 0.0, False, 0.5)  # scale is a keyword


SHAPES = {
    "2-D": [(4, 8), (5, 8), (5, 6)],
    "3-D": [(3, 4, 8), (3, 5, 8), (3, 5, 6)],
    "5-D": [(2, 3, 2, 4, 8), (2, 3, 2, 5, 8), (2, 3, 2, 5, 8)],
    "6-D broadcast": [(2, 1, 2, 3, 4, 8), (2, 2, 1, 3, 5, 8), (1, 2, 2, 3, 5, 8)],
    "query without a batch": [(3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)],
    "keys without a batch": [(2, 3, 4, 8), (5, 8), (5, 8)],
    "batch of one": [(1, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)],
    "one key head": [(2, 4, 4, 8), (2, 1, 5, 8), (2, 1, 5, 8)],
    "one query head": [(2, 1, 4, 8), (2, 4, 5, 8), (2, 4, 5, 8)],
    "heads of key and value": [(2, 4, 4, 8), (1, 4, 5, 8), (2, 1, 5, 8)],
    "wider values": [(2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 9)],
    "no head dimension": [(2, 3, 4, 0), (2, 3, 5, 0), (2, 3, 5, 6)],
    "one query": [(2, 3, 1, 8), (2, 3, 7, 8), (2, 3, 7, 8)],
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes_that_broadcast(shapes):
    assert_same(operands(*shapes))
    assert_same(operands(*shapes), is_causal=True, scale=0.3)


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 4, 4, 8), (2, 2, 5, 8), (2, 2, 5, 6)],
        [(2, 12, 4, 8), (2, 4, 5, 8), (2, 6, 5, 8)],
        [(2, 6, 4, 8), (2, 1, 5, 8), (2, 3, 5, 8)],
        [(4, 4, 8), (2, 5, 8), (2, 5, 8)],
        [(2, 3, 4, 4, 8), (2, 3, 2, 5, 8), (2, 3, 2, 5, 8)],
        [(2, 4, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8)],
        [(4, 4, 8), (2, 2, 5, 8), (2, 2, 5, 8)],
    ],
    ids=str,
)
def test_grouped_heads(shapes):
    assert_same(operands(*shapes), enable_gqa=True)
    with pytest.raises(RuntimeError, match="enable_gqa"):
        if shapes[1][-3] == 1:
            raise RuntimeError("broadcasts without enable_gqa as well")
        twin(*operands(*shapes))


EMPTY = {
    "no keys": [(2, 3, 4, 8), (2, 3, 0, 8), (2, 3, 0, 5)],
    "no queries": [(2, 3, 0, 8), (2, 3, 5, 8), (2, 3, 5, 8)],
    "no batch": [(0, 3, 4, 8), (0, 3, 5, 8), (0, 3, 5, 8)],
    "no heads": [(2, 0, 4, 8), (2, 0, 5, 8), (2, 0, 5, 8)],
    "no values": [(2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 0)],
    "nothing": [(2, 3, 0, 0), (2, 3, 0, 0), (2, 3, 0, 0)],
}


@pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
def test_empty_axes(shapes):
    tensors = operands(*shapes)
    out = twin(*tensors)
    assert out.shape == (*shapes[0][:-1], shapes[2][-1]) and not out.any()
    for x, grad in zip(tensors, torch.autograd.grad(out.sum(), tensors), strict=True):
        assert grad.shape == x.shape and not grad[..., :0].any() and not grad.isnan().any()
    mask = torch.ones(shapes[0][-2], shapes[1][-2], dtype=torch.bool)
    assert torch.equal(twin(*tensors, attn_mask=mask), out)


MASKS = {
    "(L, S)": (4, 5),
    "(1, S)": (1, 5),
    "(L, 1)": (4, 1),
    "(B, 1, 1, S)": (2, 1, 1, 5),
    "(H, L, S)": (3, 4, 5),
    "(1, H, 1, S)": (1, 3, 1, 5),
    "(B, H, L, S)": (2, 3, 4, 5),
}


@pytest.mark.parametrize("kind", ["bool", "bias", "trained bias"])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_masks_broadcast(shape, kind):
    mask = torch.randn(shape, dtype=torch.float64)
    if kind == "bool":
        mask = mask > 0
    elif kind == "bias":
        mask = mask.masked_fill(mask > 1, -math.inf)
    else:
        mask.requires_grad_()
    assert_same(operands((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)), attn_mask=mask)
    assert_same(operands((2, 3, 4, 8), (2, 1, 5, 8), (1, 1, 5, 6)), attn_mask=mask)


@pytest.mark.parametrize("shape", [(2, 1, 1, 4, 5), (1, 3, 2, 4, 5), (2, 1, 2, 1, 5), (3, 1, 1, 5)])
def test_masks_of_more_axes(shape):
    """Also those that have one batch axis of two, as in AlphaFold's row attention."""
    tensors = operands((2, 3, 2, 4, 8), (2, 3, 2, 5, 8), (2, 1, 2, 5, 8))
    assert_same(tensors, attn_mask=torch.randn(shape, dtype=torch.float64, requires_grad=True))
    assert_same(tensors, attn_mask=torch.randn(shape) > -1)


def test_a_broadcast_mask_is_not_written_out(monkeypatch):
    seen = []
    real = module.flash_attention

    def spy(q, k, v, **kwargs):
        seen.append(kwargs["attn_mask"])
        return real(q, k, v, **kwargs)

    monkeypatch.setattr(module, "flash_attention", spy)
    tensors = operands((6, 3, 40, 8), (6, 3, 50, 8), (6, 3, 50, 8), requires_grad=False)
    row = torch.randn(50, dtype=torch.float64)
    for mask in (row.expand(40, 50), row.expand(6, 3, 40, 50), row[None, None, None]):
        twin(*tensors, attn_mask=mask)
    wide = [x.unflatten(0, (2, 3)) for x in tensors]
    twin(*wide, attn_mask=row.expand(2, 1, 1, 40, 50))
    twin(*wide, attn_mask=torch.randn(2, 1, 1, 1, 50, dtype=torch.float64))
    assert {x.numel() for x in seen} == {50}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["bool", "-inf"])
def test_rows_that_see_no_key_give_zero(dtype, kind):
    q, k, v = operands((1, 2, 3, 8), (1, 2, 4, 8), (1, 2, 4, 8), dtype=dtype)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    if kind == "-inf":
        mask = torch.zeros(3, 4).masked_fill(~mask, -math.inf)
    out = twin(q, k, v, mask)
    assert not out[:, :, 1].any() and out[:, :, [0, 2]].all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not grads[0][:, :, 1].any() and all(torch.isfinite(x).all() for x in grads)


@pytest.mark.parametrize("lengths", [(4, 4), (3, 7), (7, 3)])
def test_is_causal_is_top_left(lengths):
    rows, keys = lengths
    tensors = operands((1, 2, rows, 8), (1, 2, keys, 8), (1, 2, keys, 8))
    seen = torch.ones(rows, keys, dtype=torch.bool).tril()
    torch.testing.assert_close(twin(*tensors, is_causal=True), SDPA(*tensors, attn_mask=seen))
    with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set"):
        twin(*tensors, attn_mask=seen, is_causal=True)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0, None, torch.tensor(0.2)])
def test_scale(scale):
    out = assert_same(operands((1, 2, 3, 8), (1, 2, 4, 8), (1, 2, 4, 8)), scale=scale)
    assert out.isfinite().all()


def test_dropout_has_no_training_flag():
    q, k, v = operands((2, 2, 30, 4), (2, 2, 40, 4), (2, 2, 40, 4))
    torch.manual_seed(3)
    first, second = twin(q, k, v, dropout_p=0.5), twin(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(twin(q, k, v, dropout_p=0.5), first)
    assert not torch.equal(first, second)
    assert not twin(q, k, v, dropout_p=1.0).any()
    mean = torch.stack([twin(q, k, v, dropout_p=0.3) for _ in range(200)]).mean(0)
    assert float((mean - SDPA(q, k, v)).abs().mean()) < 0.02
    for bad in (-0.1, 1.1, math.nan):
        with pytest.raises(RuntimeError, match="dropout probability has to be between 0 and 1"):
            twin(q, k, v, dropout_p=bad)


Q, K = (2, 2, 4, 8), (2, 2, 5, 8)
BAD = {
    "dtypes": (RuntimeError, lambda: twin(torch.ones(Q), torch.ones(K).double(), torch.ones(K))),
    "integers": (RuntimeError, lambda: twin(*(torch.ones(Q).int() for _ in range(3)))),
    "one axis": (RuntimeError, lambda: twin(*(torch.ones(8) for _ in range(3)))),
    "head dims": (
        RuntimeError,
        lambda: twin(torch.ones(Q), torch.ones(2, 2, 5, 7), torch.ones(K)),
    ),
    "batches": (RuntimeError, lambda: twin(torch.ones(Q), *[torch.ones(3, 2, 5, 8)] * 2)),
    "heads": (RuntimeError, lambda: twin(torch.ones(2, 4, 4, 8), *[torch.ones(K)] * 2)),
    "groups": (
        RuntimeError,
        lambda: twin(torch.ones(2, 3, 4, 8), *[torch.ones(K)] * 2, enable_gqa=True),
    ),
    "groups of no heads": (
        RuntimeError,
        lambda: twin(torch.ones(4, 8), *[torch.ones(5, 8)] * 2, enable_gqa=True),
    ),
    "devices": (
        RuntimeError,
        lambda: twin(torch.ones(Q), torch.ones(K, device="meta"), torch.ones(K)),
    ),
    "mask of one axis": (RuntimeError, lambda: masked(torch.ones(5))),
    "mask of integers": (RuntimeError, lambda: masked(torch.ones(4, 5).int())),
    "wider mask": (RuntimeError, lambda: masked(torch.ones(4, 5).double())),
    "narrower mask": (RuntimeError, lambda: masked(torch.ones(4, 5).bfloat16())),
    "shape of the mask": (RuntimeError, lambda: masked(torch.ones(5, 4))),
    "batch of the mask": (RuntimeError, lambda: masked(torch.ones(3, 1, 4, 5))),
    "axes of the mask": (RuntimeError, lambda: masked(torch.ones(1, 2, 2, 4, 5))),
    "list": (TypeError, lambda: masked([[1.0]])),
    "query": (TypeError, lambda: twin(None, torch.ones(K), torch.ones(K))),
    "is_causal": (TypeError, lambda: twin(torch.ones(Q), *[torch.ones(K)] * 2, is_causal=1)),
}


def masked(mask, function=twin):
    return function(torch.ones(Q), torch.ones(K), torch.ones(K), attn_mask=mask)


@pytest.mark.parametrize("error, call", BAD.values(), ids=BAD)
def test_errors_have_torchs_types(error, call, monkeypatch):
    with pytest.raises(error) as ours:
        call()
    if "one axis" in str(ours.value) or "two axes" in str(ours.value):
        return  # torch raises IndexError for a mask of one axis
    monkeypatch.setitem(globals(), "twin", SDPA)
    monkeypatch.setattr(masked, "__defaults__", (SDPA,))
    with pytest.raises((error, IndexError)):
        call()


def test_lengths_of_key_and_value():
    """torch's CPU kernel reads past the end of the shorter one."""
    with pytest.raises(RuntimeError, match="same length, got 5 and 6"):
        twin(torch.ones(Q), torch.ones(K), torch.ones(2, 2, 6, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_masks_serve_lower_precision(dtype):
    tensors = operands(Q, K, K, dtype=dtype, requires_grad=False)
    mask = torch.randn(4, 5)
    true = SDPA(*(x.double() for x in tensors), attn_mask=mask.double())
    out = twin(*tensors, attn_mask=mask)
    assert out.dtype == dtype
    assert float((out.double() - true).abs().max()) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("shapes", [[Q, K, K], [(3, 2, 2, 4, 8), (3, 2, 2, 5, 8), (2, 5, 6)]])
def test_strides_follow_the_query(shapes):
    q, k, v = operands(*shapes, requires_grad=False)
    assert twin(q, k, v).is_contiguous()
    rows_first = q.transpose(-3, -2).contiguous().transpose(-3, -2)
    assert twin(rows_first, k, v).transpose(-3, -2).is_contiguous()
    if q.dim() == 4:
        for query in (q, rows_first):
            assert twin(query, k, v).stride() == SDPA(query, k, v).stride()


def test_operands_are_not_copied(monkeypatch):
    real, seen = module.flash_attention, []
    monkeypatch.setattr(
        module, "flash_attention", lambda *x, **kw: (seen.extend(x), real(*x, **kw))[1]
    )
    q, k, v = operands(Q, K, (1, 1, 5, 8), requires_grad=False)
    twin(q, k, v)
    for x, given_one in zip(seen, (q, k, v), strict=True):
        assert x.untyped_storage().data_ptr() == given_one.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    q, k, v = operands(Q, K, K, dtype=torch.float32)
    mask = torch.randn(4, 5, requires_grad=True)
    for kwargs in ({}, {"attn_mask": mask}, {"attn_mask": mask.detach().to(dtype)}):
        with torch.autocast("cpu", dtype):
            mixed = twin(q, k.to(dtype), v, **kwargs)
        assert mixed.dtype == dtype
        mixed.sum().backward()
        assert q.grad.dtype == torch.float32 and q.grad.isfinite().all()
        torch.testing.assert_close(mixed.float(), SDPA(q, k, v, **(kwargs and {"attn_mask": mask})),
                                   rtol=0.05, atol=0.05)  # fmt: skip
    with torch.autocast("cpu", dtype), pytest.raises(RuntimeError, match="dtype"):
        twin(q, k, v, mask.double())
    with torch.autocast("cpu", dtype):
        assert twin(*(x.double() for x in (q, k, v))).dtype == torch.float64


def jagged(values, ends):
    return torch.nested.nested_tensor_from_jagged(values, ends).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_jagged_tensors(causal):
    """Ragged sequences stay ragged; torch's own CPU path has no causal one."""
    ends = torch.tensor([0, 3, 3, 8])
    values = [torch.randn(8, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    nested = [jagged(x, ends) for x in values]
    out = twin(*nested, is_causal=causal)
    assert (nested[0] + out).shape == out.shape  # the same nested size
    parts = [
        SDPA(*(x[a:b].transpose(0, 1) for x in values), is_causal=causal).transpose(0, 1)
        for a, b in [(0, 3), (3, 8)]
    ]
    true = torch.cat(parts)
    packed = out.transpose(1, 2).values()
    torch.testing.assert_close(packed, true)
    grad = torch.randn_like(true)
    for a, b in zip(
        torch.autograd.grad(packed, values, grad), torch.autograd.grad(true, values, grad),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b)


def test_jagged_keys_and_values_must_agree():
    """Whether one tensor describes both, or two that hold the same."""
    ends = torch.tensor([0, 3, 8])
    x, same, other, fewer = (
        jagged(torch.randn(8, 2, 4), e)
        for e in (ends, ends.clone(), torch.tensor([0, 4, 8]), torch.tensor([0, 8]))
    )
    assert twin(x, same, same).shape == twin(x, x, same).shape == x.shape
    with pytest.raises(ValueError, match="equal lengths"):
        twin(x, x, other)
    with pytest.raises(ValueError, match="k holds 2 sequences, v 1"):
        twin(x, x, fewer)


def test_jagged_tensors_compile():
    def step(values, ends):
        x = jagged(values, ends)
        return twin(x, x, x).transpose(1, 2).values()

    values, ends = torch.randn(8, 2, 4), torch.tensor([0, 3, 8])
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(values, ends), step(values, ends))


def test_jagged_tensors_beside_others_are_refused_as_in_torch():
    ends = torch.tensor([0, 3, 8])
    x = jagged(torch.randn(8, 2, 4), ends)
    with pytest.raises(ValueError, match="to be nested tensors"):
        twin(x, torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4))
    with pytest.raises(ValueError, match="Masks are not yet supported"):
        twin(x, x, x, attn_mask=torch.ones(5, 5))


@pytest.mark.parametrize("lengths", [(4, 4), (3, 7)])
@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_causal_bias(bias, lengths):
    rows, keys = lengths
    tensors = operands((2, 2, rows, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    torch.testing.assert_close(
        twin(*tensors, bias(rows, keys)), SDPA(*tensors, bias(rows, keys)._materialize())
    )
    with pytest.raises(ValueError, match="CausalBias should not be used"):
        twin(*tensors, bias(rows, keys), is_causal=True)


def test_causal_bias_of_other_lengths_is_refused():
    with pytest.raises(RuntimeError, match=r"causal_lower_right\(4, 6\).*\(4, 5\)"):
        masked(causal_lower_right(4, 6))


class Tagged(torch.Tensor):
    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("place", range(4))
def test_tensor_subclasses_are_asked(place):
    tensors = [*operands(Q, K, K, requires_grad=False), torch.zeros(4, 5, dtype=torch.float64)]
    expected = twin(*tensors)
    Tagged.seen = []
    tensors[place] = tensors[place].as_subclass(Tagged)
    out = twin(*tensors)
    assert Tagged.seen == [twin] and type(out) is Tagged
    assert torch.equal(out.as_subclass(torch.Tensor), expected)


def test_torch_function_modes_are_asked():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list = []
    tensors = operands(Q, K, K, requires_grad=False)
    ends = torch.tensor([0, 3, 8])
    x = jagged(torch.randn(8, 2, 4), ends)
    with Mode():
        twin(*tensors)
        twin(x, x, x)
        twin(*tensors, causal_lower_right(4, 5))
    assert seen.count(twin) == 3
    with torch.device("cpu"):
        torch.testing.assert_close(twin(*tensors), SDPA(*tensors))


@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning")
def test_what_goes_to_torch_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(module, "_logged", set())
    x = torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (3, 5)])
    with caplog.at_level(logging.WARNING, logger="flashmod"):
        for _ in range(2):
            assert twin(x, x, x).is_nested
    (record,) = caplog.records
    assert "strided layout" in record.message and "torch's own" in record.message


def test_functional_transforms():
    x = torch.randn(3, 2, 4, 8, dtype=torch.float64)
    mapped = [
        torch.func.vmap(torch.func.grad(lambda x, fn=fn: fn(x, x, x).sin().sum()))(x)
        for fn in (twin, SDPA)
    ]
    torch.testing.assert_close(*mapped)
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.func.jvp(lambda x: twin(x, x, x), (x,), (x,))
    leaf = x.requires_grad_()
    (grad,) = torch.autograd.grad(twin(leaf, x, x).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


@pytest.mark.parametrize("masked", [False, True])
def test_compiles_without_a_graph_break(masked):
    tensors = operands(Q, K, K, dtype=torch.float32)
    mask = torch.randn(2, 1, 4, 5, requires_grad=True) if masked else None
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for a, b in zip(
        gradients(compiled, tensors, attn_mask=mask), gradients(twin, tensors, attn_mask=mask),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b)


def test_one_graph_serves_all_lengths():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(twin, backend=backend, fullgraph=True, dynamic=True)
    for rows in (5, 7, 9):
        x, mask = torch.randn(2, 2, rows, 8, requires_grad=True), torch.randn(rows, rows)
        torch.testing.assert_close(compiled(x, x, x, mask), SDPA(x, x, x, mask))
    assert len(graphs) == 1


def test_flops_are_counted():
    """As torch counts its own kernels on a GPU: masks and grouping change nothing."""
    q, k, v = operands((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6), dtype=torch.float32)
    pairs = 2 * 4 * 5 * 7
    with FlopCounterMode(display=False) as counter:
        out = twin(q, k, v, attn_mask=torch.ones(5, 7, dtype=torch.bool), enable_gqa=True)
    assert counter.get_total_flops() == 2 * pairs * (8 + 6)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (3 * 8 + 2 * 6)


def test_meta_tensors():
    assert twin(*(torch.empty(s, device="meta") for s in (Q, K, K))).shape == Q


@st.composite
def calls(draw):
    """Operands that broadcast, and a mask of any broadcastable shape."""
    batch = draw(st.lists(st.integers(1, 3), max_size=3))
    heads, keys = draw(st.integers(1, 4)), draw(st.integers(0, 9))
    rows, dim, dim_v = (draw(st.integers(low, 9)) for low in (0, 0, 1))
    gqa = draw(st.booleans())
    divisors = [n for n in range(1, heads + 1) if heads % n == 0] if gqa else [1, heads]

    def shape(tail, own_heads):
        axes = [draw(st.sampled_from([1, size])) for size in batch]
        return (*axes, own_heads, *tail)

    shapes = [
        shape((rows, dim), heads),
        shape((keys, dim), draw(st.sampled_from(divisors))),
        shape((keys, dim_v), draw(st.sampled_from(divisors))),
    ]
    whole = torch.broadcast_shapes(*(s[:-3] for s in shapes))
    kind = draw(st.sampled_from(["none", "causal", "bool", "bias", "trained"]))
    target = (*whole, heads, rows, keys)
    mask = tuple(draw(st.sampled_from([1, size])) for size in target)
    mask = mask[draw(st.integers(0, len(mask) - 2)) :]
    return shapes, kind, mask, gqa, draw(st.integers(0, 1 << 30))


@given(calls())
def test_random_calls_equal_torch(call):
    shapes, kind, mask_shape, gqa, seed = call
    assume(all(shapes))
    torch.manual_seed(seed)
    tensors = operands(*shapes)
    kwargs = {"enable_gqa": gqa, "is_causal": kind == "causal"}
    if kind in ("bool", "bias", "trained"):
        mask = torch.randn(mask_shape, dtype=torch.float64)
        if kind == "bool":
            mask = mask > -0.5
        elif kind == "bias":
            mask = mask.masked_fill(mask < -1, -math.inf)
        kwargs["attn_mask"] = mask.requires_grad_(kind == "trained")
    ours = gradients(twin, tensors, **kwargs)
    # torch in its plainest form: equal batches and heads.
    batch = torch.broadcast_shapes(*(s[:-3] for s in shapes))
    heads = max(s[-3] for s in shapes)
    leaves = [x.detach().requires_grad_() for x in tensors]
    whole = [
        x.repeat_interleave(heads // x.shape[-3], -3).expand(*batch, heads, *x.shape[-2:])
        for x in leaves
    ]
    scores = whole[0] @ whole[1].mT / math.sqrt(max(shapes[0][-1], 1))
    if kind == "causal":
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if kind == "bool":
        scores = scores.masked_fill(~kwargs["attn_mask"], -math.inf)
    elif kind in ("bias", "trained"):
        scores = scores + kwargs["attn_mask"]
    dead = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    out = weights @ whole[2]
    wanted = [*leaves, *([kwargs["attn_mask"]] if kind == "trained" else [])]
    grads = torch.autograd.grad(out, wanted, grad_of(out))
    for a, b in zip(ours, [out, *grads], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_it_is_public():
    assert flashmod.scaled_dot_product_attention is twin
