"""``torch.func``: vmap and what is built on it give what a Python loop over examples gives."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves

from flashmod import FlashMultiheadAttention, Mask, TileConfig, flash_attention

# torch's own forward-mode machinery.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

BACKENDS = ("tiled", "triton")
V, B, S, S_KV, H, D = 3, 2, 5, 7, 2, 4  # examples, then the axes of one
TILES = TileConfig(16, 16)


def same_label(batch, head, q_idx, kv_idx, q_label, kv_label):
    return (q_label == kv_label) | (q_idx == kv_idx)


def striped(batch, head, q_idx, kv_idx, period):
    return (q_idx + kv_idx + head + batch) % period != 0


def qkv(*lead):
    shapes = ((S, H), (S_KV, 1), (S_KV, 1))
    return tuple(torch.randn(*lead, B, *shape, D) for shape in shapes)


def values(q, k, v, **kwargs):
    out, lse = flash_attention(q, k, v, return_lse=True, tiles=TILES, **kwargs)
    return out, lse.masked_fill(lse == -torch.inf, 0.0)


def loss(*args, **kwargs):
    out, lse = values(*args, **kwargs)
    return out.sin().sum() + lse.cos().sum()


def looped(fn, dims, inputs):
    """``vmap`` as a loop: the leaves of ``fn``'s results, stacked."""
    examples = [
        fn(*(x if dim is None else x.select(dim, n) for x, dim in zip(inputs, dims, strict=True)))
        for n in range(V)
    ]
    return [torch.stack(leaves) for leaves in zip(*map(tree_leaves, examples), strict=True)]


def assert_maps(fn, inputs, dims=None):
    dims = dims or (0,) * len(inputs)
    got, wanted = tree_leaves(vmap(fn, in_dims=dims)(*inputs)), looped(fn, dims, inputs)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


Q_NUMBERS = torch.arange(V * B * S).view(V, B, S)
KEY_NUMBERS = torch.arange(V * B * S_KV).view(V, B, S_KV)
# How a call is made, and the tensors beside q, k and v that are mapped over.
CALLS = {
    "plain": (lambda: {}, ()),
    "causal_dropout": (
        lambda: {"mask": Mask(causal=True), "dropout_p": 0.4, "dropout_seed": 5},
        (),
    ),
    "own_ids": (
        lambda i: {"dropout_p": 0.4, "dropout_seed": 5, "sequence_ids": i},
        (torch.arange(V * B).view(V, B),),
    ),
    "rates": (lambda p: {"dropout_p": p, "dropout_seed": 5}, (Q_NUMBERS / (V * B * S - 1),)),
    "mask_fn": (lambda: {"mask": Mask(fn=striped, fn_args=(3,))}, ()),
    "labels": (
        lambda a, b: {"mask": Mask(fn=same_label, labels=(a, b))},
        (Q_NUMBERS % 3, KEY_NUMBERS % 2),
    ),
    "key_padding": (lambda m: {"attn_mask": m}, ((KEY_NUMBERS % 5 > 1)[:, :, None, None],)),
    "shared_padding": (lambda: {"attn_mask": (KEY_NUMBERS[0] % 5 > 1)[:, None, None]}, ()),
    "one_padding": (lambda: {"attn_mask": torch.arange(S_KV) > 1}, ()),
    "lengths": (
        lambda a, b: {"lengths_q": a, "lengths_k": b, "mask": Mask(causal=True)},
        (torch.tensor([[5, 0], [2, 3], [1, 5]]), torch.tensor([[7, 0], [2, 7], [0, 5]])),
    ),
    "limits": (
        lambda a, b: {"mask": Mask(causal=a, window=(b, None), prefix_len=b)},
        (torch.tensor([[1, 0], [1, 1], [0, 0]]).bool(), torch.arange(V * B).view(V, B)),
    ),
    "slopes": (
        lambda x: {"alibi_slopes": x, "softcap": 2.0, "softmax_scale": 0.7},
        (torch.linspace(0, 1, V * B * H).view(V, B, H),),
    ),
    "shared_slopes": (lambda: {"alibi_slopes": torch.tensor([0.5, 0.1])}, ()),
}


# Folding lies above the backends: a few calls through the interpreter show that kernels agree.
@pytest.mark.parametrize(
    "name, backend", [*((name, "tiled") for name in CALLS), ("rates", "triton")]
)
def test_vmap_and_per_example_gradients(name, backend):
    build, extra = CALLS[name]

    def call(fn):
        return lambda q, k, v, *x: fn(q, k, v, backend=backend, **build(*x))

    inputs = (*qkv(V), *extra)
    assert_maps(call(values), inputs)
    assert_maps(grad(call(loss), argnums=(0, 1, 2)), inputs)


@pytest.mark.parametrize("q_dim, k_dim", [(None, 0), (0, None), (2, 3), (-1, 0)])
def test_what_is_mapped_and_along_which_axis(q_dim, k_dim):
    q, k, v = qkv(V)
    q = q[0] if q_dim is None else q.movedim(0, q_dim)
    k, v = (x[0] if k_dim is None else x.movedim(0, k_dim) for x in (k, v))
    dims = (q_dim, k_dim, k_dim)
    assert_maps(values, (q, k, v), dims)
    assert_maps(grad(loss, argnums=(0, 1, 2)), (q, k, v), dims)


BIASES = {"per_head": (1, H, S, S_KV), "per_sequence": (B, 1, 1, S_KV), "rows": (S, 1)}


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_of_a_bias_and_a_sink(name, shared):
    """Of every example, also where all share one bias; and of the whole, grad over vmap."""

    def terms_loss(q, k, v, bias, sink):
        return loss(q, k, v, attn_mask=bias, learnable_sink=sink)

    lead = () if shared else (V,)
    inputs = (*qkv(V), torch.randn(*lead, *BIASES[name]), torch.randn(*lead, H))
    dims = (0, 0, 0, *(None if shared else 0,) * 2)
    every = tuple(range(5))
    assert_maps(grad(terms_loss, argnums=every), inputs, dims)
    got = grad(lambda *x: vmap(terms_loss, in_dims=dims)(*x).sum(), argnums=every)(*inputs)
    wanted = grad(lambda *x: looped(terms_loss, dims, x)[0].sum(), argnums=every)(*inputs)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


def test_gradient_of_an_expanded_bias_inside_vmap():
    """Every entry has a gradient of its own, although vmap hides that one is wanted."""
    bias, inputs = torch.zeros(1, S_KV).expand(S, S_KV), qkv(V)

    def mapped(bias):
        return vmap(lambda *x: loss(*x, attn_mask=bias))(*inputs).sum()

    def one_by_one(bias):
        return looped(lambda *x: loss(*x, attn_mask=bias), (0, 0, 0), inputs)[0].sum()

    torch.testing.assert_close(grad(mapped)(bias), grad(one_by_one)(bias))


def test_vmap_of_vmap():
    q, k, v = qkv(V, 2)

    def call(*x):
        return values(*x, mask=Mask(fn=striped, fn_args=(3,)))[0]

    got = vmap(vmap(call), in_dims=(0, 0, 0))(q, k, v)
    wanted = torch.stack([looped_rows(call, *x) for x in zip(q, k, v, strict=True)])
    torch.testing.assert_close(got, wanted)
    outer = vmap(vmap(call, in_dims=(0, None, None)), in_dims=(None, 0, 0))(q[0], k[:, 0], v[:, 0])
    assert outer.shape == (V, 2, B, S, H, D)
    torch.testing.assert_close(outer[1, 1], call(q[0, 1], k[1, 0], v[1, 0]))


def looped_rows(call, *inputs):
    return torch.stack([call(*row) for row in zip(*inputs, strict=True)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_jacobians(backend):
    """jacrev maps the backward pass alone: the call itself is shared."""
    bias, sink = torch.randn(H, S, S_KV), torch.randn(H)
    k, v = qkv()[1:]

    def out(q, bias, sink):
        x = flash_attention(
            q, k, v, attn_mask=bias, learnable_sink=sink, backend=backend, tiles=TILES
        )
        return x[..., 0].sum((0, 2))

    inputs = (qkv()[0], bias, sink)
    got = jacrev(out, argnums=(0, 1, 2))(*inputs)
    wanted = torch.autograd.functional.jacobian(out, inputs)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_examples(backend):
    """Each with sequences of its own, empty ones and slack too."""
    q, k, v = torch.randn(V, 5, H, D), torch.randn(V, 7, 1, D), torch.randn(V, 7, 1, D)
    cu_q = torch.tensor([[0, 3, 5, 5], [0, 0, 2, 4], [0, 1, 2, 5]]).int()
    cu_k = torch.tensor([[0, 3, 5, 7], [0, 1, 2, 5], [0, 1, 2, 2]]).int()
    bias, sink = torch.randn(1, H, 4, 4), torch.randn(H)

    def packed_loss(q, k, v, bias, sink, cu_q, cu_k):
        return loss(
            q, k, v, attn_mask=bias, learnable_sink=sink, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
            dropout_p=0.3, dropout_seed=1, backend=backend,
        )  # fmt: skip

    dims = (0, 0, 0, None, None, 0, 0)
    gradients = grad(packed_loss, argnums=(0, 1, 2, 3, 4))
    assert_maps(gradients, (q, k, v, bias, sink, cu_q, cu_k), dims)


def test_randomness_of_a_drawn_seed_is_torchs():
    q, k, v = (x.expand(V, *x.shape) for x in qkv())

    def call(*x):
        return flash_attention(*x, dropout_p=0.5)

    out = vmap(call, randomness="same")(q, k, v)
    assert torch.equal(out[0], out[1]) and (out[0] == 0).sum() < out[0].numel()
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(call)(q, k, v)
    with pytest.raises(ValueError, match="sequence_ids"):
        vmap(call, randomness="different")(q, k, v)
    ids = torch.arange(V * B).view(V, B)

    def with_ids(q, k, v, ids):
        return flash_attention(q, k, v, dropout_p=0.5, sequence_ids=ids)

    apart = vmap(with_ids, randomness="same")(q, k, v, ids)
    assert not torch.equal(apart[0], apart[1])


def test_statistics_are_refused():
    with pytest.raises(NotImplementedError, match="outside vmap"):
        vmap(lambda *x: flash_attention(*x, return_stats=True))(*qkv(V))


@pytest.mark.parametrize("name", ["alibi_slopes", "dropout_p"])
def test_what_has_no_gradient_says_so_inside_vmap(name):
    x = torch.rand(V, H) if name == "alibi_slopes" else torch.rand(V, B, S)
    q, k, v = qkv(V)

    def call(x, q, k, v):
        return loss(q, k, v, **{name: x}, dropout_seed=1)

    for gradient in (
        lambda: vmap(grad(call))(x, q, k, v),
        lambda: grad(lambda x: vmap(call)(x, q, k, v).sum())(x),
        lambda: grad(lambda x: vmap(call, in_dims=(None, 0, 0, 0))(x, q, k, v).sum())(x[0]),
    ):
        with pytest.raises(ValueError, match=f"{name} has no gradient"):
            gradient()


def test_second_derivatives_raise_inside_transforms_too():
    q, k, v = qkv(V)
    for second in (
        lambda: vmap(grad(lambda *x: grad(loss)(*x).sum()))(q, k, v),
        lambda: grad(lambda q: vmap(grad(loss))(q, k, v).sum())(q),
        lambda: jacrev(grad(loss))(q[0], k[0], v[0]),
        lambda: vmap(jacrev(grad(loss)))(q, k, v),
    ):
        with pytest.raises(RuntimeError, match="no double backward"):
            second()


def test_forward_mode_raises_inside_transforms_too():
    q, k, v = qkv(V)
    for forward_mode in (
        lambda: jvp(lambda q: vmap(values)(q, k, v)[0], (q,), (q,)),
        lambda: vmap(lambda q, k, v: jvp(lambda q: values(q, k, v)[0], (q,), (q,)))(q, k, v),
        lambda: jacfwd(lambda q: values(q, k[0], v[0])[0])(q[0]),
        lambda: torch.func.hessian(lambda q: loss(q, k[0], v[0]))(q[0]),
    ):
        with pytest.raises((NotImplementedError, RuntimeError), match="forward"):
            forward_mode()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = FlashMultiheadAttention(
            8, 2, batch_first=True, mask=Mask(causal=True), num_kv_heads=1
        )
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x):
        out, _ = self.attention(x, need_weights=False)
        return self.head(torch.nn.functional.gelu(out))


def test_per_example_gradients_of_a_model():
    """As differential privacy and influence functions take them."""
    model, x, y = Model(), torch.randn(V, 6, 8), torch.randint(3, (V, 6))
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def example_loss(parameters, x, y):
        logits = functional_call(model, parameters, (x[None],))
        return torch.nn.functional.cross_entropy(logits[0], y)

    got = vmap(grad(example_loss), in_dims=(None, 0, 0))(parameters, x, y)
    for n in range(V):
        one = copy.deepcopy(model)
        torch.nn.functional.cross_entropy(one(x[n][None])[0], y[n]).backward()
        for name, p in one.named_parameters():
            torch.testing.assert_close(got[name][n], p.grad, rtol=1e-5, atol=1e-6)


def test_an_ensemble_of_models():
    models, x = [Model() for _ in range(V)], torch.randn(2, 6, 8)
    parameters, buffers = torch.func.stack_module_state(models)

    def run(parameters, buffers, x):
        return functional_call(models[0], (parameters, buffers), (x,))

    got = vmap(run, in_dims=(0, 0, None))(parameters, buffers, x)
    torch.testing.assert_close(got, torch.stack([model(x) for model in models]))
