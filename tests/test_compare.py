"""A model before and after the swap: the numbers, and that nothing of the model is touched."""

import json
import random
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from small_models import SMALL, E, padding
from torch import nn
from torch.nn import functional as F

import flashmod
from flashmod import FlashMultiheadAttention
from flashmod.comparison import compare
from flashmod.comparison.batch import padding_of
from flashmod.comparison.dropout import switch_off
from flashmod.experiments.compare import main
from flashmod.numerics import error

QUICK = {"repeats": 1}


def small(name, dropout=0.0):
    return SMALL[name]() if name == "clip_text" or not dropout else SMALL[name](dropout)


def raw(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def everything(model, versions=True):
    """All that a comparison could disturb, in a form that compares by value."""
    found = [raw(torch.get_rng_state()), random.getstate(), repr(np.random.get_state())]
    for name, module in model.named_modules():
        attributes = vars(module)
        hooks = {k: v and list(v.items()) for k, v in attributes.items() if "hook" in k}
        found += [name, type(module), module.training, list(attributes), hooks]
        found += [(k, v) for k, v in attributes.items() if isinstance(v, int | float | list)]
        for kind in ("_parameters", "_buffers"):
            found += [(k, id(v), v is not None and raw(v)) for k, v in attributes[kind].items()]
        found.append([(k, id(v)) for k, v in attributes["_modules"].items()])
    for parameter in model.parameters():
        grad = parameter.grad
        found += [parameter.requires_grad, grad is None or (id(grad), raw(grad))]
        found += [parameter.data_ptr(), versions and parameter._version]
        found += [dict(x or {}) for x in (parameter._backward_hooks,)]
    return found


def prepare(model):
    """Give a model what is easily lost: gradients, hooks, a frozen parameter, mixed modes."""
    parameters = list(model.parameters())
    parameters[0].grad = torch.full_like(parameters[0], 3.0)
    parameters[1].requires_grad_(False)
    list(model.modules())[-1].eval()
    model.seen = []
    model.register_forward_hook(lambda module, args, output: module.seen.append(1))
    parameters[-1].register_hook(lambda grad: grad)
    return model


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", SMALL)
def test_the_model_is_restored(name, mode):
    model, batch = small(name, dropout=0.1)
    prepare(model.train(mode))
    before = everything(model)
    compare(model, batch, **QUICK)
    assert everything(model) == before


@pytest.mark.parametrize("name", ["padded_encoder", "nano_gpt"])
@pytest.mark.parametrize("fails_at", [1, 2, 4, 5])
def test_the_model_is_restored_after_an_exception(name, fails_at):
    model, batch = small(name, dropout=0.1)
    prepare(model)
    before, calls = everything(model), []

    def loss(output):
        calls.append(random.random() + np.random.rand())
        if len(calls) == fails_at:
            raise KeyboardInterrupt
        return output.square().mean()

    with pytest.raises(KeyboardInterrupt):
        compare(model, batch, loss, **QUICK)
    assert everything(model) == before and len(calls) == fails_at


class Untidy(nn.Module):
    """Changes everything it can reach while it runs."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(E, 2, batch_first=True)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(E)
        self.register_buffer("count", torch.zeros(1))
        self.cache, self.generator = torch.zeros(3), torch.Generator()
        self.log, self.table, self.number = [1], {"a": 1}, 0

    def forward(self, x):
        self.count += 1
        self.cache.fill_(self.number)
        self.number += 1
        self.log.append(2)
        self.table["b"] = torch.rand(1, generator=self.generator)
        self.late = nn.Linear(2, 2)
        self.drop.eval()
        with torch.no_grad():
            self.attention.out_proj.bias.add_(1.0)
            self.norm.weight.data = torch.zeros(E)
        self.attention.register_forward_hook(lambda *_: None)
        x.mul_(2.0)
        return self.norm(self.drop(self.attention(x, x, x, need_weights=False)[0]).mean(1))


def test_what_an_untidy_model_changes_is_undone():
    model, x = Untidy(), torch.randn(3, 5, E)
    kept, state = x.clone(), model.generator.get_state()
    held = dict(vars(model))
    before = everything(model, versions=False)
    compare(model, x, **QUICK)
    after = everything(model, versions=False)
    assert [a for a, b in zip(before, after, strict=True) if a != b] == []
    assert torch.equal(x, kept) and torch.equal(model.generator.get_state(), state)
    assert all(vars(model)[key] is value for key, value in held.items())
    assert torch.equal(model.cache, torch.zeros(3)) and not hasattr(model, "late")


def test_an_optimizer_that_steps_in_the_backward_does_not():
    model, batch = small("vit_block")
    steps = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(steps.append)
    compare(model, batch, **QUICK)
    assert steps == []
    model(*batch).sum().backward()
    assert len(steps) == len(list(model.parameters()))


@pytest.mark.parametrize("name", SMALL)
def test_both_sides_agree_with_float64(name):
    model, batch = small(name, dropout=0.1)
    found = compare(model, batch, **QUICK)
    assert found.truth == "float64"
    trained = {n for n, p in model.named_parameters()}
    assert set(found.parameters) == trained
    for sides in (found.output_error, found.gradient_error):
        assert 0 < sides.before < 1e-5 and 0 < sides.after < 1e-5
    assert bool(found.swap.swapped) == (name != "nano_gpt") and bool(found.routed) == (
        name == "nano_gpt"
    )
    assert found.memory.before > 0 and found.memory.after > 0 and min(found.seconds) > 0
    assert found.attention[1]["grad_error/dq"] < 1e-5
    assert any("dropout" in note for note in found.notes) == (name != "clip_text")


def test_errors_are_those_of_the_definition():
    model, (x,) = small("vit_block")
    found = compare(model, x, lambda out: out.square().sum(), **QUICK)
    wide = SMALL["vit_block"]()[0].double()
    wide.load_state_dict(model.state_dict())
    out, truth = model(x), wide(x.double())
    out.square().sum().backward()
    truth.square().sum().backward()
    assert found.outputs[""].before == error(out, truth)
    for name in ("self_attention.in_proj_weight", "mlp.0.bias"):
        wanted = wide.get_parameter(name).grad
        owner = wide.get_submodule(name.rpartition(".")[0])
        unit = max(p.grad.abs().max().item() for p in owner.parameters(recurse=False))
        assert found.parameters[name].before == error(model.get_parameter(name).grad, wanted, unit)


def test_a_wrong_swap_is_seen(monkeypatch):
    right = FlashMultiheadAttention.attend
    wrong = lambda self, *args, **kwargs: 1.001 * right(self, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(FlashMultiheadAttention, "attend", wrong)
    found = compare(*small("vit_block"), **QUICK)
    assert found.output_error.before < 1e-6 and found.output_error.after > 1e-5
    assert found.gradient_error.before < 1e-6 and found.gradient_error.after > 1e-5


def test_a_swap_that_means_something_else_says_so():
    found = compare(*small("vit_block"), window=(1, 1), **QUICK)
    assert found.output_error.after > 1e-3
    assert any("window=(1, 1)" in note for note in found.notes)


class Lossy(nn.Module):
    """Float32 inside, whatever comes in."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(E, 2, batch_first=True)

    def forward(self, x):
        x = x.to(torch.float32)
        return self.attention(x, x, x, need_weights=False)[0] + torch.rand(1)


def test_without_float64_errors_are_against_the_unswapped_model():
    found = compare(Lossy(), torch.randn(2, 5, E), **QUICK)
    assert found.truth == "unswapped" and found.output_error.before is None
    assert found.output_error.after < 1e-5 and found.gradient_error.after < 1e-5
    assert any("no float64 copy" in note for note in found.notes)
    assert any("random numbers" in note for note in found.notes)
    found = compare(*small("vit_block"), time_limit_s=0.0, **QUICK)
    assert found.truth == "unswapped" and "time_limit_s" in str(found)


def test_forms_of_the_loss():
    model, (x,) = small("vit_block")
    target = {"target": torch.zeros(2, 7, E)}
    seen = []

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = model

        def forward(self, x, target):
            return {"loss": (self.block(x) - target).square().mean(), "x": x}

    def loss(output, batch):
        seen.append(set(batch))
        return F.mse_loss(output["loss"], batch["x"].new_zeros(()))

    batch = {"x": x, **target}
    own = compare(Wrapped(), batch, **QUICK)
    given = compare(Wrapped(), batch, loss, **QUICK)
    optional = compare(model, x, lambda out, scale=2.0: (out * scale).sum(), **QUICK)
    for found in (own, given, optional):
        assert found.truth == "float64" and found.gradient_error.after < 1e-5, str(found)
    assert seen and all(names == {"x", "target"} for names in seen)
    with pytest.raises(ValueError, match="one number"):
        compare(model, x, lambda out: out, **QUICK)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("how", ["no_grad", "frozen"])
def test_without_gradients_outputs_are_compared(how):
    model, batch = small("padded_encoder")
    model.eval().requires_grad_(how == "no_grad")
    with torch.set_grad_enabled(how == "frozen"):
        for options in ({}, {"always_call": True}):
            found = compare(model, batch, **options, **QUICK)
            assert not found.parameters and found.output_error.after < 1e-5
    assert any("no gradients" in note for note in found.notes)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_rows_of_padding_are_not_compared():
    """torch's fused encoder returns zeros there, a module that is called does not."""
    layer = nn.TransformerEncoderLayer(E, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    batch = {"src": torch.randn(2, 5, E), "src_key_padding_mask": padding([5, 2], 5)}
    with torch.no_grad():
        found = compare(model, batch, always_call=True, **QUICK)
    assert found.output_error.after < 1e-5 and found.padding.tokens == 7


def test_nothing_to_swap_names_the_door():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="flash_attention"):
        compare(model, torch.randn(1, 2), **QUICK)
    with pytest.raises(ValueError, match="window"):
        compare(small("nano_gpt")[0], small("nano_gpt")[1], window=(1, 1), **QUICK)
    with pytest.raises(TypeError, match="batch"):
        compare(model, 3.0)
    with pytest.raises(ValueError, match="repeats"):
        compare(model, torch.randn(1, 2), repeats=0)


def test_a_swapped_model_is_told_to_be_one():
    model, batch = small("vit_block")
    flashmod.swap_attention(model)
    with pytest.raises(ValueError, match="flash attention already"):
        compare(model, batch, **QUICK)


def test_a_kink_that_rounding_decides_is_told_and_leaves_the_median():
    """The unit's input is 0 but for rounding, so float64 may see it on the other side."""

    class Kinked(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = small("vit_block")[0]
            self.scale, self.unit = nn.Parameter(torch.tensor(0.1)), nn.Linear(1, 1, bias=False)
            nn.init.ones_(self.unit.weight)

        def forward(self, x):
            third = self.scale * 3 - torch.full_like(self.scale, 0.3)
            return self.block(x), self.unit(F.relu(third.view(1, 1) * 1e8))

    model = Kinked()
    found = compare(model, torch.randn(2, 7, E), **QUICK)
    assert found.gradient_error.before > 1e-2 and found.median_error.after < 1e-5
    assert "ReLU" in str(found)


def test_few_steps_are_timed_where_they_are_slow():
    slow = small("vit_block")[0]
    slow.register_forward_hook(lambda *_: time.sleep(0.1))
    found = compare(slow, torch.randn(2, 7, E), repeats=50, time_limit_s=0.5)
    assert found.setting.repeats < 10


def test_what_counts_as_dropout():
    model = small("padded_encoder", 0.25)[0]
    model.drop_prob, model.dropped = 0.5, True
    model.norm.eval()
    names = switch_off(model)
    assert {"drop.p", "drop_prob", "encoder.layers.1.self_attn.dropout"} < set(names)
    assert model.dropped is True and switch_off(model) == []
    assert switch_off(small("padded_encoder", 0.25)[0].eval()) == []


X = torch.zeros(2, 3, 4)
RIGHT = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("parts", "share"),
    [
        ({"key_padding_mask": RIGHT == 0}, 1 / 6),
        ({"src_key_padding_mask": torch.where(RIGHT == 0, float("-inf"), 0.0)}, 1 / 6),
        ({"attention_mask": RIGHT}, 1 / 6),
        ({"attention_mask": RIGHT.flip(1)}, 1 / 6),
        ({"attention_mask": RIGHT.float()}, 1 / 6),
        ({"x": X, "lengths": torch.tensor([1, 2])}, 0.5),
        ({"lengths": torch.tensor([1, 2])}, 0.25),
        ({"cu_seqlens": torch.tensor([0, 3, 4])}, 0.0),
        ({"x": X, "mask": RIGHT}, 1 / 6),
        ({"x": X, "mask": RIGHT == 0}, 1 / 6),
        ({"x": X, "1": RIGHT.bool()}, 1 / 6),
        ({"mask": RIGHT}, None),  # nothing else has this shape
        ({"x": X, "labels": torch.tensor([[1, 0, 1], [1, 1, 1]])}, None),
        ({"x": torch.zeros(3, 3, 4), "mask": torch.ones(3, 3).tril().bool()}, None),
        ({"x": X, "attn_mask": torch.zeros(3, 3)}, None),
        ({"x": X, "all": torch.ones(2, 3).bool()}, None),
        ({"tokens": torch.randint(5, (2, 3))}, None),
    ],
)
def test_padding_of_a_batch(parts, share):
    found = padding_of(parts)
    assert (found and found.share) == (share if share is None else pytest.approx(share))
    if found:
        assert found.how.partition(":")[0] in parts


def test_the_table_and_the_record(tmp_path):
    found = compare(*small("padded_encoder", 0.1), **QUICK)
    text = str(found)
    for part in ("2 swapped", "float64", "peak memory", "median", "padding: 41%", "norm2.bias"):
        assert part in text, text
    path = found.save(tmp_path)
    content = json.loads(path.read_text())
    assert path == tmp_path / "result.json" and content["status"] == "ok"
    assert len(content["comparison"]["parameters"]) == len(found.parameters)
    read = flashmod.report.as_text([tmp_path])
    assert "PaddedEncoder, swapped" in read and "PaddedEncoder, unswapped" in read
    assert "All 2 finished" in read and "error of flash" in read


FACTORY = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return scaled_dot_product_attention(self.linear(x), x, x, is_causal=True)
def pair(): return Block(), torch.randn(2, 5, 8)
def triple(): return Block(), (torch.randn(2, 5, 8),), lambda out: out.sum()
def model(): return Block()
def fails(): return Block(), torch.randn(2, 5, 7)
def wrong(): return 3
"""


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "made_for_compare.py").write_text(FACTORY)
    run = lambda *words: main([*words, "--repeats", "1", "-o", "out"])  # noqa: E731
    status = lambda: json.loads((tmp_path / "out/result.json").read_text())["status"]  # noqa: E731
    assert run("made_for_compare:pair") == 0 and status() == "ok"
    said = capsys.readouterr().out
    assert "1 calls of F.scaled_dot_product_attention" in said and "out/result.json" in said
    assert run("made_for_compare.py:triple") == 0
    assert run("made_for_compare:model", "--shape", "2,3,8", "--eval") == 0
    assert run("made_for_compare:fails") == 1 and status() == "failed"
    for words, why in [
        (["made_for_compare:model"], "--shape"),
        (["made_for_compare:wrong"], "int"),
        (["made_for_compare:nothing"], "nothing"),
        (["no_such_module:pair"], "no_such_module"),
        (["nowhere.py:pair"], "does not exist"),
        (["made_for_compare"], "FACTORY"),
        ([], "--scan"),
        (["--scan", "nowhere"], "nowhere"),
    ]:
        capsys.readouterr()
        assert run(*words) == 2
        assert why in capsys.readouterr().err
    assert main(["--scan", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "made_for_compare.py:10" in said and "early_imports=True" in said


def test_the_module_twin_answers():
    command = [sys.executable, "-m", "flashmod.experiments.compare", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["flashmod-compare", flashmod.__version__]


def test_the_sample_has_the_padding_it_says() -> None:
    from flashmod.comparison.samples import padded_encoder

    model, batch = padded_encoder(batch=8, length=64, padding=0.6)
    hidden = batch["src_key_padding_mask"]
    assert hidden.shape == (8, 64) and abs(float(hidden.float().mean()) - 0.6) < 0.02
    assert not hidden[0].any() and not hidden[:, 0].any()
    assert model(**batch).shape == (8, 64, 512)
