"""One mask whatever computes it: ``dropout_mask``, tiles, backends, layouts; rates per token."""

from functools import partial

import numpy as np
import pytest
import torch
from cases import SEED, cu_seqlens
from oracle import random_bits
from torch.utils.checkpoint import checkpoint

import flashmod
from flashmod import Mask, TileConfig, dropout, dropout_mask, flash_attention
from flashmod.functional import dropout_threshold
from flashmod.measure import peak_mib

BACKENDS = ("tiled", "triton")
H, H_KV, S, S_KV = 4, 2, 37, 41  # rows and keys of the longest sequence
LENGTHS, KV_LENGTHS = (37, 0, 9), (17, 5, 41)
IDS = torch.tensor([5, 1, 70_000])
SHAPE = (3, H, S, S_KV)
P = 0.3


def expected(p=P, seed=SEED, ids=IDS, shape=SHAPE):
    """By the replica in unsigned arithmetic; ``p`` is a number or (N, S)."""
    axes = np.meshgrid(*(np.arange(n) for n in shape[1:]), indexing="ij")
    draws = np.stack([random_bits(seed, int(n), *axes).astype(np.int64) for n in ids])
    if isinstance(p, torch.Tensor):
        steps = [[dropout_threshold(x) for x in row] for row in p.tolist()]
        return torch.from_numpy(draws >= np.array(steps)[:, None, :, None])
    return torch.from_numpy(draws >= dropout_threshold(p))


def rates(batch, rows):
    """0, 1 and rates between, one per row."""
    cycle = torch.tensor([0.0, 0.25, 1.0, 0.9, 1 / 65536])
    return cycle[torch.arange(batch * rows) % len(cycle)].view(batch, rows)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("p", [0.0, P, 1.0, rates(3, S)], ids=["none", "some", "all", "rates"])
def test_the_mask_is_the_definition(backend, p):
    got = dropout_mask(p, SEED, SHAPE, sequence_ids=IDS, backend=backend)
    assert got.dtype == torch.bool and got.is_contiguous()
    assert torch.equal(got, expected(p))


@pytest.mark.parametrize("chunk", [1, 100, H * S_KV * 5, H * S_KV * S * 2])
def test_chunks_change_nothing(monkeypatch, chunk):
    whole = dropout_mask(rates(3, S), SEED, SHAPE)
    monkeypatch.setattr(dropout, "_CHUNK", chunk)
    assert torch.equal(dropout_mask(rates(3, S), SEED, SHAPE), whole)


def test_memory_stays_near_the_result():
    shape = (2, 4, 1024, 2048)  # 16 MiB; its random numbers alone would be 64
    peak = peak_mib(lambda: dropout_mask(0.1, 1, shape))
    assert 16 <= peak < 28


def test_empty_masks_and_defaults():
    for shape in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)):
        assert dropout_mask(0.5, 1, shape).shape == shape
        assert dropout_mask(0.5, 1, shape, backend="triton").shape == shape
    assert torch.equal(
        dropout_mask(P, torch.tensor(SEED), SHAPE),
        dropout_mask(P, SEED, list(SHAPE), sequence_ids=torch.arange(3), device="cpu"),
    )
    assert dropout_mask(P, SEED, SHAPE, device="meta").device.type == "meta"


@pytest.mark.parametrize(
    ("arguments", "kwargs", "error", "message"),
    [
        ((0.5, 1, (2, 3, 4)), {}, ValueError, "shape"),
        ((0.5, 1, (2, 3, -4, 1)), {}, ValueError, "shape"),
        ((1.5, 1, (1, 1, 2, 2)), {}, ValueError, "between 0 and 1"),
        ((torch.tensor([[0.5, 1.5]]), 1, (1, 1, 2, 2)), {}, ValueError, "between 0 and 1"),
        ((torch.rand(1, 3), 1, (1, 1, 2, 2)), {}, ValueError, "one per token"),
        ((0.5, None, (1, 1, 2, 2)), {}, TypeError, "seed"),
        ((0.5, 0.5, (1, 1, 2, 2)), {}, TypeError, "seed"),
        ((0.5, 1, (1, 1, 2, 2)), {"sequence_ids": torch.arange(2)}, ValueError, "sequence_ids"),
        ((0.5, 1, (1, 1, 2, 2)), {"backend": "cuda"}, ValueError, "backend"),
    ],
)
def test_wrong_arguments_are_named(arguments, kwargs, error, message):
    with pytest.raises(error, match=message):
        dropout_mask(*arguments, **kwargs)


def read_off(backend, tiles, p=P, layout="padded"):
    """The weights that a call kept, in the forward and in the orientation of dV, (N, H, S, S_kv).

    Unit vectors for values and for incoming gradients leave the weights as they are.
    """
    dim = max(S_KV, H // H_KV * S)
    q, k = torch.zeros(3, S, H, 1), torch.zeros(3, S_KV, H_KV, 1)
    v = torch.eye(S_KV, dim)[:, None].repeat(3, 1, H_KV, 1)
    slots = torch.eye(H // H_KV * S, dim).view(H // H_KV, S, dim).transpose(0, 1)
    grad = slots.repeat(3, 1, H_KV, 1)  # (N, S, H, dim): a slot for every query of a group
    mask = {"dropout_p": p, "dropout_seed": SEED, "backend": backend, "tiles": TileConfig(*tiles)}
    out, dv = torch.zeros(3, S, H, dim), torch.zeros(3, S_KV, H_KV, dim)
    for rows, call in layouts(layout):
        q_at, kv_at = rows
        value = v[kv_at].requires_grad_()
        result = flash_attention(q[q_at], k[kv_at], value, **{**mask, **call(p)})
        out[q_at] = result.detach()
        (dv[kv_at],) = torch.autograd.grad(result, value, grad[q_at])
    forward = out[..., :S_KV].transpose(1, 2) != 0
    backward = dv[..., : H // H_KV * S].unflatten(-1, (-1, S)).permute(0, 2, 3, 4, 1) != 0
    return forward, backward.reshape(SHAPE)


def layouts(name):
    """The rows of the padded tensors that each call takes, and what says so."""
    if name == "dense":  # every row is a token
        return [((slice(None),) * 2, lambda p: {"sequence_ids": IDS})]
    if name == "padded":
        lengths = {"lengths_q": torch.tensor(LENGTHS), "lengths_k": torch.tensor(KV_LENGTHS)}
        return [((slice(None),) * 2, lambda p: {**lengths, "sequence_ids": IDS})]
    q_real, kv_real = (
        torch.arange(longest) < torch.tensor(lengths)[:, None]
        for longest, lengths in ((S, LENGTHS), (S_KV, KV_LENGTHS))
    )
    if name == "packed":
        cu = {"cu_seqlens_q": cu_seqlens(LENGTHS), "cu_seqlens_k": cu_seqlens(KV_LENGTHS)}
        return [((q_real, kv_real), partial(packed_call, cu, IDS, q_real))]
    calls = []  # every sequence alone
    for n, (q_len, kv_len) in enumerate(zip(LENGTHS, KV_LENGTHS, strict=True)):
        cu = {"cu_seqlens_q": cu_seqlens([q_len]), "cu_seqlens_k": cu_seqlens([kv_len])}
        own = torch.arange(3)[:, None] == n
        calls.append(
            ((q_real & own, kv_real & own), partial(packed_call, cu, IDS[n : n + 1], q_real & own))
        )
    return calls


def packed_call(cu, ids, rows, p):
    own = {"dropout_p": p[rows]} if isinstance(p, torch.Tensor) else {}
    return {**cu, "sequence_ids": ids, **own}


def inside():
    rows, keys = torch.tensor(LENGTHS)[:, None, None, None], torch.tensor(KV_LENGTHS)
    return (torch.arange(S)[:, None] < rows) & (torch.arange(S_KV) < keys[:, None, None, None])


TILES = {
    "tiled": [(1, 7), (16, 16), (17, 23), (16, 128), (128, 16), (128, 128)],
    "triton": [(16, 16), (16, 64), (64, 16), (32, 32), (128, 128)],
}


@pytest.mark.parametrize(
    "backend, tiles", [(name, tiles) for name in BACKENDS for tiles in TILES[name]]
)
def test_every_tile_size_drops_the_same_in_both_passes(backend, tiles):
    wanted = dropout_mask(P, SEED, SHAPE, sequence_ids=IDS) & inside()
    for got in read_off(backend, tiles):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["dense", "padded", "packed", "alone"])
def test_every_layout_drops_the_same_per_token_too(backend, layout):
    p = rates(3, S)
    wanted = dropout_mask(p, SEED, SHAPE, sequence_ids=IDS)
    wanted = wanted if layout == "dense" else wanted & inside()
    for got in read_off(backend, (32, 32), p, layout):
        assert torch.equal(got, wanted)


def qkv(batch=2, rows=11, requires_grad=False):
    return [torch.randn(batch, rows, heads, 8, requires_grad=requires_grad) for heads in (4, 2, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_with_its_own_rate_equals_a_call_at_that_rate_bitwise(backend):
    q, k, v = qkv(batch=1)
    p, grad = rates(1, 11), torch.randn(1, 11, 4, 8)
    call = partial(flash_attention, k=k, v=v, dropout_seed=SEED, backend=backend, return_lse=True)

    def results(p):
        leaf = q.detach().requires_grad_()
        out, lse = call(leaf, dropout_p=p)
        return out.detach(), torch.autograd.grad(out, leaf, grad)[0], lse

    out, dq, lse = results(p)
    for rate in p.unique().tolist():
        rows = p == rate
        scalar = results(rate)
        for got, wanted in zip((out, dq), scalar, strict=False):
            assert torch.equal(got[rows], wanted[rows])
        assert torch.equal(lse, scalar[2])
    plain = call(q)[0]
    assert torch.equal(out[p == 0], plain[p == 0])
    assert (out[p == 1] == 0).all() and (dq[p == 1] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_equal_float64_with_the_mask_spelled_out(backend):
    inputs = qkv(requires_grad=True)
    p, grad = rates(2, 11), torch.randn(2, 11, 4, 8)
    mask = Mask(causal=True)
    out = flash_attention(*inputs, mask=mask, dropout_p=p, dropout_seed=SEED, backend=backend)
    q, k, v = (x.double() for x in inputs)
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
    weights = scores.masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf).softmax(-1)
    thresholds = torch.tensor([[dropout_threshold(x) for x in row] for row in p.tolist()])
    scale = torch.where(thresholds < 65536, 65536 / (65536 - thresholds).clamp(min=1), 0.0)
    kept = dropout_mask(p, SEED, (2, 4, 11, 11))
    weights = torch.where(kept, weights * scale[:, None, :, None].double(), 0.0)
    wanted = torch.einsum("bhij,bjhd->bihd", weights, v)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    for got, good in zip(
        torch.autograd.grad(out, inputs, grad),
        torch.autograd.grad(wanted, inputs, grad.double()),
        strict=True,
    ):
        torch.testing.assert_close(got, good, rtol=1e-5, atol=2e-5)


def block(q, k, v):
    """Draws its rates and its seed anew."""
    rates = torch.rand(q.shape[:2])
    return flash_attention(q * 2, k, v, dropout_p=rates, mask=Mask(causal=True)).sin()


def replayed(fn, inputs):
    torch.manual_seed(4)
    out = fn(*inputs)
    torch.randn(5)
    return out.detach(), *torch.autograd.grad(out.square().sum(), inputs)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_replays_rates_and_seed(use_reentrant):
    inputs = qkv(requires_grad=True)
    wanted = replayed(block, inputs)
    if use_reentrant:  # which supports backward() alone
        leaves = [x.detach().requires_grad_() for x in inputs]
        torch.manual_seed(4)
        out = checkpoint(block, *leaves, use_reentrant=True)
        torch.randn(5)
        out.square().sum().backward()
        got = (out.detach(), *(x.grad for x in leaves))
    else:
        got = replayed(partial(checkpoint, block, use_reentrant=False), inputs)
    assert all(map(torch.equal, got, wanted))
    torch.manual_seed(5)
    assert not torch.equal(block(*inputs), wanted[0])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_code_keeps_its_rates_and_seed_from_forward_to_backward():
    inputs = qkv(requires_grad=True)

    def call(q, k, v, p, seed):
        return flash_attention(q * 2, k, v, dropout_p=p, dropout_seed=seed).sin()

    def drawn(q, k, v, p):
        return flash_attention(q * 2, k, v, dropout_p=p).sin()

    p, seed = torch.rand(2, 11), torch.tensor(SEED)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, wanted = (replayed(partial(f, p=p, seed=seed), inputs) for f in (compiled, call))
    assert all(map(torch.equal, got, wanted))
    compiled = torch.compile(drawn, fullgraph=True, backend="aot_eager")
    got, wanted = (replayed(partial(f, p=p), inputs) for f in (compiled, drawn))
    assert all(map(torch.equal, got, wanted))
    assert not torch.equal(compiled(*inputs, p=p), got[0])  # a new seed


def test_it_is_public():
    assert flashmod.dropout_mask is dropout_mask and "dropout_mask" in flashmod.__all__
