"""Every config file on disk composes, fits the schema, runs a step, and shows a right command."""

import re
import shlex
from importlib.resources import files
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from flashmod.experiments.runs import train
from flashmod.training.forms import form_of, keys_of, nearest
from flashmod.training.records import read_record
from flashmod.training.schema import ConfigError, build
from flashmod.training.settings import TrainConfig

ROOT = Path(str(files("flashmod.configs")))
FILES = sorted(str(p.relative_to(ROOT).with_suffix("")) for p in ROOT.rglob("*.yaml"))
SMALL = [
    "trainer.max_steps=1", "trainer.val_every=1", "trainer.val_batches=1", "trainer.log_every=1",
    "trainer.accelerator=cpu", "optimizer.warmup_steps=0", "data.documents=16", "report=false",
]  # fmt: skip


def composed(overrides: list[str]) -> dict:
    with initialize_config_module("flashmod.configs", version_base="1.3"):
        config = compose("train", overrides)
    return OmegaConf.to_container(config, resolve=True)


def chosen(name: str, tmp_path: Path) -> list[str]:
    """The overrides that select config file ``name``."""
    group, _, choice = name.rpartition("/")
    overrides = [f"{group}={choice}"] if group else []
    if name == "data/files":
        for i in range(8):
            (tmp_path / f"{i}.txt").write_text(f"document {i} " * 8)
        overrides.append(f"data.glob='{tmp_path}/*.txt'")
    return overrides


def base(kind: dict | None = None) -> dict:
    return {"model": {}, "data": {}, "batch": {"tokens": 4096}, **(kind or {})}


def test_there_are_config_files():
    assert {"train", "experiment/debug", "experiment/dense_baseline", "sweep/lengths"} <= {*FILES}


@pytest.mark.parametrize("name", FILES)
def test_config_file_runs_a_step(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = chosen(name, tmp_path)
    quick = [] if name.startswith(("measure", "experiment", "sweep")) else ["measure=none"]
    quick += [] if name.startswith(("data", "experiment", "sweep")) else ["data=synthetic"]
    values = composed([*quick, *own, *SMALL])
    record = train(values, tmp_path / "run", overrides=own, group=None, log=tmp_path / "log")
    assert record["status"] == "ok"
    assert read_record(tmp_path / "run")["config"] == values
    assert record["summary"]["val/bits_per_byte"] > 0
    for key in ("metrics", "weights", "checkpoint"):
        assert (tmp_path / "run" / record["files"][key]).is_file()


@pytest.mark.parametrize("name", FILES)
def test_config_file_starts_with_commands_that_compose(name):
    text = (ROOT / f"{name}.yaml").read_text()
    comment = re.match(r"(#.*\n)+", text).group()
    commands = re.findall(r"^#   (?:\w+=\w+ )?flashmod-train ?(.*?)(?:    .*)?$", comment, re.M)
    assert commands
    for command in commands:
        words = [word for word in shlex.split(command) if word != "-m"]
        parsed = OverridesParser.create().parse_overrides(words)
        (batch,) = BasicSweeper.split_arguments(parsed, None)
        for overrides in batch:
            build(TrainConfig, composed(list(overrides)))


def test_sweep_of_lengths_keeps_the_number_of_sequences():
    with initialize_config_module("flashmod.configs", version_base="1.3"):
        config = compose("train", ["sweep=lengths"], return_hydra_config=True)
    assert config.hydra.mode.name == "MULTIRUN"
    assert dict(config.hydra.sweeper.params) == {
        "attention": "flash,dense",
        "data.seq_len": "128,256,512,1024",
    }
    assert config.data.lengths == "fixed" and config.data.name == "synthetic"
    assert config.batch.sequences and config.batch.tokens is None


WRONG = [
    ({"modle": {}}, "modle={}", "did you mean model?"),
    ({"data": {"seqlen": 3}}, "data.seqlen=3", "did you mean data.seq_len?"),
    ({"data": {"seq_len": "foo"}}, "data.seq_len=foo", "a whole number is needed"),
    ({"data": {"seq_len": 2.5}}, "data.seq_len=2.5", "a whole number is needed"),
    ({"data": {"seq_len": 0}}, "data.seq_len is 0", "at least 1"),
    ({"data": {"seq_len": 8192}}, "batch.tokens=4096", "data.seq_len=8192"),
    ({"data": 3}, "data=3", "a group of values"),
    ({"data": {"name": "files", "glob": "???"}}, "data.glob", "missing"),
    ({"attention": {"tiles": [64]}}, "attention.tiles=[64]", "'attention.tiles=[64,64]'"),
    ({"attention": {"tiles": 64}}, "attention.tiles=64", "'attention.tiles=[64,64]'"),
    ({"attention": {"tiles": "[64,64]"}}, 'attention.tiles="[64,64]"', "a list of 2 whole numbers"),
    ({"attention": {"tiles": [0, 64]}}, "attention.tiles=[0,64]", ">= 1"),
    ({"attention": {"kind": "dens"}}, "attention.kind=dens", "one of flash, sdpa, dense"),
    ({"attention": {"kind": "dense", "tiles": [64, 64]}}, "attention.tiles=[64,64]", "flash"),
    ({"optimizer": {"lr": -1}}, "optimizer.lr=-1", "a number >= 0"),
    ({"optimizer": {"lr": "big"}}, "optimizer.lr=big", "optimizer.lr=0.001"),
    ({"trainer": {"max_steps": True}}, "trainer.max_steps=true", "a whole number >= 1"),
    ({"trainer": {"precision": 32}}, "trainer.precision=32", "32-true"),
    ({"model": {"embed_dim": 33}}, "model.embed_dim=33", "multiple of 8"),
    ({"model": {"dropout": 2.0}}, "model.dropout is 2.0", "between 0 and 1"),
    ({"seed": None}, "seed=null", "a whole number"),
    ({"report": "yes"}, "report=yes", "true or false"),
    ({"logger": {"wandb": {"mode": "on"}}}, "logger.wandb.mode=on", "offline, online, disabled"),
    ({"batch": {"tokens": 1, "sequences": 1}}, "batch.sequences=1", "leave the other null"),
]


@pytest.mark.parametrize(("values", "told", "form"), WRONG, ids=[w[1] for w in WRONG])
def test_a_wrong_value_is_told_with_its_key_and_the_right_form(values, told, form):
    with pytest.raises(ConfigError) as caught:
        build(TrainConfig, base(values))
    (line,) = caught.value.problems
    assert told in line and form in line


def test_all_mistakes_are_told_at_once():
    values = base({"seed": "a", "data": {"seq_len": "b", "x": 1}})
    with pytest.raises(ConfigError) as caught:
        build(TrainConfig, values)
    assert len(caught.value.problems) == 3


def test_right_values_keep_their_types():
    config = build(TrainConfig, base({"attention": {"tiles": [32, 64]}, "optimizer": {"lr": 1}}))
    assert config.attention.tiles == (32, 64)
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)
    assert (
        build(TrainConfig, base({"attention": {"tiles": [32, 64, 4, 2]}})).attention.tiles[2] == 4
    )


def test_every_key_has_a_form_and_is_nearest_to_itself():
    keys = keys_of(TrainConfig)
    for key in keys:
        assert key in form_of(TrainConfig, key)
        assert f" {key}?" in nearest(key, keys)
    assert form_of(TrainConfig, "data") is None and form_of(TrainConfig, "data.x") is None
