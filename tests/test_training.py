"""Training with Lightning: our module, and our callbacks in modules that know nothing of us."""

import logging
import math
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from flashmod.models import ModelConfig
from flashmod.training.callbacks import (
    AttentionMeasurements,
    SafetensorsBest,
    StopOnNonFinite,
    Throughput,
)
from flashmod.training.data import DataConfig, load_corpus
from flashmod.training.module import LitModel, parameter_groups, warmup_cosine
from flashmod.training.packing import Packed, PackedLoader, pack
from flashmod.training.replay import state_kept
from flashmod.training.sampler import PackedBatchSampler
from flashmod.training.tokens import Tokens, count_tokens

TINY = ModelConfig(num_layers=1, embed_dim=16, num_heads=2)
CORPUS = load_corpus(DataConfig("synthetic", seq_len=48, documents=80, val_fraction=0.2))

pytestmark = [
    # Lightning warns of every convenience that a small test leaves out.
    pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
]


@pytest.fixture(autouse=True)
def quiet_lightning(caplog):
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def loader(documents: list[bytes], *, shuffle: bool = True, budget: int = 200) -> PackedLoader:
    sampler = PackedBatchSampler(
        list(map(len, documents)), tokens_per_batch=budget, shuffle=shuffle
    )
    return PackedLoader(documents, sampler)


def make_trainer(path: Path, callbacks: Any = (), **kwargs: Any) -> pl.Trainer:
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "default_root_dir": path,
    }
    return pl.Trainer(**{**defaults, **kwargs}, callbacks=list(callbacks))


def make_model(**kwargs: Any) -> LitModel:
    torch.manual_seed(0)
    return LitModel(TINY, **{"lr": 1e-2, "warmup_steps": 2, **kwargs})


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


class Attend(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Plain(pl.LightningModule):
    """A user's module: no flashmod class, tensors as batches, attention through torch's SDPA."""

    def __init__(self, losses: list[float] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.attend = nn.Linear(4, 12), Attend()
        self.register_buffer("calls", torch.zeros(()))
        self.losses, self.steps = losses, 0
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        q, k, v = self.qkv(F.dropout(batch, 0.1)).unflatten(-1, (3, 2, 2)).unbind(-3)
        out = self.attend(*(t.transpose(1, 2) for t in (q, k, v)))
        loss = out.square().mean()
        if self.losses is not None:
            loss = loss * self.losses[min(self.steps, len(self.losses) - 1)]
        self.calls += 1
        self.steps += 1
        self.log("train_loss", loss, on_step=True, batch_size=1)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def plain_batches(*sizes: int) -> DataLoader:
    return DataLoader([torch.randn(size, 5, 4) for size in sizes], batch_size=None)


# The module


def test_learns_below_the_unigram_entropy(tmp_path) -> None:
    corpus = load_corpus(DataConfig("synthetic", seq_len=64, documents=600, val_fraction=0.1))
    trainer = make_trainer(tmp_path, max_epochs=4, check_val_every_n_epoch=4)
    data = [
        loader(part, shuffle=part is corpus.train, budget=500)
        for part in (corpus.train, corpus.val)
    ]
    trainer.fit(make_model(lr=3e-2), *data)
    reached = trainer.callback_metrics["val/bits_per_byte"].item()
    assert reached < corpus.unigram_entropy - 0.5


def test_validation_weighs_every_byte_alike(tmp_path) -> None:
    model = make_model()
    documents = [b"a" * 100, b"xyz", b"q"]  # batches of 100 and 4 bytes
    trainer = make_trainer(tmp_path)
    trainer.validate(model, loader(documents, shuffle=False, budget=100), verbose=False)
    total = 0.0
    for document in documents:
        tokens = torch.tensor([256, *document[:-1]])
        logits = model.eval()(tokens, torch.tensor([0, len(document)], dtype=torch.int32))
        total += F.cross_entropy(logits, torch.tensor(list(document)), reduction="sum").item()
    expected = total / sum(map(len, documents)) / math.log(2)
    assert trainer.callback_metrics["val/bits_per_byte"].item() == pytest.approx(expected, rel=1e-5)


def test_logs_the_contract_names(tmp_path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.fit(make_model(), loader(CORPUS.train))
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert set(metrics) == {"train/loss", "train/bits_per_byte"}
    assert metrics["train/loss"] == pytest.approx(metrics["train/bits_per_byte"] * math.log(2))


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_precisions(tmp_path, precision) -> None:
    trainer = make_trainer(tmp_path, max_steps=2, precision=precision)
    trainer.fit(make_model(), loader(CORPUS.train))
    assert trainer.callback_metrics["train/loss"].isfinite()


def test_loss_of_half_precision_is_computed_in_float32() -> None:
    total, count = make_model().bfloat16()._loss(pack([b"abc", b"de"]))
    assert total.dtype == torch.float32
    assert count == 5


def test_schedule_warms_up_and_decays_to_a_tenth() -> None:
    factors = [warmup_cosine(step, 3, 11) for step in range(13)]
    assert factors[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert factors[7] == pytest.approx(0.55)
    assert factors[11:] == pytest.approx([0.1, 0.1])
    assert factors[3:12] == sorted(factors[3:12], reverse=True)
    assert warmup_cosine(5, 3, float("inf")) == 1.0


def test_only_matrices_decay() -> None:
    net = make_model().net
    decayed, kept = parameter_groups(net, 0.1)
    names = {id(p): name for name, p in net.named_parameters()}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert all("norm" not in names[id(p)] for p in decayed["params"])
    assert {names[id(p)].split(".")[-2] for p in kept["params"]} == {
        "embedding", "norm", "attention_norm", "mlp_norm",
    }  # fmt: skip
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_checkpoint_holds_plain_types(tmp_path) -> None:
    keep = ModelCheckpoint(tmp_path, save_last=True)
    measured = [SafetensorsBest(tmp_path / "w"), Throughput(), AttentionMeasurements()]
    trainer = make_trainer(tmp_path, [keep, *measured], max_steps=2)
    model = make_model(tiles=(16, 16))
    trainer.fit(model, loader(CORPUS.train))
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert content["hyper_parameters"]["model"] == TINY.to_dict()
    assert content["hyper_parameters"]["tiles"] == [16, 16]
    again = LitModel.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert torch.equal(weights(again), weights(model))


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")  # inductor's
def test_compiles_the_network_alone(tmp_path) -> None:
    model = make_model(compile=True)
    assert model.net._compiled_call_impl is not None
    assert getattr(model, "_compiled_call_impl", None) is None
    assert list(model.state_dict()) == list(make_model().state_dict())


# Data through Lightning


class Recording(LitModel):
    def __init__(self) -> None:
        super().__init__(TINY, lr=1e-2, warmup_steps=2)
        self.seen: list[list[int]] = []

    def training_step(self, batch: Packed, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch.targets.tolist())
        return super().training_step(batch, batch_idx)


def test_lightning_reshuffles_every_epoch(tmp_path) -> None:
    model = Recording()
    data = loader(CORPUS.train)
    make_trainer(tmp_path, max_epochs=2).fit(model, data)
    count = len(data)
    first, second = model.seen[:count], model.seen[count:]
    assert len(second) == count
    assert first != second
    assert sorted(chain.from_iterable(first)) == sorted(chain.from_iterable(second))


@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")
@pytest.mark.parametrize("stop", [5, 20])
def test_resume_in_the_middle_of_an_epoch_is_exact(tmp_path, stop) -> None:
    def run(name: str, *callbacks: pl.Callback, **kwargs: Any) -> Recording:
        torch.manual_seed(0)
        model, data = Recording(), loader(CORPUS.train, budget=100)
        assert len(data) < 20 < 2 * len(data)  # the second stop lies in the second epoch
        keep = ModelCheckpoint(tmp_path / name, "at", every_n_train_steps=stop, save_top_k=-1)
        trainer = make_trainer(tmp_path, [keep, *callbacks], max_steps=26)
        trainer.fit(model, data, **kwargs)
        return model

    whole = run("whole")
    stopped = run("stopped", StopAfter(stop))
    assert len(stopped.seen) == stop
    resumed = run("resumed", ckpt_path=tmp_path / "stopped" / "at.ckpt", weights_only=True)
    assert stopped.seen + resumed.seen == whole.seen
    assert torch.equal(weights(resumed), weights(whole))


class StopAfter(pl.Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.steps


# Non-finite losses


def finite(path: Path) -> bool:
    state = torch.load(path, weights_only=True)["state_dict"]
    return all(bool(tensor.isfinite().all()) for tensor in state.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_stops_at_the_first_non_finite_loss(tmp_path, value) -> None:
    keep = ModelCheckpoint(
        tmp_path, "best", monitor="train_loss", save_last=True, every_n_train_steps=1,
        save_on_exception=True,
    )  # fmt: skip
    model = Plain(losses=[1.0, 1.0, value, value, value, value])
    trainer = make_trainer(tmp_path, [keep, StopOnNonFinite()], max_steps=6)
    with pytest.raises(FloatingPointError, match=rf"loss is {value} at step 2 "):
        trainer.fit(model, plain_batches(*[2] * 6))
    assert model.steps == 3
    assert finite(tmp_path / "last.ckpt")
    assert finite(Path(keep.best_model_path))
    assert torch.load(keep.best_model_path, weights_only=True)["global_step"] <= 2
    assert weights(model).isfinite().all()


class InfiniteGradient(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.qkv.weight.sum()
        # sqrt has an infinite slope at 0 while its value is finite.
        return loss + (self.qkv.bias * 0).sum().sqrt() if self.global_step == 1 else loss


def test_stops_before_a_non_finite_gradient_reaches_the_weights(tmp_path) -> None:
    model = InfiniteGradient()
    trainer = make_trainer(tmp_path, [StopOnNonFinite()], max_steps=4)
    with pytest.raises(FloatingPointError, match="gradient norm is nan at step 1 "):
        trainer.fit(model, plain_batches(*[2] * 4))
    assert weights(model).isfinite().all()


def test_finite_training_goes_on(tmp_path) -> None:
    trainer = make_trainer(tmp_path, [StopOnNonFinite()], max_steps=3)
    trainer.fit(Plain(), plain_batches(2, 2, 2))
    assert trainer.global_step == 3


# Best weights


class Monitored(Plain):
    """Reports a given value of ``score`` after each epoch."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores, self.after = list(scores), []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.after.append(weights(self))
        self.log("score", self.scores[len(self.after) - 1], batch_size=1)


@pytest.mark.parametrize(
    ("scores", "mode", "best"),
    [
        ([3.0, 1.0, 2.0], "min", 1),
        ([3.0, 1.0, 2.0], "max", 0),
        ([3.0, float("nan"), 2.0], "min", 2),
        ([float("nan"), 3.0, float("-inf")], "min", 1),
    ],
)
def test_best_weights(tmp_path, scores, mode, best) -> None:
    path = tmp_path / "best.safetensors"
    model = Monitored(scores)
    trainer = make_trainer(tmp_path, [SafetensorsBest(path, "score", mode)], max_epochs=3)
    trainer.fit(model, plain_batches(2, 2), plain_batches(1))
    saved = load_file(path)
    assert set(saved) == {"qkv.weight", "qkv.bias", "calls"}
    kept = torch.cat([saved["qkv.weight"].flatten(), saved["qkv.bias"]])
    assert [torch.equal(kept, w) for w in model.after] == [i == best for i in range(3)]


def test_final_weights_without_a_validation(tmp_path) -> None:
    path = tmp_path / "w.safetensors"
    model = Plain()
    trainer = make_trainer(tmp_path, [SafetensorsBest(path, prefix="qkv.")], max_steps=2)
    trainer.fit(model, plain_batches(2, 2))
    assert set(saved := load_file(path)) == {"weight", "bias"}
    assert torch.equal(saved["weight"], model.qkv.weight)


def test_best_value_counts_only_where_its_file_is(tmp_path) -> None:
    here = SafetensorsBest(tmp_path / "w.safetensors")
    here.load_state_dict({"best": 1.0})
    assert here.best is None
    (tmp_path / "w.safetensors").touch()
    here.load_state_dict({"best": 1.0})
    assert here.best == 1.0
    assert here.state_dict() == {"best": 1.0}
    with pytest.raises(ValueError, match="mode is 'lowest'"):
        SafetensorsBest(tmp_path / "w", mode="lowest")


# Throughput


class Clock:
    """Advances only when told, as time does in a training step of one second."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class OneSecond(Plain):
    """A step takes one second; everything else takes none."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 1.0
        return self.qkv.weight.sum()


class Seen(pl.Callback):
    def __init__(self, meter: Throughput) -> None:
        self.meter, self.tokens, self.rates = meter, [], []

    def on_train_batch_end(self, *args: Any) -> None:
        self.tokens.append(self.meter.tokens)
        self.rates.append(self.meter.tokens_per_s)


def slack(tokens: int, rows: int) -> Packed:
    cu_seqlens = torch.tensor([0, 1, tokens], dtype=torch.int32)
    return Packed(torch.zeros(rows).long(), torch.zeros(rows).long(), cu_seqlens, tokens - 1)


def run_throughput(path: Path, batches: list[Any], others: Any = (), **kwargs: Any) -> Seen:
    clock = Clock()
    meter = Throughput(clock=clock, **kwargs)
    seen = Seen(meter)
    trainer = make_trainer(path, [meter, seen, *others], max_steps=len(batches))
    trainer.fit(OneSecond(clock), DataLoader(batches, batch_size=None))
    assert trainer.callback_metrics["throughput/tokens_per_s"] == pytest.approx(seen.rates[-1])
    return seen


def test_throughput_counts_real_tokens(tmp_path) -> None:
    batches = [slack(n, n + extra) for n, extra in ((5, 2), (3, 0), (7, 4), (2, 1), (9, 0))]
    seen = run_throughput(tmp_path, batches)
    assert seen.tokens == [5, 8, 15, 17, 26]
    assert seen.rates == pytest.approx([5, 4, 5, 17 / 4, 26 / 5])
    padded = sum(2 * (n - 1) for n in (5, 3, 7, 2, 9))
    assert seen.meter.padding_saved == pytest.approx(1 - 26 / padded)


def test_throughput_of_padded_batches(tmp_path) -> None:
    masks = [[[1, 1, 1, 1, 1]], [[1, 1, 0], [1, 0, 0]], [[1] * 7]]
    batches = [
        {"x": torch.zeros(len(m), len(m[0]), 4), "attention_mask": torch.tensor(m)} for m in masks
    ]
    seen = run_throughput(tmp_path, batches)
    assert seen.tokens == [5, 8, 15]
    assert seen.rates[-1] == pytest.approx(5.0)
    assert seen.meter.padding_saved == 0.0


def test_throughput_leaves_out_first_and_measuring_steps(tmp_path) -> None:
    class Measuring(pl.Callback):
        """Takes an hour after the third step."""

        measuring = False

        def on_train_batch_start(self, trainer, *args: Any) -> None:
            self.measuring = False

        def on_train_batch_end(self, trainer, module, *args: Any) -> None:
            if trainer.global_step == 3:
                self.measuring = True
                module.clock.now += 3600.0

    batches = [slack(n, n) for n in (50, 3, 7, 2, 9)]
    for first in (True, False):
        path = tmp_path / str(first)
        clock = Clock()
        meter = Throughput(clock=clock, skip_steps=1)
        order = [Measuring(), meter] if first else [meter, Measuring()]
        trainer = make_trainer(path, order, max_steps=5)
        trainer.fit(OneSecond(clock), DataLoader(batches, batch_size=None))
        expected = (3 + 2 + 9) / 3 if first else (3 + 7 + 2 + 9) / 4
        assert meter.tokens_per_s == pytest.approx(expected)
        assert meter.tokens == 71


def test_throughput_with_a_count_of_ones_own(tmp_path) -> None:
    batches = [torch.zeros(2, 3, 8, 8)]
    with pytest.raises(TypeError, match="cannot count the tokens of a Tensor"):
        run_throughput(tmp_path, batches)
    seen = run_throughput(tmp_path, batches, count=lambda batch: Tokens(10, 10, 20))
    assert seen.tokens == [10]
    assert seen.meter.padding_saved == 0.5


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(3, 5, dtype=torch.long), (15, 15, 15)),
        (torch.zeros(3, 5, 8), (15, 15, 15)),
        ((torch.zeros(3, 5, 8), torch.zeros(3).long()), (15, 15, 15)),
        ({"input_ids": torch.zeros(2, 4).long(), "lengths": torch.tensor([4, 1])}, (5, 8, 8)),
        ({"x": torch.zeros(2, 4, 8), "key_padding_mask": torch.ones(2, 4) > 0}, (0, 8, 8)),
        ({"cu_seqlens": torch.tensor([0, 4, 4, 5])}, (5, 5, 12)),
        ([{"cu_seq_lens_q": torch.tensor([0, 4])}, torch.zeros(9)], (4, 4, 4)),
    ],
)
def test_tokens_of_many_kinds_of_batches(batch, expected) -> None:
    assert count_tokens(batch) == expected


# Measurements


def measured(path: Path, model: pl.LightningModule, data: Any, **kwargs: Any) -> Any:
    callback = AttentionMeasurements(**kwargs)
    log = CSVLogger(path, name="", version="")
    trainer = make_trainer(path, [callback], max_steps=4, logger=log)
    trainer.fit(model, data)
    rows = (path / "metrics.csv").read_text()
    return callback, rows


ALL = {
    "memory/attention_peak_mib", "memory/dense_attention_peak_mib", "memory/step_peak_mib",
    "memory/dense_step_peak_mib", "grad_error/out", "grad_error/dq", "grad_error/dk",
    "grad_error/dv", "grad_error/coverage",
}  # fmt: skip


def test_measures_our_model(tmp_path) -> None:
    callback, rows = measured(tmp_path, make_model(), loader(CORPUS.train))
    assert set(callback.summary) == ALL
    assert all(name in rows for name in ALL)
    assert all(callback.summary[f"grad_error/{n}"] < 1e-5 for n in ("out", "dq", "dk", "dv"))
    assert callback.summary["grad_error/coverage"] == 1.0
    assert callback.predicted == set()


def test_measures_a_plain_module_every_other_step(tmp_path) -> None:
    callback, rows = measured(tmp_path, Plain(), plain_batches(2, 3, 2, 3), every=2)
    assert set(callback.summary) == ALL
    header, *lines = rows.strip().split("\n")
    column = header.split(",").index("grad_error/dq")
    steps = [
        line.split(",")[header.split(",").index("step")]
        for line in lines
        if line.split(",")[column]
    ]
    assert steps == ["2", "4"]


def test_measures_only_what_is_asked_for(tmp_path) -> None:
    callback, _ = measured(tmp_path, Plain(), plain_batches(2), memory=False)
    assert set(callback.summary) == {name for name in ALL if name.startswith("grad_error")}
    with pytest.raises(ValueError, match="every is 0"):
        AttentionMeasurements(every=0)


def test_measuring_leaves_no_trace(tmp_path) -> None:
    results = []
    for callbacks in ([], [AttentionMeasurements(every=1)]):
        model = Plain()
        torch.manual_seed(1)
        trainer = make_trainer(
            tmp_path, callbacks, max_steps=3, accumulate_grad_batches=2, logger=False
        )
        trainer.fit(model, plain_batches(*[2] * 6))
        results.append((weights(model), model.calls, torch.rand(3), trainer.callback_metrics))
    (w, calls, noise, metrics), (w2, calls2, noise2, metrics2) = results
    assert torch.equal(w, w2) and torch.equal(calls, calls2) and torch.equal(noise, noise2)
    assert metrics == metrics2


def test_gradients_of_an_accumulation_are_put_back() -> None:
    model = Plain()
    gradient = model.qkv.weight.grad = torch.ones_like(model.qkv.weight)
    with state_kept(model):
        assert model.qkv.weight.grad is None
        model.qkv(torch.ones(1, 4)).sum().backward()
    assert model.qkv.weight.grad is gradient
    assert bool((gradient == 1).all())
    assert model.qkv.bias.grad is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's
def test_compiled_parts_are_measured_too(tmp_path) -> None:
    model = Plain()
    model.attend.compile(backend="eager")
    callback, _ = measured(tmp_path, model, plain_batches(2), memory=False)
    assert callback.summary["grad_error/out"] < 1e-5


class NoAttention(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.qkv(batch).sum()


class Manual(Plain):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().step()


@pytest.mark.parametrize(
    ("kind", "message"),
    [(NoAttention, "no attention call was seen"), (Manual, "manual optimization")],
)
def test_says_what_cannot_be_measured(tmp_path, caplog, kind, message) -> None:
    model = kind()
    callback = AttentionMeasurements(memory=False)
    trainer = make_trainer(tmp_path, [callback], max_steps=1)
    with caplog.at_level("WARNING", logger="flashmod"):
        trainer.fit(model, plain_batches(2))
    assert message in caplog.text
    assert callback.summary == {}
    assert trainer.global_step == 1


# Names and ranks


def test_callbacks_belong_to_the_lightning_that_is_there() -> None:
    code = """
import sys, types, pytorch_lightning as real
other = types.ModuleType("lightning.pytorch")
other.Callback = type("Callback", (real.Callback,), {})
other.LightningModule, other.Trainer = real.LightningModule, real.Trainer
sys.modules["lightning"] = types.ModuleType("lightning")
sys.modules["lightning.pytorch"] = other
for name in [n for n in sys.modules if n.split(".")[0] == "pytorch_lightning"]:
    del sys.modules[name]
import flashmod.training.callbacks as ours
assert all(issubclass(getattr(ours, n), other.Callback) for n in
           ("StopOnNonFinite", "SafetensorsBest", "Throughput", "AttentionMeasurements"))
print("pytorch_lightning" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


TWO_RANKS = """
import itertools, sys, warnings
import pytorch_lightning as pl, torch, torch.distributed as dist
from flashmod.models import ModelConfig
from flashmod.training.callbacks import StopOnNonFinite, Throughput
from flashmod.training.module import LitModel
from flashmod.training.packing import PackedLoader
from flashmod.training.replay import state_kept
from flashmod.training.sampler import PackedBatchSampler

devices, path = int(sys.argv[1]), sys.argv[2]
documents = [bytes([i]) * (3 + 5 * (i % 4)) for i in range(9)]

class Model(LitModel):
    seen = []

    def training_step(self, batch, batch_idx):
        self.seen.extend(sorted(set(batch.targets.tolist())))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

def loader(shuffle):
    lengths = [len(d) for d in documents]
    sampler = PackedBatchSampler(lengths, tokens_per_batch=1000, shuffle=shuffle)
    return PackedLoader(documents, sampler)

torch.manual_seed(0)
model = Model(ModelConfig(num_layers=1, embed_dim=16, num_heads=2))
meter = Throughput(clock=itertools.count().__next__)
trainer = pl.Trainer(
    accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_steps=1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0,
    enable_model_summary=False, use_distributed_sampler=False,
    callbacks=[meter, StopOnNonFinite()],
)
trainer.fit(model, loader(True), loader(False))
seen = [model.seen]
if devices > 1:
    seen = [None] * devices
    dist.all_gather_object(seen, model.seen)
if trainer.is_global_zero:
    torch.save({
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]), "seen": seen,
        "val": trainer.callback_metrics["val/bits_per_byte"].item(), "rate": meter.tokens_per_s,
    }, path)
if devices > 1:  # gloo's threads may otherwise end the process with an error as it exits
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(TWO_RANKS)
    results = []
    for devices in ("1", "2"):
        done = subprocess.run(
            [sys.executable, str(script), devices, str(tmp_path / devices)],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        results.append(torch.load(tmp_path / devices, weights_only=True))
    one, two = results
    assert set(two["seen"][0]).isdisjoint(two["seen"][1])
    assert sorted(two["seen"][0] + two["seen"][1]) == one["seen"][0] == list(range(9))
    torch.testing.assert_close(two["weights"], one["weights"], rtol=1e-4, atol=1e-6)
    assert two["val"] == pytest.approx(one["val"], rel=1e-5)
    assert two["rate"] == one["rate"]
