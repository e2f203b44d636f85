"""Padded dense attention and torch SDPA against float64 attention of one sequence at a time."""

import pytest
import torch
from cases import Case, build, covering_cases, expected, reference_attention, run

from flashmod import Mask, baselines
from flashmod.masks import mask_fn

CU_Q = torch.tensor([0, 3, 3, 10, 17, 17], dtype=torch.int32)
CU_K = torch.tensor([0, 5, 7, 7, 18, 18], dtype=torch.int32)
LENGTHS_Q, LENGTHS_K = torch.tensor([7, 0, 3, 5, 7]), torch.tensor([7, 2, 0, 7, 4])
BATCH, ROWS = 5, 7


@mask_fn
def every_other_key(batch, head, q_idx, kv_idx):
    return (kv_idx + head + batch) % 2 == 0


MASKS = {
    "none": {},
    "causal": {"causal": True},
    "causal_top_left": {"causal": True, "align": "top_left"},
    "window": {"window": (2, 1)},
    "window_top_left": {"window": (1, 2), "align": "top_left"},
    "prefix": {"causal": True, "prefix_len": 2},
    "prefix_window": {"window": (1, 0), "prefix_len": 3},
    "mixed": {"causal": [True, False, True, False, True]},
    "function": {"causal": True, "fn": every_other_key},
}
LAYOUTS = ("dense", "longer_keys", "lengths", "padding_mask", "packed", "packed_cross")


def visible(mask, n, heads, q_len, kv_len):
    """(H, q_len, kv_len) bool, pair by pair, straight from the definition of a mask."""
    causal = mask.get("causal", False)
    causal = causal if isinstance(causal, bool) else causal[n]
    left, right = mask.get("window", (None, None))
    right = 0 if causal else right
    shift = 0 if mask.get("align") == "top_left" else kv_len - q_len
    seen = torch.zeros(heads, q_len, kv_len, dtype=torch.bool)
    for h in range(heads):
        for i in range(q_len):
            for j in range(kv_len):
                near = left is None or j >= i + shift - left
                past = right is None or j <= i + shift + right or j < mask.get("prefix_len", 0)
                agreed = "fn" not in mask or (j + h + n) % 2 == 0
                seen[h, i, j] = near and past and agreed
    return seen


def make(layout, heads, kv_heads, dtype=torch.float64):
    """q, k, v, the layout's arguments, and for each sequence its q rows, k rows and key mask."""
    if layout.startswith("packed"):
        cu_k = CU_K if layout == "packed_cross" else CU_Q
        q, k = torch.randn(20, heads, 8), torch.randn(20, kv_heads, 8)
        kwargs = {"cu_seqlens_q": CU_Q}
        if layout == "packed_cross":
            kwargs["cu_seqlens_k"] = CU_K
        parts = [
            (slice(*CU_Q[n : n + 2].tolist()), slice(*cu_k[n : n + 2].tolist()), None)
            for n in range(BATCH)
        ]
    else:
        kv_rows = ROWS + 4 if layout == "longer_keys" else ROWS
        q, k = torch.randn(BATCH, ROWS, heads, 8), torch.randn(BATCH, kv_rows, kv_heads, 8)
        kwargs, keys = {}, [None] * BATCH
        lengths_q, lengths_k = [ROWS] * BATCH, [kv_rows] * BATCH
        if layout == "lengths":
            kwargs = {"lengths_q": LENGTHS_Q, "lengths_k": LENGTHS_K}
            lengths_q, lengths_k = LENGTHS_Q.tolist(), LENGTHS_K.tolist()
        if layout == "padding_mask":
            keep = torch.rand(BATCH, 1, 1, kv_rows) > 0.4
            keep[2] = False
            kwargs, keys = {"attn_mask": keep}, list(keep[:, 0, 0])
        parts = [
            ((n, slice(lengths_q[n])), (n, slice(lengths_k[n])), keys[n]) for n in range(BATCH)
        ]
    q, k = q.to(dtype), k.to(dtype)
    return q, k, torch.randn_like(k), kwargs, parts


def truth(q, k, v, mask, parts, scale=None):
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for n, (q_rows, k_rows, keys) in enumerate(parts):
        q_n = q[q_rows].transpose(0, 1)
        group = q.shape[-2] // k.shape[-2]
        k_n, v_n = (x[k_rows].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        seen = visible(mask, n, q.shape[-2], q_n.shape[1], k_n.shape[1])
        seen = seen if keys is None else seen & keys
        scores = (q_n @ k_n.mT * scale).masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0) if k_n.shape[1] else scores
        out[q_rows] = (weights @ v_n).transpose(0, 1)
        lse[q_rows] = scores.logsumexp(-1).transpose(0, 1)
    return out, lse.transpose(-1, -2)


def results(fn, q, k, v, grad, **kwargs):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = fn(*leaves, **kwargs)
    return out, *torch.autograd.grad(out, leaves, grad)


def true_results(q, k, v, grad, mask, parts):
    """As :func:`results`, each query row that sees a key computed and differentiated alone."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, grads = torch.zeros_like(q), [torch.zeros_like(x) for x in leaves]
    for n, (q_rows, k_rows, keys) in enumerate(parts):
        seen = visible(mask, n, q.shape[-2], len(q[q_rows]), len(k[k_rows]))
        seen = seen if keys is None else seen & keys
        for head, i in seen.any(-1).nonzero().tolist():
            kv_head = head // (q.shape[-2] // k.shape[-2])
            q_i = leaves[0][q_rows][i, head]
            k_i, v_i = (x[k_rows][seen[head, i], kv_head] for x in leaves[1:])
            row = (k_i @ q_i * q.shape[-1] ** -0.5).softmax(0) @ v_i
            out[q_rows][i, head] = row.detach()
            row_grads = torch.autograd.grad(row, leaves, grad[q_rows][i, head])
            for total, row_grad in zip(grads, row_grads, strict=True):
                total += row_grad
    return out, *grads


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_match_one_sequence_at_a_time(layout, mask, heads):
    q, k, v, kwargs, parts = make(layout, *heads)
    expected, expected_lse = truth(q, k, v, MASKS[mask], parts)
    out, lse = baselines.dense(q, k, v, mask=Mask(**MASKS[mask]), return_lse=True, **kwargs)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    torch.testing.assert_close(
        baselines.sdpa(q, k, v, mask=Mask(**MASKS[mask]), **kwargs), expected
    )


@pytest.mark.parametrize("mask", ["none", "causal", "prefix_window", "function"])
@pytest.mark.parametrize("layout", ["longer_keys", "lengths", "padding_mask", "packed_cross"])
@pytest.mark.parametrize("fn", [baselines.dense, baselines.sdpa])
def test_gradients_match_one_row_at_a_time(fn, layout, mask):
    q, k, v, kwargs, parts = make(layout, 2, 1)
    grad = torch.randn_like(q)
    expected = true_results(q, k, v, grad, MASKS[mask], parts)
    actual = results(fn, q, k, v, grad, mask=Mask(**MASKS[mask]), **kwargs)
    for mine, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("case", covering_cases(), ids=lambda case: case.id)
def test_dense_equals_the_definition_on_the_table(case):
    """Every layout, mask, score term and dropout rate, gradients of bias and sink included."""
    same(run(build(case).promoted(), baselines.dense), expected(case))


def same(results, truth, names=None):
    for name in names or truth._fields:
        mine, right = getattr(results, name), getattr(truth, name)
        assert (mine is None) == (right is None)
        if mine is not None:
            torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)


def within_torchs_sdpa(case):
    scores = case.score_spec
    return case.dropout_p == 0 and not scores.softcap and not scores.sink


def sdpa_without_lse(q, k, v, *, return_lse, **kwargs):
    """With a stand-in of no gradient, so that ``cases.run`` can be used."""
    del return_lse, kwargs["dropout_seed"]
    lse = q.new_zeros(*q.shape[:-3], q.shape[-2], q.shape[-3])
    return baselines.sdpa(q, k, v, **kwargs), lse + 0 * q.sum().nan_to_num()


def sdpa_cases():
    """Every layout with every score that SDPA has; masks and groups rotate."""
    cases = [case for case in covering_cases() if within_torchs_sdpa(case)]
    rows = [(layout, scores) for layout in ("dense", "cross", "padded", "holes", "slack")
            for scores in ("alibi", "alibi_sequences", "bias", "bias_of_keys", "bias_of_rows",
                           "bias_for_batch", "bias_hides", "bool")]  # fmt: skip
    masks, groups = ("full", "causal", "mixed", "documents"), ("mha", "gqa")
    for i, (layout, scores) in enumerate(rows):
        cases.append(Case(layout, masks[i % 4 - i // 8 % 4], 0.0, groups[i % 2], scores))
    return list(dict.fromkeys(cases))


@pytest.mark.parametrize("case", sdpa_cases(), ids=lambda case: case.id)
def test_sdpa_equals_the_definition_where_it_can(case):
    inputs = build(case).promoted()
    inputs = inputs._replace(grad_lse=torch.zeros_like(inputs.grad_lse))
    truth = run(inputs, reference_attention)
    names = [name for name in truth._fields if name != "lse"]
    same(run(inputs, sdpa_without_lse), truth, names)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dense_is_dense_torch_in_the_dtype_of_q(dtype):
    """Bit for bit what a user would write, so that a half type's own error is what it measures."""
    q, k, v = torch.randn(3, 2, 9, 2, 8).to(dtype)
    bias, sink = torch.randn(2, 2, 9, 9), torch.randn(2)
    options = {"softcap": 2.0, "attn_mask": bias, "learnable_sink": sink}
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = baselines.dense(*leaves, **options)
    grad = torch.randn_like(q)
    grads = torch.autograd.grad(out, leaves, grad)

    theirs = [x.clone().requires_grad_() for x in (q, k, v)]
    q_h, k_h, v_h = (x.transpose(1, 2) for x in theirs)
    scores = 2.0 * torch.tanh((q_h * 8**-0.5) @ k_h.mT / 2.0) + bias.to(dtype)
    column = sink.to(dtype)[:, None, None].expand(2, 2, 9, 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    right = (weights @ v_h).transpose(1, 2)
    assert out.dtype == dtype and torch.equal(out, right)
    for mine, other in zip(grads, torch.autograd.grad(right, theirs, grad), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6 if dtype == torch.float32 else 0)


@pytest.mark.parametrize("fn", [baselines.dense, baselines.sdpa])
def test_a_bias_beyond_a_sequence_never_reaches_a_result(fn):
    """It goes by positions and covers the longest sequence, and more here."""
    q, k, v, kwargs, _ = make("packed_cross", 2, 1)
    bias = torch.randn(BATCH, 1, 9, 13, dtype=torch.float64)
    grad = torch.randn_like(q)

    def run_with(fill):
        filled = torch.full_like(bias, fill)
        for n in range(BATCH):
            rows, keys = (int(cu[n + 1] - cu[n]) for cu in (CU_Q, CU_K))
            filled[n, :, :rows, :keys] = bias[n, :, :rows, :keys]
        filled.requires_grad_()
        out, *grads = results(
            lambda *qkv, **options: fn(*qkv, attn_mask=filled, **options), q, k, v, grad, **kwargs
        )
        out = fn(q, k, v, attn_mask=filled, **kwargs)
        return [out.detach(), *grads, torch.autograd.grad(out, filled, grad)[0]]

    for mine, clean in zip(run_with(torch.nan), run_with(0.0), strict=True):
        assert torch.equal(mine, clean)


@pytest.mark.parametrize("fn", [baselines.dense, baselines.sdpa])
def test_softmax_scale(fn):
    q, k, v, kwargs, parts = make("packed", 2, 2)
    expected, _ = truth(q, k, v, {}, parts, scale=0.7)
    torch.testing.assert_close(fn(q, k, v, softmax_scale=0.7, **kwargs), expected)


@pytest.mark.parametrize("fn", [baselines.dense, baselines.sdpa])
@pytest.mark.parametrize("rows", [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_attend_gives_zeros_with_a_graph(fn, rows):
    q, k = torch.randn(2, rows[0], 2, 4), torch.randn(2, rows[1], 2, 4)
    out, dq, dk, dv = results(fn, q, k, k, torch.ones_like(q))
    for x in (out, dq, dk, dv):
        assert not x.any()


@pytest.mark.parametrize("fn", [baselines.dense, baselines.sdpa])
def test_slack_rows_never_reach_a_result(fn):
    q, k, v, kwargs, parts = make("packed", 2, 2)
    expected, _ = truth(q, k, v, {}, parts)
    for x in (q, k, v):
        x[17:] = torch.nan
    out, dq, dk, dv = results(fn, q, k, v, torch.ones_like(q), **kwargs)
    torch.testing.assert_close(out, expected)
    for x in (dq, dk, dv):
        assert x.isfinite().all() and not x[17:].any()


@pytest.mark.parametrize("fn", [baselines.dense, baselines.sdpa])
def test_padding_keys_never_reach_a_result(fn):
    q, k, v, kwargs, parts = make("padding_mask", 2, 2)
    expected, _ = truth(q, k, v, {}, parts)
    hidden = ~kwargs["attn_mask"][:, 0, 0]
    k[hidden], v[hidden] = torch.nan, torch.nan
    out, dq, dk, dv = results(fn, q, k, v, torch.ones_like(q), **kwargs)
    torch.testing.assert_close(out, expected)
    for x in (dq, dk, dv):
        assert x.isfinite().all()
    assert not dk[hidden].any() and not dv[hidden].any()


def test_dense_dropout_drops_weights_at_the_stated_rate():
    v = torch.eye(64)[None, :, None]  # the output is the weight matrix itself
    q = torch.zeros(1, 64, 1, 8)
    weights = baselines.dense(q, q, v, dropout_p=0.25, dropout_seed=7)[0, :, 0] * 64
    kept = weights > 0
    torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1 / 0.75))
    assert abs(kept.double().mean().item() - 0.75) < 0.03
    again = baselines.dense(q, q, v, dropout_p=0.25, dropout_seed=7)[0, :, 0] * 64
    assert torch.equal(weights, again)
    other = baselines.dense(q, q, v, dropout_p=0.25, dropout_seed=8)[0, :, 0] * 64
    assert not torch.equal(weights, other)
    assert not baselines.dense(q, q, v, dropout_p=1.0).any()


def test_dense_dropout_does_not_depend_on_the_layout():
    q, k, v, kwargs, _ = make("packed", 2, 2)
    options = {"dropout_p": 0.4, "dropout_seed": 3}
    packed = baselines.dense(q, k, v, **options, **kwargs)
    for n in range(BATCH):
        rows = slice(*CU_Q[n : n + 2].tolist())
        alone = [x[None, rows] for x in (q, k, v)]
        ids = torch.tensor([n], dtype=torch.int32)
        out = baselines.dense(*alone, sequence_ids=ids, **options)
        torch.testing.assert_close(out[0], packed[rows])


def test_sdpa_dropout_is_torchs_own():
    q = torch.zeros(1, 64, 1, 8)
    v = torch.ones(1, 64, 1, 8)
    torch.manual_seed(1)
    first = baselines.sdpa(q, q, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, baselines.sdpa(q, q, v, dropout_p=0.5))
    assert not torch.equal(first, torch.ones_like(first))


@pytest.mark.parametrize(
    ("layout", "mask", "causal", "masked"),
    [
        ("dense", "none", False, False),
        ("dense", "causal", True, False),
        ("packed", "causal", True, False),
        ("longer_keys", "causal_top_left", True, False),
        ("longer_keys", "causal", False, True),
        ("packed", "none", False, True),
        ("lengths", "causal", False, True),
        ("dense", "window", False, True),
    ],
)
def test_sdpa_uses_is_causal_only_where_it_means_the_same(
    monkeypatch, layout, mask, causal, masked
):
    q, k, v, kwargs, _ = make(layout, 2, 2)
    seen = {}
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **options):
        seen.update(options)
        return original(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    baselines.sdpa(q, k, v, mask=Mask(**MASKS[mask]), **kwargs)
    assert seen.get("is_causal", False) is causal
    assert (seen.get("attn_mask") is not None) is masked


@pytest.mark.parametrize(
    ("fn", "option", "message"),
    [
        (baselines.dense, {"backend": "tiled"}, "backend"),
        (baselines.sdpa, {"tiles": (16, 16)}, "tiles"),
        (baselines.sdpa, {"dropout_p": 0.5, "dropout_seed": 1}, "dropout_seed"),
        (baselines.sdpa, {"return_lse": True}, "return_lse"),
        (baselines.sdpa, {"return_stats": True}, "sdpa has no tiles to count"),
        (baselines.dense, {"return_stats": True}, "dense has no tiles to count"),
        (baselines.sdpa, {"softcap": 3.0}, "softcap=3.0: torch's SDPA cannot cap scores"),
        (baselines.sdpa, {"learnable_sink": torch.zeros(2)}, "SDPA has no sink"),
        (baselines.sdpa, {"dropout_p": torch.zeros(1, 4)}, "one rate per token"),
        (baselines.dense, {"cu_seqlens_q": torch.tensor([0, 9], dtype=torch.int32)}, "9"),
    ],
)
def test_nothing_is_ignored_in_silence(fn, option, message):
    q = torch.randn(1, 4, 2, 8)
    q = q[0] if "cu_seqlens_q" in option else q
    with pytest.raises(ValueError, match=message):
        fn(q, q, q, **option)


def test_none_is_accepted_for_what_only_flash_reads():
    q = torch.randn(1, 4, 2, 8)
    assert baselines.dense(q, q, q, backend=None, tiles=None).shape == q.shape
    absent = {"dropout_seed": None, "softcap": 0.0, "learnable_sink": None, "return_stats": False}
    assert baselines.sdpa(q, q, q, backend=None, tiles=None, **absent).shape == q.shape
