"""What only the kernels can get wrong, in Triton's interpreter; the table is in test_backends."""

import logging
import mmap
from itertools import product

import pytest
import torch
from cases import SEED, Inputs, cu_seqlens, reference_attention, run

from flashmod import Mask, TileConfig, flash_attention
from flashmod.backends.triton import (
    dropout_mask,
    launch,
    passes,
    schedule,
    structs,
    unsupported_reasons,
)
from flashmod.backends.triton.arguments import DropoutArg, MaskArg, ScoreArg, StatsArg
from flashmod.functional import prepare
from flashmod.reference import kept as kept_by_definition
from flashmod.spec import spans

TINY = TileConfig(16, 16)


def tensors(rows=19, kv_rows=23, heads=(2, 1), dims=(8, 8), dtype=torch.float32):
    """q, k, v, grad_out, grad_lse of one sequence."""
    shapes = ((rows, heads[0], dims[0]), (kv_rows, heads[1], dims[0]), (kv_rows, heads[1], dims[1]))
    q, k, v = (torch.randn(1, *shape, dtype=dtype) for shape in shapes)
    grad_out = torch.randn(1, rows, heads[0], dims[1], dtype=dtype)
    return q, k, v, grad_out, torch.randn(1, heads[0], rows, dtype=dtype)


def assert_equals_definition(inputs, tiles=TINY, tolerance=2e-6):
    got = run(inputs, backend="triton", tiles=tiles)
    truth = run(inputs.promoted(), reference_attention)
    for name, x, y in zip(got._fields, got, truth, strict=True):
        assert torch.equal(x.isinf(), y.isinf()), name
        x, y = x.masked_fill(x.isinf(), 0).double(), y.masked_fill(y.isinf(), 0)
        error = (x - y).abs().max() / y.abs().max().clamp(min=1)
        assert error <= tolerance, f"{name}: {error}"
    return got


@pytest.mark.parametrize("dims", [(1, 1), (5, 3), (16, 40), (40, 16), (64, 64)], ids=str)
def test_head_dimensions(dims):
    inputs = Inputs(*tensors(dims=dims), {"mask": Mask(causal=True)})
    assert_equals_definition(inputs)


def test_largest_head_dimension():
    inputs = Inputs(*tensors(rows=3, kv_rows=4, dims=(256, 200)), {})
    assert_equals_definition(inputs, tolerance=1e-5)


@pytest.mark.parametrize("scale", [-0.4, 0.0, 1e-8])
def test_scale_of_any_sign(scale):
    """The running maximum is that of the logits, also where the scale turns products around."""
    inputs = Inputs(*tensors(), {"mask": Mask(window=(6, 6)), "softmax_scale": scale})
    assert_equals_definition(inputs)


@pytest.mark.parametrize("largest", [1e4, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_logits(largest, dtype):
    """Finite, and as exact as the logits themselves are in that dtype."""
    inputs = Inputs(*tensors(dtype=dtype), {"mask": Mask(causal=True)})
    logits = torch.einsum("bqhd,bkd->bhqk", inputs.q, inputs.k[:, :, 0]).abs().max()
    inputs.kwargs["softmax_scale"] = float(largest / logits)
    eps = torch.finfo(dtype).eps
    got = run(inputs, backend="triton", tiles=TINY)
    assert all(x[x != -torch.inf].isfinite().all() for x in got)
    truth = run(inputs.promoted(), reference_attention)
    for x, y in zip(got, truth, strict=True):
        unit = y[y.isfinite()].abs().max() + float(largest / logits)
        error = (x - y)[y.isfinite()].abs().max() / unit
        assert error <= 16 * eps * largest


@pytest.mark.parametrize("window", [(None, None), (20, 9)], ids=str)
@pytest.mark.parametrize("tiles", [(16, 64), (64, 16)], ids=str)
def test_blocks_of_any_ratio_with_and_without_an_unmasked_middle(tiles, window):
    inputs = Inputs(*tensors(rows=50, kv_rows=70, heads=(1, 1)), {"mask": Mask(window=window)})
    assert_equals_definition(inputs, TileConfig(*tiles))


def remainders(batch, head, q_idx, kv_idx, step, width):
    offset = kv_idx - q_idx
    return (offset % step < width) & ((offset // 3 + batch) % 2 == 0) | (offset % 3.5 < 1)


@pytest.mark.parametrize("fn_args", [(5, 3), (-4, -1), (2.5, 1.25)], ids=str)
def test_remainders_of_negative_offsets_round_down(fn_args):
    """Triton rounds towards zero, Python and torch round down; a mask function means the latter."""
    mask = Mask(fn=remainders, fn_args=fn_args)
    assert_equals_definition(Inputs(*tensors(), {"mask": mask}), TileConfig(32, 32))


@pytest.mark.parametrize("backend", ["tiled", "triton"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_row_offsets_past_two_gigabytes(packed, backend):
    """pytorch/pytorch#190857: 32-bit offsets read elsewhere. The pages between stay untouched."""
    stride = 2**29 + 8
    pages = mmap.mmap(-1, 5 * stride * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    far = torch.frombuffer(pages, dtype=torch.float16).as_strided((1, 5, 1, 16), (0, stride, 0, 1))
    q, k, v, grad_out, _ = tensors(5, 5, (1, 1), (16, 16), torch.float16)
    near = Inputs(q, k, v, grad_out, torch.randn(1, 1, 5), {})
    if packed:  # the second sequence lies past 2**31 elements
        near = Inputs(*(x[0] for x in near[:5]), {"cu_seqlens_q": cu_seqlens([4, 1])})
        far = far[0]
    for name in ("q", "k", "v", "grad_out"):
        x = getattr(near, name)
        far.copy_(x)
        moved = run(near._replace(**{name: far}), backend=backend, tiles=TINY)
        for a, b in zip(moved, run(near, backend=backend, tiles=TINY), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("blocks", [(16, 16), (32, 64), (64, 16)], ids=str)
@pytest.mark.parametrize("per_row", [False, True], ids=["rate", "rates"])
def test_dropout_bits_are_those_of_the_definition_in_both_orientations(blocks, per_row):
    q, k = torch.zeros(2, 51, 3, 4), torch.zeros(2, 45, 1, 4)
    rate = torch.rand(2, 51) if per_row else 0.3
    ids = torch.tensor([5, 2], dtype=torch.int32)
    call = prepare(q, k, k, dropout_p=rate, dropout_seed=SEED, sequence_ids=ids).call
    thresholds = call.dropout_thresholds if per_row else call.dropout_threshold
    truth = [kept_by_definition(call, span, 3, torch.arange(51), 45) for span in spans(call, q, k)]
    for transposed in (False, True):
        got = dropout_mask(
            call.dropout_seed, ids, thresholds, (2, 3, 51, 45), transposed, TileConfig(*blocks)
        )
        assert torch.equal(got, torch.stack(truth))


def far_copy(x):
    """The same numbers with rows 2 ** 30 bytes apart; the pages between stay untouched."""
    stride = 2**29 + 8
    pages = mmap.mmap(-1, x.shape[-2] * stride * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    far = torch.frombuffer(pages, dtype=torch.float16).as_strided(x.shape, (0, 0, stride, 1))
    return far.copy_(x)


def test_mask_offsets_past_two_gigabytes():
    q, k, v, grad_out, grad_lse = tensors(5, 7, (1, 1), (16, 16), torch.float16)
    bias = torch.randn(1, 1, 5, 7, dtype=torch.float16)
    near, far = (
        run(Inputs(q, k, v, grad_out, grad_lse, {"attn_mask": x}), backend="triton", tiles=TINY)
        for x in (bias, far_copy(bias))
    )
    for a, b in zip(near[:6], far[:6], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", list(product((1, 3), (1, 2), (1, 24), (1, 37))), ids=str)
def test_bias_gradient_of_every_broadcast_shape(shape):
    """Tiles outside a sequence, or seen by nobody, get 0; axes that are not there are summed."""
    cu = cu_seqlens((5, 0, 21)), cu_seqlens((20, 6, 33))
    q, k, v = torch.randn(26, 2, 8), torch.randn(59, 1, 8), torch.randn(59, 1, 4)
    bias = torch.randn(shape).masked_fill(torch.rand(shape) < 0.2, -torch.inf)
    options = {"mask": Mask(causal=True), "softcap": 3.0}
    options |= {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}
    grads = []
    for dtype, function in ((torch.float32, flash_attention), (torch.float64, reference_attention)):
        leaf = bias.to(dtype, copy=True).requires_grad_()
        chosen = {"backend": "triton", "tiles": TINY} if function is flash_attention else {}
        inputs = (x.to(dtype) for x in (q, k, v))
        out, lse = function(*inputs, attn_mask=leaf, return_lse=True, **options, **chosen)
        grads.append(torch.autograd.grad((out.square().sum(), lse[lse.isfinite()].sum()), leaf)[0])
    got, truth = grads
    assert got.shape == shape and (got[bias == -torch.inf] == 0).all()
    torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_of_the_most_negative_number_hides_nothing(dtype):
    """What other libraries write for "hidden" is finite: alone in a row it leaves the mean."""
    q, k, v, *_ = tensors(rows=6, kv_rows=9, dtype=dtype)
    bias = torch.zeros(6, 9, dtype=dtype)
    bias[2], bias[3, 4:] = torch.finfo(dtype).min, torch.finfo(dtype).min
    out = flash_attention(q, k, v, attn_mask=bias, backend="triton", tiles=TINY)
    torch.testing.assert_close(out[0, 2, 0], v.float().mean((0, 1, 2)).to(dtype))
    seen = flash_attention(q, k, v, attn_mask=bias == 0, backend="triton", tiles=TINY)
    torch.testing.assert_close(out[0, 3], seen[0, 3])


def test_a_query_without_keys_reaches_no_gradient_whatever_it_holds():
    """The slope of the soft cap of a NaN is one, and is selected away with its pair."""
    q, k, v, grad_out, _ = tensors(rows=20)
    hidden = torch.ones(20, 23, dtype=torch.bool)
    hidden[3] = hidden[18] = False
    ready = prepare(q, k, v, attn_mask=hidden, softcap=2.0, tiles=TINY)
    results = []
    for filler in (1.0, torch.nan):
        q[:, [3, 18]], grad_out[:, [3, 18]] = filler, filler
        out, _, saved, *_ = passes.forward(q, k, v, ready.call)
        grads = passes.backward(grad_out, None, q, k, v, out, saved, ready.call, mask_grad=False)
        results.append((out, *grads[:3]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("per_row", [False, True], ids=["alone", "beside keys"])
def test_a_sink_without_keys_gets_the_gradient_of_its_lse(per_row):
    q, k, v, _, grad_lse = tensors(rows=5, kv_rows=9 if per_row else 0)
    sink = torch.randn(2)
    options = {"learnable_sink": sink, "mask": Mask(causal=True, align="top_left"), "tiles": TINY}
    call = prepare(q, k, v, **options).call
    out, lse, saved, *_ = passes.forward(q, k, v, call)
    grad_out = torch.zeros_like(out)
    grads = passes.backward(grad_out, grad_lse, q, k, v, out, saved, call, mask_grad=False)
    share = torch.exp(sink[:, None] - lse[0])
    assert per_row or torch.equal(share, torch.ones_like(share))
    torch.testing.assert_close(grads.sink[0], (share * grad_lse[0]).sum(1))


LENGTHS = ((7, 0, 40, 1), (16, 5, 0, 33))


@pytest.mark.parametrize("block", [16, 64])
def test_work_lists_hold_every_tile_once_longest_first(block):
    q_cu, kv_cu = (cu_seqlens(lengths) for lengths in LENGTHS)
    q, k = torch.zeros(60, 1, 4), torch.zeros(60, 1, 4)  # slack past the last sequence
    mask = Mask(causal=True)
    call = prepare(q, k, k, mask=mask, cu_seqlens_q=q_cu, cu_seqlens_k=kv_cu).call
    lists = (schedule.query_tiles(call, 60, block), schedule.key_tiles(call, 60, block))
    for lengths, work in zip(LENGTHS, lists, strict=True):
        real = [(n, first) for n, first in work.tolist() if first < lengths[n]]
        assert sorted(real) == [
            (n, first) for n in range(4) for first in range(0, lengths[n], block)
        ]
        assert work[: len(real)].tolist() == [list(tile) for tile in real]
        assert len(work) == -(-60 // block) + 4
    causal = prepare(q[None], q[None], q[None], mask=mask).call
    firsts = schedule.query_tiles(causal, 60, 16)[:4, 1].tolist()
    assert firsts == [48, 32, 16, 0]  # the last queries see most keys
    assert schedule.key_tiles(causal, 60, 16)[:4, 1].tolist() == firsts[::-1]


def test_work_lists_ask_nothing_of_the_host():
    """On the meta device every read of a value raises."""
    x = torch.zeros(2, 40, 1, 4)
    call = prepare(x, x, x).call
    call = call._replace(
        **{name: t.to("meta") for name, t in call._asdict().items() if isinstance(t, torch.Tensor)}
    )
    assert schedule.query_tiles(call, 80, 16).shape == (7, 2)
    assert schedule.key_tiles(call, 80, 16).shape == (7, 2)


def test_arguments_of_a_plain_call_hold_nothing():
    x = torch.zeros(1, 4, 1, 4)
    call = prepare(x, x, x).call
    assert structs.mask_arg(call, x.dtype) == MaskArg((), (), None, None, None, None, None)
    assert structs.score_arg(call) == ScoreArg(0, 0, None, None, None, None)
    assert structs.dropout_arg(call, x.dtype) == DropoutArg(0, None, None)
    assert structs.stats_arg(call, x, TINY, x.dtype) == StatsArg(0, None, None, None)
    assert structs.is_linear(call) and not call.everywhere


def test_a_mask_is_read_where_it_lies():
    """Broadcast axes cost no memory, and no axis that a caller gives is copied."""
    x = torch.zeros(3, 4, 2, 4)
    mask = torch.zeros(3, 1, 1, 4).expand(3, 2, 4, 4)
    arg = structs.mask_arg(prepare(x, x, x, attn_mask=mask).call, x.dtype)
    assert arg.keys.data_ptr() == mask.data_ptr() and arg.strides == (4, 0, 0, 1)
    pairs = torch.zeros(4, 2, 4).transpose(0, 1)
    arg = structs.mask_arg(prepare(x, x, x, attn_mask=pairs).call, x.dtype)
    assert arg.pairs.data_ptr() == pairs.data_ptr() and arg.strides == (0, 4, 8, 1)


def test_strides_of_single_rows_never_ask_for_a_compile():
    x = torch.zeros(1, 1, 1, 8).as_strided((1, 1, 1, 8), (999, 77, 5, 1))
    assert structs.tensor_arg(x).strides == (0, 0, 0, 1)


def test_float32_products_follow_torch():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "ieee"
        assert launch._precision(torch.float32) == "ieee"
        matmul.fp32_precision = "tf32"
        assert launch._precision(torch.float32) == "tf32"
        assert launch._precision(torch.float64) == launch._precision(torch.float16) == "ieee"
    finally:
        matmul.fp32_precision = before


def test_reasons_name_what_is_wrong():
    x = torch.zeros(1, 4, 1, 257)
    ready = prepare(x, x, x, tiles=TileConfig(24, 8))
    reasons = unsupported_reasons(*ready)
    assert "head dimension D = 257 is not within 1..256" in reasons
    assert "tiles 24x8 are not powers of two of 16 or more" in reasons
    assert unsupported_reasons(*prepare(x[..., :8], x[..., :8], x[..., :8])) == []


def test_one_line_before_a_first_compile(caplog):
    caplog.set_level(logging.INFO, "flashmod")
    launch._announce.cache_clear()
    x = torch.zeros(1, 4, 1, 8)
    for rows in (4, 2, 3):
        passes.forward(*prepare(x[:, :rows], x, x, tiles=TINY))
    assert len([r for r in caplog.records if "forward_kernel" in r.message]) == 1


def test_no_row_outside_the_buffers_is_touched_whatever_the_lengths_say():
    x = torch.randn(10, 1, 16)
    options = {"attn_mask": torch.zeros(10, 10), "dropout_p": torch.zeros(10), "dropout_seed": 0}
    ready = prepare(x, x, x, cu_seqlens_q=torch.tensor([0, 4, 10], dtype=torch.int32), **options)
    wrong = torch.tensor([0, 1 << 28], dtype=torch.int32), torch.tensor([4, 90], dtype=torch.int32)
    starts, lengths = wrong
    call = ready.call._replace(
        q_starts=starts, kv_starts=starts, q_lengths=lengths, kv_lengths=lengths
    )
    out, _, saved, *_ = passes.forward(ready.q, ready.k, ready.v, call)
    *grads, _ = passes.backward(
        out, None, ready.q, ready.k, ready.v, out, saved, call, mask_grad=True
    )
    assert all(grad.isfinite().all() for grad in grads)
    torch.testing.assert_close(out[0, :4], passes.forward(*ready).out[0, :4])
