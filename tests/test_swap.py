"""swap_attention and restore_attention on small models in the shapes that people have."""

import copy
import logging
import pickle

import pytest
import torch
from small_models import HEADS, SMALL, DetrDecoder, E, padding
from torch import nn

import flashmod
from flashmod import FlashMultiheadAttention, Mask, restore_attention, swap_attention

F, T = False, True
COUNTS = {"padded_encoder": 2, "detr_decoder": 4, "vit_block": 1, "clip_text": 2}
each_model = pytest.mark.parametrize("name", COUNTS)
# Dynamo's own way of tracing any autograd Function.
ignores_dynamo = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)


def run(model, batch):
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    return out["pred_boxes"] if isinstance(out, dict) else out


def attentions(model):
    return [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]


def everything(module):
    """All that a module's object holds, by identity where it is an object."""
    held = {"class": type(module)}
    for name, x in module.__dict__.items():
        if isinstance(x, dict):
            held[name] = [(key, id(value)) for key, value in x.items()]
        else:
            held[name] = copy.copy(x)
    return held


def train(model, batch, optimizer):
    """Two steps; their outputs."""
    outputs = []
    for _ in range(2):
        optimizer.zero_grad()
        out = run(model, batch)
        out.sin().sum().backward()
        optimizer.step()
        outputs.append(out.detach())
    return outputs


@each_model
def test_a_swapped_model_trains_as_before_and_comes_back(name):
    model, batch = SMALL[name]()
    twin = copy.deepcopy(model)
    before = [everything(m) for m in model.modules()]
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    report = swap_attention(model)
    assert len(report) == COUNTS[name] and not report.skipped and not report.doors
    assert all(type(m) is FlashMultiheadAttention for m in attentions(model))
    theirs = train(twin, batch, torch.optim.SGD(twin.parameters(), 0.02, momentum=0.9))
    ours = train(model, batch, optimizer)
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    for mine, right in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    assert restore_attention(model) == [layer.name for layer in report.swapped]
    assert [everything(m) for m in model.modules()] == before
    assert restore_attention(model) == []
    twin.load_state_dict(model.state_dict())
    assert torch.equal(run(model, batch), run(twin, batch))


@each_model
def test_state_dicts_load_both_ways(name):
    model, batch = SMALL[name]()
    plain, swapped = copy.deepcopy(model).eval(), model.eval()
    swap_attention(swapped)
    state = swapped.state_dict()
    assert list(state) == list(plain.state_dict())
    fresh, _ = SMALL[name]()
    fresh.eval().load_state_dict(state, strict=T)
    torch.testing.assert_close(run(fresh, batch), run(swapped, batch), rtol=1e-4, atol=1e-5)
    other, _ = SMALL[name]()
    swapped.load_state_dict(other.state_dict(), strict=T)
    torch.testing.assert_close(run(swapped, batch), run(other.eval(), batch), rtol=1e-4, atol=1e-5)


@pytest.fixture
def calls(monkeypatch):
    """The modules whose own forward ran."""
    counted = []
    forward = FlashMultiheadAttention.forward

    def counting(self, *args, **kwargs):
        counted.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(FlashMultiheadAttention, "forward", counting)
    return counted


LEFT = padding([5, 3], 5)
SCATTERED = torch.tensor([[F, T, F, F, F], [F, F, F, T, F]])
MODES = {  # training, whether parameters are frozen, whether gradients are on, autocast, padding
    "train": (T, F, T, F, None),
    "train_padded": (T, F, T, F, LEFT),
    "eval": (F, F, T, F, LEFT),
    "no_grad": (F, F, F, F, None),
    "no_grad_left": (F, F, F, F, LEFT),
    "no_grad_scattered": (F, F, F, F, SCATTERED),
    "frozen": (F, T, T, F, LEFT),
    "autocast": (F, F, F, T, LEFT),
    "autocast_scattered": (F, F, F, T, SCATTERED),
}
FUSED = [mode for mode in MODES if not mode.startswith("train") and mode != "eval"]


def encoder(swap_first, swap, batch_first=T):
    """An encoder of two layers, built before or after the swap."""
    layer = nn.TransformerEncoderLayer(E, HEADS, 32, 0.0, batch_first=batch_first)
    if swap_first:
        swap(layer)
        return nn.TransformerEncoder(layer, 2)
    model = nn.TransformerEncoder(layer, 2)
    swap(model)
    return model


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("swap_first", [F, T])
@pytest.mark.parametrize("options", [{}, {"always_call": T}, {"window": (1, 1)}], ids=str)
def test_which_calls_reach_an_encoders_attention(mode, swap_first, options, calls):
    model = encoder(swap_first, lambda m: swap_attention(m, **options))
    window = torch.ones(5, 5).triu(2).bool() | torch.ones(5, 5).tril(-2).bool()
    explicit = window if "window" in options else None
    training, frozen, grad, autocast, hidden = MODES[mode]
    x = torch.randn(2, 5, E)
    plain = copy.deepcopy(model)
    restore_attention(plain)
    right = plain.train()(x, explicit, src_key_padding_mask=hidden).detach()
    model.train(training).requires_grad_(not frozen)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if mode == "autocast" and not options:  # torch's fused code raises there, swapped or not
            with pytest.raises(RuntimeError, match="expected scalar type Float"):
                model(x, src_key_padding_mask=hidden)
            return
        out = model(x, src_key_padding_mask=hidden)
    assert len(calls) == (0 if mode in FUSED and not options else 2)
    valid = ~torch.zeros(2, 5).bool() if hidden is None else ~hidden
    tolerance = {"rtol": 0, "atol": 6e-2} if autocast else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(out.float()[valid], right[valid], **tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_every_call_of_a_decoder_reaches_its_attention(mode, calls):
    training, frozen, grad, autocast, hidden = MODES[mode]
    layer = nn.TransformerDecoderLayer(E, HEADS, 32, 0.0, batch_first=T)
    model = nn.TransformerDecoder(layer, 2)
    swap_attention(model)
    model.train(training).requires_grad_(not frozen)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(torch.randn(2, 7, E), torch.randn(2, 5, E), memory_key_padding_mask=hidden)
    assert len(calls) == 4


def test_optimizers_and_references_go_on():
    model, batch = SMALL["vit_block"]()
    attention, weight = model.self_attention, model.self_attention.in_proj_weight
    optimizer = torch.optim.AdamW(model.parameters())
    fired = []
    attention.register_forward_hook(lambda *_: fired.append("after"))
    attention.register_forward_pre_hook(lambda *_: fired.append("before"))
    swap_attention(model, causal=T)
    assert model.self_attention is attention and attention.in_proj_weight is weight
    start = weight.detach().clone()
    run(model, batch).sum().backward()
    optimizer.step()
    assert fired == ["before", "after"] and not torch.equal(start, weight)
    restore_attention(model)
    run(model, batch)
    assert fired == ["before", "after"] * 2 and attention.in_proj_weight is weight


def test_a_model_that_is_itself_an_attention():
    model = nn.MultiheadAttention(E, HEADS)
    report = swap_attention(model)
    assert type(model) is FlashMultiheadAttention
    assert "(the model itself)  swapped (2 heads of 8) [1]" in str(report)
    assert restore_attention(model) == [""] and type(model) is nn.MultiheadAttention


def test_a_module_with_two_names_is_swapped_once():
    model = nn.ModuleDict({"a": nn.MultiheadAttention(E, HEADS)})
    model["b"] = model["a"]
    assert [layer.name for layer in swap_attention(model).swapped] == ["a"]
    assert model["a"] is model["b"] and type(model["b"]) is FlashMultiheadAttention
    assert restore_attention(model) == ["a"]


class Rotary(nn.MultiheadAttention):
    def forward(self, query, key, value):
        return super().forward(query.flip(0), key, value)


class Renamed(nn.MultiheadAttention):
    pass


def test_subclasses_are_skipped_with_the_reason():
    model = nn.ModuleList([Rotary(E, HEADS), Renamed(E, HEADS), nn.MultiheadAttention(E, HEADS)])
    model.append(FlashMultiheadAttention(E, HEADS, mask=Mask(causal=T)))
    report = swap_attention(model, mask=Mask(window=(1, 1)))
    assert (len(report), len(report.skipped)) == (1, 3)
    assert [type(m) for m in model[:2]] == [Rotary, Renamed]
    assert repr(model[3].mask) == repr(Mask(causal=T))
    text = str(report)
    assert "1 swapped, 3 skipped" in text
    assert "test_swap.Rotary, not nn.MultiheadAttention: it defines forward" in text
    assert "test_swap.Renamed, not nn.MultiheadAttention: it may mean something else" in text
    assert "it is flash attention already" in text


class Adapted(nn.Module):
    """As PEFT wraps it: the merged weight is put in place for the call, and taken out again."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.low, self.up = nn.Parameter(torch.randn(2, E)), nn.Parameter(torch.zeros(3 * E, 2))

    def forward(self, *args, **kwargs):
        weight = self.base_layer.in_proj_weight
        del self.base_layer.in_proj_weight
        self.base_layer.in_proj_weight = weight + self.up @ self.low
        try:
            return self.base_layer(*args, **kwargs)
        finally:
            del self.base_layer.in_proj_weight
            self.base_layer.register_parameter("in_proj_weight", weight)


def test_an_adapter_around_the_attention():
    model, batch = SMALL["vit_block"]()
    model.requires_grad_(F)
    model.self_attention = Adapted(model.self_attention)
    twin, names = copy.deepcopy(model), swap_attention(model).swapped
    assert [layer.name for layer in names] == ["self_attention.base_layer"]
    gradients = []
    for m in (model, twin):
        run(m, batch).sin().sum().backward()
        gradients.append([m.self_attention.low.grad, m.self_attention.up.grad])
    for mine, right in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, right)


def test_nothing_to_swap_names_the_doors(caplog):
    model, _ = SMALL["nano_gpt"]()
    with caplog.at_level(logging.INFO, "flashmod"):
        report = swap_attention(model)
    assert len(report) == 0 and report.doors == flashmod.integrations.scan.doors_for(model)
    assert "0 swapped, 0 skipped" in str(report) and "route_sdpa" in str(report)
    assert "doors" not in str(swap_attention(FlashMultiheadAttention(E, HEADS)))
    (record,) = [r for r in caplog.records if "0 swapped, 0 skipped" in r.getMessage()]
    assert record.levelno == logging.WARNING and record.getMessage() == str(report)


@pytest.mark.parametrize(
    "options, mask",
    [
        ({"causal": T}, Mask(causal=T)),
        ({"window": (2, 1)}, Mask(window=(2, 1))),
        ({"causal": T, "window": (2, None)}, Mask(causal=T, window=(2, None))),
        ({"mask": Mask(prefix_len=2, causal=T)}, Mask(prefix_len=2, causal=T)),
    ],
    ids=str,
)
def test_a_mask_for_every_self_attention(options, mask):
    model, batch = SMALL["vit_block"]()
    twin = copy.deepcopy(model)
    swap_attention(model, **options)
    twin.self_attention = FlashMultiheadAttention(E, HEADS, batch_first=T, mask=mask)
    twin.self_attention.load_state_dict(model.self_attention.state_dict())
    assert repr(model.self_attention.mask) == repr(mask)
    assert torch.equal(run(model, batch), run(twin, batch))


CROSS = {
    "torch": lambda: nn.TransformerDecoderLayer(E, HEADS, 32),
    "detr": lambda: DetrDecoder(layers=1).layers[0],
}


@pytest.mark.parametrize("build", CROSS.values(), ids=CROSS)
def test_cross_attention_is_swapped_without_the_mask(build):
    model = build()
    report = swap_attention(model, causal=T)
    assert model.self_attn.mask.causal is T and model.multihead_attn.mask is None
    assert type(model.multihead_attn) is FlashMultiheadAttention
    note = "looks like cross-attention: swapped without the mask"
    assert [any(note in n for n in layer.notes) for layer in report.swapped] == [F, T]
    wide = nn.MultiheadAttention(E, HEADS, kdim=5, vdim=7)
    swap_attention(wide, causal=T)
    assert wide.mask is None


def test_need_weights_false_is_for_callers_that_do_not_say():
    model, batch = SMALL["detr_decoder"]()
    assert "also get the quadratic weights" in str(swap_attention(model))
    restore_attention(model)
    asked = []
    for m in attentions(model):
        m.register_forward_hook(lambda m, args, out: asked.append(out[1]))
    report = swap_attention(model, need_weights=F)
    run(model, batch)
    assert asked == [None] * 4 and "quadratic" not in str(report)


def test_the_table_says_who_is_called_when():
    encoder, decoder = nn.TransformerEncoderLayer(E, 2), nn.TransformerDecoderLayer(E, 2)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    lines = str(swap_attention(model)).splitlines()
    assert lines[0] == "flashmod: 3 swapped, 0 skipped"
    assert lines[1] == "  encoder.self_attn       swapped (2 heads of 8) [1]"
    assert lines[3] == "  decoder.multihead_attn  swapped (2 heads of 8)"
    assert lines[4].startswith("  [1] in eval without gradients") and "always_call" in lines[4]
    restore_attention(model)
    assert "[1]" not in str(swap_attention(model, always_call=T))


def test_what_does_not_fit_is_refused_and_changes_nothing():
    model = nn.TransformerEncoderLayer(E, HEADS)
    for kind, options in (
        (ValueError, {"mask": Mask(), "causal": T}),
        (ValueError, {"mask": Mask(), "window": (1, 1)}),
        (ValueError, {"need_weights": T}),
        (TypeError, {"mask": torch.ones(3, 3).bool()}),
    ):
        before = [everything(m) for m in model.modules()]
        with pytest.raises(kind):
            swap_attention(model, **options)
        assert [everything(m) for m in model.modules()] == before


@pytest.mark.parametrize(
    "kwargs, parameter, what",
    [({"num_kv_heads": 1}, "in_proj_weight", "2 heads of 8, 1 key heads"),
     ({"sink": T}, "sink", "2 heads of 8, a sink")],
    ids=["grouped", "sink"],
)  # fmt: skip
def test_restoring_what_torch_cannot_hold_is_refused_by_name(kwargs, parameter, what):
    model = nn.ModuleDict({"plain": nn.MultiheadAttention(E, HEADS)})
    swap_attention(model)
    model["more"] = FlashMultiheadAttention(E, HEADS, **kwargs)
    with pytest.raises(ValueError, match=rf"more\.{parameter} has no place in.*more has {what}"):
        restore_attention(model)
    assert all(type(m) is FlashMultiheadAttention for m in model.values())
    with pytest.raises(ValueError, match=f"{parameter} has no place"):
        model["more"].unconfigure()


def test_restoring_what_was_built_as_ours():
    model = FlashMultiheadAttention(E, HEADS, batch_first=T, mask=Mask(causal=T), alibi=T)
    restore_attention(model)
    assert vars(model).keys() == vars(nn.MultiheadAttention(E, HEADS)).keys()
    assert model(*[torch.randn(2, 5, E)] * 3)[1].shape == (2, 5, 5)


def test_only_the_first_rank_logs(monkeypatch, caplog):
    for rank, expected in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        caplog.clear()
        with caplog.at_level(logging.INFO, "flashmod"):
            swap_attention(nn.MultiheadAttention(E, HEADS))
        assert len(caplog.records) == expected


def test_copies_and_pickles_of_a_swapped_model():
    model, batch = SMALL["padded_encoder"]()
    swap_attention(model.eval(), causal=T)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(twin, batch), run(model, batch))
        assert all(m.always_called for m in attentions(twin))
        assert len(restore_attention(twin)) == 2
        assert not any(m._forward_pre_hooks for m in attentions(twin))
        assert all(type(m) is FlashMultiheadAttention for m in attentions(model))


@ignores_dynamo
@pytest.mark.parametrize("name", ["vit_block", "padded_encoder"])
def test_compiles_after_the_swap_and_after_restoring(name):
    model, batch = SMALL[name]()
    model.eval()
    right = run(model, batch)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=T)
    swap_attention(model)
    torch.testing.assert_close(run(compiled, batch), right, rtol=1e-4, atol=1e-5)
    restore_attention(model)
    torch.testing.assert_close(run(compiled, batch), right, rtol=1e-4, atol=1e-5)
