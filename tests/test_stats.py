"""Statistics of a forward pass against a tile by tile recurrence in plain Python."""

import dataclasses

import numpy as np
import pytest
import torch
from cases import LAYOUTS, Case, build, covering_cases, cu_seqlens, run
from oracle import logits, recurrence
from spelling import reachable_pairs, rows_of, scores_of, visible_pairs

from flashmod import AttentionStats, Mask, TileConfig, flash_attention
from flashmod.functional import prepare
from flashmod.stats import FULL, PARTIAL, SKIPPED

BACKENDS = ("tiled", "triton")
WIDE = [dataclasses.replace(case, dtype=torch.float64) for case in covering_cases()]


def stats_of(case: Case, backend: str, tiles: TileConfig) -> AttentionStats:
    inputs = build(case)
    options = {"backend": backend, "tiles": tiles, "return_stats": True}
    return flash_attention(*inputs[:3], **inputs.kwargs, **options)[-1]


def check(case: Case, backend: str, tiles: TileConfig) -> None:
    """Counts and kinds exactly, numbers of rows to 1e-12."""
    stats, inputs, layout = stats_of(case, backend, tiles), build(case), LAYOUTS[case.layout]
    assert stats.tiles[:2] == tiles[:2]
    assert len(stats.sequences) == len(layout.q)
    shape = (*inputs.q.shape[:-2], inputs.q.shape[-2])
    max_logit, entropy = np.full(shape, -np.inf), np.zeros(shape)
    any_hidden = case.mask_spec.fn is not None or inputs.kwargs["attn_mask"] is not None
    for n, sequence in enumerate(stats.sequences):
        q_at, kv_at = rows_of(case, layout.q, n), rows_of(case, layout.kv, n)
        q, k = inputs.q[q_at].numpy(), inputs.k[kv_at].numpy()
        seen = visible_pairs(case, inputs, n)
        table = logits(q, k, seen, scores_of(case, inputs, n))
        trace = recurrence(table, reachable_pairs(case, inputs, n), tiles[:2], any_hidden)
        for name in ("kinds", "updates", "rescales"):
            got = getattr(sequence, name)
            assert got.dtype == torch.int32
            np.testing.assert_array_equal(got.numpy(), getattr(trace, name), err_msg=name)
        max_logit[q_at], entropy[q_at] = trace.max_logit.T, trace.entropy.T
    for got, truth in ((stats.max_logit, max_logit), (stats.entropy, entropy)):
        assert not got.requires_grad
        np.testing.assert_allclose(got.transpose(-1, -2).numpy(), truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.id)
def test_tiled_equals_the_recurrence(case):
    check(case, "tiled", TileConfig(8, 16))


@pytest.mark.parametrize("tiles", [(1, 1), (3, 5), (64, 2)], ids=str)
@pytest.mark.parametrize("case", WIDE[::9], ids=lambda case: case.id)
def test_tiled_equals_the_recurrence_in_other_tiles(case, tiles):
    check(case, "tiled", TileConfig(*tiles))


@pytest.mark.parametrize("case", WIDE[::4], ids=lambda case: case.id)
def test_triton_equals_the_recurrence(case):
    check(case, "triton", TileConfig(16, 16))


LONG = {  # several tiles each way, so that full ones and rescales of every order occur
    "full": {},
    "window": {"mask": Mask(window=(50, 9), prefix_len=4)},
    "capped": {"mask": Mask(causal=True), "softcap": 3.0, "alibi_slopes": torch.tensor([0.1, 0.4])},
}


@pytest.mark.parametrize("tiles", [(16, 16), (16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("kwargs", LONG.values(), ids=LONG)
def test_both_backends_count_alike(kwargs, tiles):
    q, k, v = (torch.randn(n, h, 8, dtype=torch.float64) for n, h in ((85, 2), (102, 1), (102, 1)))
    kwargs = kwargs | {"cu_seqlens_q": cu_seqlens([50, 0, 35]), "return_stats": True}
    kwargs |= {"cu_seqlens_k": cu_seqlens([70, 1, 31]), "tiles": TileConfig(*tiles)}
    one, two = (flash_attention(q, k, v, backend=b, **kwargs)[1] for b in BACKENDS)
    for a, b in zip(one.sequences, two.sequences, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    for name in ("rescales", "updates", "tiles_processed", "tiles_partial", "tiles_skipped"):
        assert getattr(one, name) == getattr(two, name)
    assert one.rescales > 0 and one.tiles_processed > one.tiles_partial
    torch.testing.assert_close(one.max_logit, two.max_logit)
    torch.testing.assert_close(one.entropy, two.entropy)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rescale_is_a_maximum_that_strictly_exceeds_a_finite_one(backend):
    """Logits by hand, four key tiles: equal maxima and first tiles are no rescales."""
    tile_maxima = torch.tensor([[1.0, 2.0, 2.0, 3.0], [5.0, 4.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    k = tile_maxima.T.repeat_interleave(16, 0).reshape(1, 64, 1, 3)
    q = torch.eye(3).reshape(1, 3, 1, 3)
    hidden = torch.zeros(1, 1, 3, 64).masked_fill(torch.arange(64) < 16, -torch.inf)
    kwargs = {"softmax_scale": 1.0, "return_stats": True, "backend": backend}
    for bias, rescales, updates in (
        (None, [0, 1, 0, 1], [3, 1, 0, 1]),
        (hidden, [0, 0, 0, 1], [0, 3, 0, 1]),
    ):
        _, stats = flash_attention(
            q, k, k, attn_mask=bias, tiles=TileConfig(16, 16), learnable_sink=torch.tensor([9.0]),
            **kwargs,
        )  # fmt: skip
        assert stats.sequences[0].rescales.tolist() == [[rescales]]
        assert stats.sequences[0].updates.tolist() == [[updates]]
        assert (stats.rescales, stats.updates) == (sum(rescales), sum(updates))
        assert stats.max_logit.tolist() == [[[3.0, 4.0 if bias is not None else 5.0, 0.0]]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_entropy_of_known_weights(backend):
    """Equal weights, one weight, none; neither a sink nor dropout takes part."""
    q, k = torch.zeros(1, 3, 1, 4), torch.zeros(1, 20, 1, 4)
    seen = torch.arange(20) < torch.tensor([20, 1, 0])[:, None]
    _, stats = flash_attention(
        q, k, k, attn_mask=seen, learnable_sink=torch.tensor([2.0]), dropout_p=0.5,
        return_stats=True, backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(stats.entropy[0, 0], torch.tensor([20.0, 1.0, 1.0]).log())
    assert stats.max_logit[0, 0].tolist() == [0.0, 0.0, -torch.inf]


@pytest.mark.parametrize("backend", BACKENDS)
def test_kinds_of_tiles(backend):
    x = torch.randn(1, 40, 1, 4)
    options = {"return_stats": True, "backend": backend, "tiles": TileConfig(16, 16)}
    _, stats = flash_attention(x, x, x, mask=Mask(causal=True), **options)
    wanted = [[PARTIAL, SKIPPED, SKIPPED], [FULL, PARTIAL, SKIPPED], [FULL, FULL, PARTIAL]]
    assert stats.sequences[0].kinds.tolist() == [wanted]
    assert (stats.tiles_processed, stats.tiles_partial, stats.tiles_skipped) == (6, 3, 3)
    assert str(stats).startswith("6 of 9 tiles of 16x16 processed (3 partly visible), ")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["slack", "padded"])
def test_statistics_change_nothing_and_cost_nothing_when_off(layout, backend):
    inputs = build(Case(layout, "causal", 0.25, "gqa", "all"))
    options = {"backend": backend, "tiles": TileConfig(16, 16)}

    def with_stats(*args, **kwargs):
        out, lse, stats = flash_attention(*args, return_stats=True, **kwargs)
        assert stats.max_logit.shape == stats.entropy.shape == lse.shape
        return out, lse

    for a, b in zip(run(inputs, **options), run(inputs, with_stats, **options), strict=True):
        assert torch.equal(a, b)
    assert isinstance(flash_attention(*inputs[:3], **inputs.kwargs, **options), torch.Tensor)
    ready = prepare(*inputs[:3], **inputs.kwargs, **options)
    *_, row_stats, tile_stats = torch.ops.flashmod.attention_forward(*ready[:3], *ready.call)
    assert row_stats.numel() == tile_stats.numel() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_of_nothing(backend):
    x = torch.randn(4, 2, 8)
    for lengths in ([], [0, 0]):
        _, stats = flash_attention(
            x, x, x, cu_seqlens_q=cu_seqlens(lengths), return_stats=True, backend=backend
        )
        assert len(stats.sequences) == len(lengths)
        assert stats.rescales == stats.tiles_processed == stats.tiles_skipped == 0
        assert (stats.max_logit == -torch.inf).all() and (stats.entropy == 0).all()


def test_the_tiles_of_a_backend_are_named():
    """Those of its table, when the caller asks for none."""
    x = torch.randn(1, 5, 1, 8)
    for backend in BACKENDS:
        _, stats = flash_attention(x, x, x, return_stats=True, backend=backend)
        assert isinstance(stats.tiles, TileConfig) and min(stats.tiles) >= 1


def test_statistics_are_refused_in_a_compiled_graph():
    x = torch.randn(1, 5, 1, 8)

    def attend(x):
        return flash_attention(x, x, x, return_stats=True)[0]

    with pytest.raises(torch._dynamo.exc.Unsupported, match="return_stats cannot be traced"):
        torch.compile(attend, backend="eager", fullgraph=True)(x)
    ready = prepare(x, x, x, return_stats=True)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t) for t in ready[:3]]
        with pytest.raises(NotImplementedError, match="return_stats: the number of tiles"):
            torch.ops.flashmod.attention_forward(*fakes, *ready.call)
