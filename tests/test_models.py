"""The small Transformer: one model under three attentions, packed as if computed alone."""

import json
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from flashmod import models
from flashmod.intercept import intercepting
from flashmod.models import ATTENTION, ModelConfig, Transformer, build_attention
from flashmod.models.rotary import positions, rotary, rotate
from flashmod.training.packing import pack

SMALL = ModelConfig(embed_dim=16, num_heads=2)
GROUPED = ModelConfig(embed_dim=32, num_heads=4, num_kv_heads=2, window=5)
BATCH = pack([b"hello, world", b"a", b"def f(x):\n    return x\n"])


def make(config: ModelConfig, attention: str = "flash", **kwargs) -> Transformer:
    torch.manual_seed(0)
    return Transformer(config, attention, **kwargs)


@pytest.mark.parametrize("config", [SMALL, GROUPED])
@pytest.mark.parametrize("other", ["sdpa", "dense"])
def test_attention_kinds_agree(config, other) -> None:
    flash, twin = make(config).double(), make(config, other).double()
    assert list(flash.state_dict()) == list(twin.state_dict())
    twin.load_state_dict(flash.state_dict())
    results = []
    for model in (flash, twin):
        logits = model(BATCH.tokens, BATCH.cu_seqlens)
        F.cross_entropy(logits, BATCH.targets).backward()
        results.append([logits, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_each_kind_computes_its_own_way() -> None:
    for kind in ATTENTION:
        seen = []

        def watch(request, seen=seen):
            seen.append(request.kind)
            return request.run(request.q, request.k, request.v, **request.kwargs)

        with intercepting(watch):
            make(SMALL, kind)(BATCH.tokens, BATCH.cu_seqlens)
        assert seen == [kind] * SMALL.num_layers


def test_packed_documents_do_not_see_each_other() -> None:
    model = make(GROUPED)
    logits = model(BATCH.tokens, BATCH.cu_seqlens)
    bounds = BATCH.cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        alone = model(BATCH.tokens[start:end], torch.tensor([0, end - start], dtype=torch.int32))
        torch.testing.assert_close(logits[start:end], alone, rtol=1e-5, atol=1e-6)


def test_no_byte_sees_the_future_or_beyond_the_window() -> None:
    one_layer = ModelConfig(embed_dim=16, num_heads=2, num_layers=1, window=3)
    model = make(one_layer)
    tokens = torch.arange(10)
    cu_seqlens = torch.tensor([0, 10], dtype=torch.int32)
    changed = tokens.clone()
    changed[4] = 200
    difference = model(tokens, cu_seqlens) - model(changed, cu_seqlens)
    touched = difference.abs().amax(1) > 1e-7
    assert touched.tolist() == [4 <= i <= 4 + 3 for i in range(10)]


def test_order_within_a_document_matters() -> None:
    model = make(ModelConfig(embed_dim=16, num_heads=2, num_layers=1))
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
    last = model(torch.tensor([1, 2, 3, 9]), cu_seqlens)[-1]
    swapped = model(torch.tensor([2, 1, 3, 9]), cu_seqlens)[-1]
    assert (last - swapped).abs().max() > 1e-5


def test_positions_restart_in_every_document() -> None:
    cu_seqlens = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32)
    assert positions(cu_seqlens, 6).tolist() == [0, 1, 2, 0, 0, 1]
    assert positions(cu_seqlens, 8).tolist() == [0, 1, 2, 0, 0, 1, 0, 1]  # two slack rows


def test_rotation_depends_on_the_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64).expand(2, 40, 1, 8)
    by = rotary(torch.tensor([0, 40], dtype=torch.int32), 40, 8, 10_000.0)
    scores = (rotate(q, by)[:, 0] @ rotate(k, by)[:, 0].mT).contiguous()
    for offset in (0, 1, 17):
        diagonal = scores.diagonal(-offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)
    assert scores.std() > 0.1
    assert rotate(q.bfloat16(), by).dtype == torch.bfloat16
    torch.testing.assert_close(rotate(q, by)[0], q[0])


def test_slack_rows_change_nothing() -> None:
    model = make(SMALL)
    tokens = torch.cat([BATCH.tokens, torch.randint(256, (7,))])
    logits = model(tokens, BATCH.cu_seqlens)[:-7]
    torch.testing.assert_close(logits, model(BATCH.tokens, BATCH.cu_seqlens))


def test_dropout_while_training_only() -> None:
    model = make(ModelConfig(embed_dim=16, num_heads=2, dropout=0.5))
    run = lambda: model(BATCH.tokens, BATCH.cu_seqlens)  # noqa: E731
    assert not torch.equal(run(), run())
    model.eval()
    assert torch.equal(run(), run())


def test_backend_and_tiles_reach_flash_attention() -> None:
    module = build_attention("flash", SMALL, backend="tiled", tiles=[16, 32])
    assert module.backend == "tiled"
    assert module.tiles[:2] == (16, 32)
    model = make(SMALL, backend="tiled", tiles=[16, 16, 4, 2])
    torch.testing.assert_close(
        model(BATCH.tokens, BATCH.cu_seqlens), make(SMALL)(BATCH.tokens, BATCH.cu_seqlens)
    )


# torch's own tracing of an autograd Function warns so.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_without_a_break_and_once() -> None:
    model = make(ModelConfig(embed_dim=16, num_heads=2, num_layers=1))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for documents in ([b"hello, world", b"abc"], [b"a", b"bc" * 11], [b"xyz" * 5] * 3):
            batch = pack(documents)
            torch.testing.assert_close(
                compiled(batch.tokens, batch.cu_seqlens), model(batch.tokens, batch.cu_seqlens)
            )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"embed_dim": 20, "num_heads": 4}, "embed_dim=20 .* num_heads=4 .* multiple of 8"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"window": -1}, "window is -1"),
    ],
)
def test_config_errors_name_the_values(values, message) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**values)


def test_factory_errors() -> None:
    with pytest.raises(ValueError, match="'flesh'; it must be one of flash, sdpa, dense"):
        build_attention("flesh", SMALL)
    with pytest.raises(ValueError, match="attention=sdpa has no backend and no tiles"):
        build_attention("sdpa", SMALL, backend="tiled")
    with pytest.raises(ValueError, match="'depth'; known are vocab_size"):
        ModelConfig.from_dict({"depth": 3})


# Saving and loading


@pytest.fixture
def run_dir(tmp_path):
    model = make(GROUPED, "dense")
    models.save(model.state_dict(), tmp_path / "best.safetensors")
    config = {"model": GROUPED.to_dict(), "attention": {"kind": "dense"}}
    (tmp_path / "result.json").write_text(json.dumps({"config": config}))
    return tmp_path


def test_load_rebuilds_the_trained_model(run_dir) -> None:
    trained = make(GROUPED, "dense").eval()
    for path in (run_dir, str(run_dir)):
        model = models.load(path)
        assert not model.training
        assert model.config == GROUPED
        assert type(model.blocks[0].attention) is ATTENTION["dense"]
        assert torch.equal(
            model(BATCH.tokens, BATCH.cu_seqlens), trained(BATCH.tokens, BATCH.cu_seqlens)
        )
    flash = models.load(run_dir, attention="flash")
    assert type(flash.blocks[0].attention) is ATTENTION["flash"]


def test_save_takes_shared_and_strided_tensors(tmp_path) -> None:
    weight = torch.randn(4, 3)
    models.save({"a": weight, "tied": weight, "t": weight.T}, tmp_path / "new" / "w.safetensors")
    loaded = load_file(tmp_path / "new" / "w.safetensors")
    assert torch.equal(loaded["tied"], weight) and torch.equal(loaded["t"], weight.T)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize("name", ["result.json", "best.safetensors"])
def test_load_names_the_missing_file(run_dir, name) -> None:
    (run_dir / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing"):
        models.load(run_dir)


def test_load_explains_a_record_that_does_not_fit(run_dir) -> None:
    record = run_dir / "result.json"
    record.write_text(json.dumps({"config": {"data": {}}}))
    with pytest.raises(
        ValueError, match=r"holds no config.model to build from; its config has data"
    ):
        models.load(run_dir)
    record.write_text(json.dumps({"config": {"model": SMALL.to_dict()}}))
    with pytest.raises(ValueError, match=r"best.safetensors does not fit config.model"):
        models.load(run_dir)


def test_import_needs_torch_only() -> None:
    code = (
        "import sys, flashmod.models\n"
        "print(sorted({'safetensors', 'pytorch_lightning', 'hydra', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
