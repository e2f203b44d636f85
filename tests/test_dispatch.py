"""Which backend runs a call, and why the others do not."""

import sys
from types import SimpleNamespace

import pytest
import torch

import flashmod
from flashmod import FlashMultiheadAttention, Mask, UnsupportedAttention, dispatch, flash_attention
from flashmod.functional import prepare
from flashmod.spec import Forward

X = [torch.randn(1, 5, 2, 8) for _ in range(3)]


def fake(reasons, ran):
    """A backend that notes its calls and answers with zeros."""

    def forward(q, k, v, call):
        ran.append(call)
        saved = torch.zeros(q.shape[0], q.shape[2], 2, q.shape[1])
        return Forward(q.new_zeros(q.shape), saved[:, :, 0].clone(), saved)

    return SimpleNamespace(unsupported_reasons=lambda q, k, v, call: list(reasons), forward=forward)


@pytest.fixture
def backends(monkeypatch):
    """Replace both backends: backends(triton=[...reasons], tiled=[...]) -> who ran."""

    def install(**reasons):
        ran = {name: [] for name in reasons}
        modules = {name: fake(reasons[name], ran[name]) for name in reasons}
        monkeypatch.setattr(dispatch, "load", modules.__getitem__)
        return ran

    return install


def test_a_cpu_tensor_takes_the_torch_tiles(backends):
    ran = backends(triton=[], tiled=[])
    flash_attention(*X)
    assert (len(ran["triton"]), len(ran["tiled"])) == (0, 1)
    flash_attention(*X, backend="triton")
    assert (len(ran["triton"]), len(ran["tiled"])) == (1, 1)


@pytest.mark.parametrize("name", ["triton", "tiled"])
def test_a_named_backend_never_falls_back(backends, name):
    ran = backends(**{"triton": [], "tiled": [], name: ["too wide", "too deep"]})
    with pytest.raises(UnsupportedAttention, match=f"{name}: too wide; too deep") as error:
        flash_attention(*X, backend=name)
    assert len(error.value.args[0].splitlines()) == 2  # the other backend was not asked
    assert ran == {"triton": [], "tiled": []}


def test_when_none_fits_every_reason_is_listed(backends):
    backends(triton=[], tiled=["too wide", "too deep"])
    with pytest.raises(NotImplementedError) as error:
        flash_attention(*X)
    message = str(error.value)
    assert "no attention backend can run this call" in message
    assert "tiled: too wide; too deep" in message
    assert "triton: a CPU tensor takes the torch tiles unless backend='triton'" in message


def test_other_devices_prefer_triton(backends):
    backends(triton=["no"], tiled=[])
    q = torch.empty(1, 5, 2, 8, device="meta")
    call = prepare(*X).call
    assert dispatch.refusals(q, q, q, call) == {"triton": ["no"], "tiled": []}
    backends(triton=[], tiled=[])
    assert dispatch.choose_backend(q, q, q, call) is dispatch.load("triton")


@pytest.mark.parametrize("name", ["cuda", "Triton", "reference", "triton.launch"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(
        ValueError, match=rf"backend must be one of triton, tiled or None, got '{name}'"
    ):
        flash_attention(*X, backend=name)
    with pytest.raises(ValueError, match="triton, tiled"):
        FlashMultiheadAttention(16, 2, backend=name)(torch.randn(3, 1, 16))
    with pytest.raises(ValueError, match="triton, tiled"):
        flashmod.explain(*X, backend=name)


def test_explain_names_the_choice_and_the_refusals():
    text = flashmod.explain(*X, mask=Mask(causal=True), dropout_p=0.1)
    first, second = text.splitlines()
    assert first == "backend: tiled"
    assert second.startswith("  not triton: a CPU tensor takes the torch tiles")
    assert flashmod.explain(*X, backend="triton") == "backend: triton"
    assert flashmod.explain(*X, backend="tiled") == "backend: tiled"


def test_explain_draws_no_seed():
    torch.manual_seed(0)
    flashmod.explain(*X, dropout_p=0.1)
    drawn = torch.rand(())
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(()))


def test_explain_of_a_call_that_nobody_runs():
    inputs = [torch.randn(1, 3, 1, 300) for _ in range(3)]
    text = flashmod.explain(*inputs, backend="triton")
    assert text.startswith("backend: none\n  not triton: ") and "300" in text
    with pytest.raises(UnsupportedAttention, match="300"):
        flash_attention(*inputs, backend="triton")


def test_explain_refuses_what_the_call_refuses():
    with pytest.raises(ValueError, match="head dimension"):
        flashmod.explain(X[0], X[1][..., :4], X[2])


def test_a_missing_triton_is_a_reason(monkeypatch):
    monkeypatch.setattr(dispatch, "load", dispatch.load)
    for name in [n for n in sys.modules if n.startswith("flashmod.backends.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "cannot be imported" in flashmod.explain(*X, backend="triton")
    with pytest.raises(UnsupportedAttention, match=r"triton: cannot be imported: .*triton"):
        flash_attention(*X, backend="triton")
    assert flash_attention(*X).shape == X[0].shape


EVERYTHING = {
    "mask": Mask(causal=[True]),
    "attn_mask": torch.zeros(5, 5),
    "softcap": 3.0,
    "alibi_slopes": torch.ones(2),
    "learnable_sink": torch.zeros(2),
    "dropout_p": torch.full((1, 5), 0.5),
}


@pytest.mark.parametrize("name", dispatch.NAMES)
def test_both_backends_run_everything(name):
    ready = prepare(*X, return_stats=True, backend=name, **EVERYTHING)
    backend = dispatch.load(name)
    assert backend.unsupported_reasons(*ready) == []
    assert min(backend.forward_tiles(ready.q, ready.v, ready.call)) >= 1
    assert flashmod.explain(*X, backend=name, **EVERYTHING) == f"backend: {name}"


def test_explain_takes_every_argument_of_the_call():
    text = flashmod.explain(*X, return_lse=True, return_stats=True, **EVERYTHING)
    assert text.splitlines()[0] == "backend: tiled"
