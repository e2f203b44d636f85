"""flashmod-train as a user meets it: ways to start it, wrong command lines, W&B, failures."""

import csv
import re
import socket
import sys
import time
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from launching import launch, only_run, record, wandb_runs

from flashmod.experiments import cli, console, interrupts
from flashmod.models import load

DEBUG = ("experiment=debug", "measure=none", "report=false")
KEY = "0" * 40

NO_GPU = [(["trainer.accelerator=gpu"], "trainer.accelerator=gpu", "trainer.accelerator=auto")]
WRONG = [
    (["sweep=lengths", "data.seq_len=64,128", "attention=flsh"], "attention=flsh", "flash"),
    (["attention.tiles=64,64"], "attention.tiles=64,64", "'attention.tiles=[64,64]'"),
    (["tiles=64,64"], "tiles=64,64", "'attention.tiles=[64,64]'"),
    (["tile=[64]"], "tile=[64]", "attention.tiles"),
    (["attention.tiles=[64]"], "attention.tiles=[64]", "'attention.tiles=[64,64]'"),
    (['attention.tiles="[64,64]"'], 'attention.tiles="[64,64]"', "a list of 2 whole numbers"),
    (["model.window=(-1,0)"], "model.window=(-1,0)", "a whole number or null"),
    (["window=(-1,0)"], "window=(-1,0)", "model.window"),
    (["model.window=-1"], "model.window is -1", "at least 0"),
    (["data.seq_len=[1"], "data.seq_len=[1", "a whole number"),
    (["data.seq_len"], "data.seq_len", "key=value"),
    (["foo"], "foo: unknown key", "key=value"),
    (["data.seq_len=foo"], "data.seq_len=foo", "data.seq_len=512"),
    (["data.seqlen=3"], "data.seqlen=3", "data.seq_len"),
    (["-m", "data.seqlen=3,4"], "data.seqlen=3", "data.seq_len"),
    (["+data.seqlen=3"], "data.seqlen=3", "data.seq_len"),
    (["modle=small"], "modle=small", "did you mean model?"),
    (["model=smal"], "model=smal", "did you mean small?"),
    (["model=small,tiny"], "model=small,tiny", "-m model=small,tiny"),
    (["-m", "model=smal,tiny"], "model=smal", "did you mean small?"),
    (["experiment=debgu"], "experiment=debgu", "did you mean debug?"),
    (["sweep=length"], "sweep=length", "did you mean lengths?"),
    (["data=files"], "data.glob", "missing"),
    (["data=synthetic", "data.glob=x"], "data.glob=x", "another"),
    (["data=files", "data.glob=/a(b)/*"], "data.glob=/a(b)/*", "quoted twice"),
    (["optimizer.lr=${nowhere}"], "nowhere", "not found"),
    (["ckpt_path=nope.ckpt"], "ckpt_path=nope.ckpt", "no such file"),
    (["data=files", "data.glob=nope/*"], "data.glob=nope/*", "matches no file"),
    *([] if torch.accelerator.is_available() else NO_GPU),
]


@pytest.mark.parametrize(("arguments", "told", "form"), WRONG, ids=[" ".join(w[0]) for w in WRONG])
def test_a_wrong_command_line_is_told_in_one_line(
    arguments, told, form, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flashmod-train", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capfd.readouterr()
    assert stop.value.code == 2
    first, line, *more = err.splitlines()
    assert "nothing was started" in first and not more
    assert told in line and form in line
    assert "-m attention.tiles=64,64" not in line  # would be two jobs, both wrong
    assert "Traceback" not in out + err and not list(tmp_path.rglob("result.json"))


def test_without_the_training_packages_the_command_names_the_extra(tmp_path):
    code = (
        "import sys; sys.modules['hydra'] = None\nfrom flashmod.experiments.cli import main; main()"
    )
    done = launch(tmp_path, command=(sys.executable, "-c", code))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "hydra" in line and "pip install 'flashmod[train]'" in line


@pytest.mark.parametrize("on_path", [False, True])
def test_the_report_command_can_be_typed_here(on_path, tmp_path, monkeypatch):
    folder = tmp_path / "env" / "bin"
    folder.mkdir(parents=True)
    (folder / "flashmod-report").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["env/bin/flashmod-train"])
    monkeypatch.setenv("PATH", str(folder) if on_path else "")
    typed = "flashmod-report" if on_path else "env/bin/flashmod-report"
    assert console.report_command() == typed


def test_help_names_every_group_and_version_is_short(monkeypatch, capsys):
    for words in (["--help"], ["experiment=debug", "-h"]):
        monkeypatch.setattr(sys, "argv", ["flashmod-train", *words])
        with pytest.raises(SystemExit, match="0"):
            cli.main()
        text = capsys.readouterr().out
        folders = [f.name for f in files("flashmod.configs").iterdir() if f.is_dir()]
        assert all(f in text for f in folders if f not in ("hydra", "__pycache__"))
        assert "lengths" in text and "WANDB_MODE" in text
    monkeypatch.setattr(sys, "argv", ["flashmod-train", "--version"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert re.fullmatch(r"flashmod-train \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_debug_run_leaves_everything_a_reader_needs(tmp_path):
    own = ["experiment=debug", "report=false", "name='Ünïcode'"]
    done = launch(tmp_path, *own, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    content = record(run)
    assert content["name"] == "Ünïcode"
    assert content["status"] == "ok" and content["overrides"] == own
    summary = content["summary"]
    for name in ("out", "dq", "dk", "dv"):
        assert summary[f"grad_error/{name}"] < 1e-5
    assert summary["memory/attention_peak_mib"] < summary["memory/dense_attention_peak_mib"]
    assert summary["throughput/tokens_per_s"] > 0 and summary["grad_error/coverage"] == 1.0
    lines = done.stdout.splitlines()
    assert lines[1].split()[0] == "device"
    for told in (
        "unigram entropy",
        "tokens/s",
        "padding saved",
        "attention peak",
        "dq",
        str(run.name),
    ):
        assert told in done.stdout
    assert len(wandb_runs(tmp_path)) == 1
    assert not [line for line in done.stderr.splitlines() if "warn" in line.lower()], done.stderr
    model = load(run)
    tokens = torch.randint(256, (5,))
    assert model(tokens, torch.tensor([0, 5], dtype=torch.int32)).isfinite().all()
    checkpoint = torch.load(run / content["files"]["checkpoint"], weights_only=True)
    assert checkpoint["global_step"] == 3


def test_equal_seeds_give_equal_losses(tmp_path):
    for name in ("a", "b"):
        done = launch(tmp_path, *DEBUG, f"hydra.run.dir={name}", WANDB_MODE="disabled")
        assert done.returncode == 0, done.stderr
    losses = [record(tmp_path / name)["summary"]["train/loss"] for name in ("a", "b")]
    assert losses[0] == losses[1]
    assert not wandb_runs(tmp_path)


def test_the_last_step_is_validated_between_two_intervals(tmp_path):
    done = launch(tmp_path, *DEBUG, "trainer.max_steps=5", "trainer.val_every=2")
    assert done.returncode == 0, done.stderr
    with (only_run(tmp_path) / "metrics.csv").open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["val/bits_per_byte"]]
    assert [int(row["step"]) for row in rows] == [1, 3, 4]


@pytest.mark.slow
def test_two_ranks_leave_one_record(tmp_path):
    ranks = ("trainer.devices=2", "trainer.strategy=ddp", "trainer.accelerator=cpu")
    done = launch(tmp_path, *DEBUG, *ranks, "data.documents=200", WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    assert record(only_run(tmp_path))["status"] == "ok" and len(wandb_runs(tmp_path)) == 1
    assert done.stdout.count("tokens/s") == 1


@pytest.mark.slow
def test_script_path_trains_as_the_console_script_does(tmp_path):
    script = Path(str(files("flashmod.experiments"))) / "train.py"
    done = launch(tmp_path, *DEBUG, command=(sys.executable, str(script)), WANDB_MODE="disabled")
    assert done.returncode == 0, done.stderr
    assert record(only_run(tmp_path))["status"] == "ok"


def test_a_failing_run_keeps_its_traceback_in_record_and_log(tmp_path):
    done = launch(tmp_path, *DEBUG, "optimizer.lr=1e30", WANDB_MODE="disabled")
    assert done.returncode == 1
    assert "FloatingPointError" in done.stderr and "Traceback" not in done.stderr
    run = only_run(tmp_path)
    content = record(run)
    assert content["status"] == "failed" and "Traceback" in content["error"]["traceback"]
    assert "Traceback" in (run / "train.log").read_text()


@pytest.fixture
def silent_server():
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


ONLINE = {
    "no key": ({}, "127.0.0.1:9"),
    "refused": ({"WANDB_API_KEY": KEY}, "cannot be reached"),
}


@pytest.mark.parametrize("case", ONLINE)
def test_online_that_cannot_start_is_one_warning_and_an_offline_run(case, tmp_path):
    variables, told = ONLINE[case]
    began = time.monotonic()
    done = launch(
        tmp_path, *DEBUG, WANDB_MODE="online", WANDB_BASE_URL="http://127.0.0.1:9", **variables
    )
    assert done.returncode == 0 and time.monotonic() - began < 120
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1 and told in warnings[0] and "WANDB_MODE=offline" in warnings[0]
    assert len(wandb_runs(tmp_path)) == 1 and record(only_run(tmp_path))["status"] == "ok"


@pytest.mark.slow
def test_a_server_that_never_answers_delays_a_sweep_once(tmp_path, silent_server):
    done = launch(
        tmp_path, "-m", *DEBUG, "seed=0,1", "logger.wandb.init_timeout=3",
        WANDB_MODE="online", WANDB_BASE_URL=silent_server, WANDB_API_KEY=KEY,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot start") == 1
    assert len(wandb_runs(tmp_path)) == 2


def test_the_first_signal_raises_and_later_ones_wait():
    import os
    import signal

    before = signal.getsignal(signal.SIGTERM)
    with interrupts.raising():
        with pytest.raises(interrupts.Interrupted) as stop, interrupts.raising():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.value.exit_code == 143 and "SIGTERM" in str(stop.value)
    assert signal.getsignal(signal.SIGTERM) is before
