"""Sweeps: a failing job ends itself only, a repeated sweep resumes, a signal stops all of it."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import COMMAND, environment, launch, record, wandb_records, wandb_runs
from omegaconf import OmegaConf

from flashmod.experiments import sweeps

DEBUG = ("experiment=debug", "measure=none", "report=false")


def write_record(directory: Path, config: dict, status: str = "ok") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    content = {"schema_version": 1, "status": status, "config": config}
    (directory / "result.json").write_text(json.dumps(content))


def test_done_jobs_are_found_by_their_configuration(tmp_path):
    write_record(tmp_path / "0", {"seed": 1, "logger": {"wandb": None}, "tiles": [1, 2]})
    write_record(tmp_path / "1", {"seed": 2}, status="failed")
    wanted = {"seed": 1, "logger": {"wandb": {"mode": "offline"}}, "tiles": [1, 2], "name": "x"}
    assert sweeps.find_done(tmp_path, wanted) == tmp_path / "0"
    assert sweeps.find_done(tmp_path, {"seed": 2}) is None
    assert sweeps.find_done(tmp_path, {"seed": 1}) is None
    assert sweeps.find_done(tmp_path / "missing", wanted) is None


def test_a_good_result_of_another_configuration_is_not_overwritten(tmp_path):
    assert sweeps.free_directory(tmp_path / "0") == tmp_path / "0"
    write_record(tmp_path / "0", {}, status="interrupted")
    assert sweeps.free_directory(tmp_path / "0") == tmp_path / "0"
    write_record(tmp_path / "0", {})
    write_record(tmp_path / "0_2", {})
    assert sweeps.free_directory(tmp_path / "0") == tmp_path / "0_3"


def test_journal_tells_the_last_state_of_every_job(tmp_path):
    lines = [(1, "running"), (0, "running"), (0, "ok")]
    for job, status in lines:
        sweeps._note(tmp_path, sweeps.Entry(job, [f"seed={job}"], status, str(tmp_path)))
    first, second = sweeps.read_journal(tmp_path)
    assert (first.job, first.status) == (0, "ok")
    assert (second.job, second.status) == (1, "lost") and second.error
    assert sweeps.read_journal(tmp_path / "missing") == []


def test_parallel_jobs_share_the_cores(monkeypatch):
    monkeypatch.setattr(sweeps, "DEFAULT_THREADS", 8)
    monkeypatch.setattr(sweeps, "cores", lambda: 8)
    target = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
    for jobs, share in ((1, 8), (3, 2), (-1, 1), (80, 1)):
        launcher = OmegaConf.create({"_target_": target, "n_jobs": jobs})
        assert sweeps.threads_for(None, launcher) == share
        assert sweeps.threads_for(1, launcher) == 1
    basic = {"_target_": "hydra._internal.BasicLauncher"}
    assert [sweeps.threads_for(n, basic) for n in (None, 3, 99)] == [8, 3, 8]


def history(records: list[Any]) -> list[tuple[str, Any]]:
    return [
        (item.key or "/".join(item.nested_key), json.loads(item.value_json))
        for r in records
        if r.WhichOneof("record_type") == "history"
        for item in r.history.item
    ]


@pytest.fixture(scope="module")
def failing_sweep(tmp_path_factory):
    """Three jobs; the middle one meets a loss that is not finite."""
    directory = tmp_path_factory.mktemp("sweep")
    arguments = ("-m", *DEBUG, "optimizer.lr=0.001,1e30,0.002", "hydra.sweep.dir=s")
    return directory, launch(directory, *arguments, WANDB_MODE="offline"), arguments


@pytest.mark.xdist_group("sweep")
def test_a_failing_job_is_shown_and_the_others_go_on(failing_sweep):
    directory, done, _ = failing_sweep
    assert done.returncode == 3, done.stderr
    assert [record(directory / "s" / str(i))["status"] for i in range(3)] == ["ok", "failed", "ok"]
    told = done.stderr.index("optimizer.lr=1e+30) failed: the ")
    assert done.stderr.index("job 1 (") < told < done.stderr.index("job 2 (")
    log = (directory / "s" / "1" / "train.log").read_text()
    assert "Traceback" in log and "FloatingPointError" in log and "optimizer.lr=1e+30" in log
    assert "Traceback" not in done.stderr + done.stdout
    table = done.stdout[done.stdout.index("Sweep in s") :].splitlines()
    assert "optimizer.lr=1e+30" in table[3] and "failed" in table[3]
    assert "FloatingPointError" in table[3] and "experiment=debug" not in table[3]
    assert "2 of 3 jobs" in done.stdout
    error = record(directory / "s" / "1")["error"]
    assert error["type"] == "FloatingPointError" and "Traceback" in error["traceback"]


@pytest.mark.xdist_group("sweep")
def test_every_job_has_a_finished_wandb_run_of_its_own(failing_sweep):
    directory, _, _ = failing_sweep
    ids = set()
    for job, (lr, steps, code) in enumerate([(0.001, 3, 0), (1e30, 1, 1), (0.002, 3, 0)]):
        folder = directory / "s" / str(job)
        records = wandb_records(folder / record(folder)["files"]["wandb"])
        (run,) = (r.run for r in records if r.WhichOneof("record_type") == "run")
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["optimizer"]["lr"] == lr and run.run_group == "s"
        assert run.display_name.endswith(f"optimizer.lr={OmegaConf.create([lr])[0]}")
        ids.add(run.run_id)
        logged = [value for name, value in history(records) if name == "train/loss"]
        assert len(logged) == steps if code == 0 else len(logged) <= steps
        # finish() alone writes an exit record, the last of the file.
        assert records[-1].WhichOneof("record_type") in ("exit", "footer")
        (ended,) = (r.exit for r in records if r.WhichOneof("record_type") == "exit")
        assert ended.exit_code == code
    assert len(ids) == len(wandb_runs(directory)) == 3


@pytest.mark.xdist_group("sweep")
def test_a_repeated_sweep_skips_what_is_done(failing_sweep):
    directory, _, arguments = failing_sweep
    ended = [record(directory / "s" / str(i))["ended"] for i in range(3)]
    again = launch(directory, *arguments[:-2], "optimizer.lr=1e30,0.002,0.001", "hydra.sweep.dir=s")
    assert again.returncode == 3
    assert again.stderr.count("skipped") == 2
    assert [record(directory / "s" / str(i))["ended"] for i in (0, 2)] == [ended[0], ended[2]]
    assert record(directory / "s" / "0_2")["status"] == "failed"


@pytest.mark.slow
def test_parallel_jobs_have_one_thread_and_one_record_each(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    parallel = (
        "trainer.threads=null",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=-1",
        "hydra.sweep.dir=s",
    )
    done = launch(tmp_path, "-m", *DEBUG, "optimizer.lr=0.001,1e30,0.002", *parallel)
    assert done.returncode == 3, done.stderr
    records = [record(tmp_path / "s" / str(i)) for i in range(3)]
    assert [r["status"] for r in records] == ["ok", "failed", "ok"]
    assert {r["environment"]["threads"] for r in records} == {1}
    assert all(r["command"][1] == "-m" for r in records)
    assert "2 of 3 jobs" in done.stdout and len(wandb_runs(tmp_path)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_sweep_and_loses_nothing(tmp_path, number):
    arguments = ("-m", *DEBUG, "seed=1,2,3", "hydra.sweep.dir=s", "trainer.max_steps=100000")
    process = subprocess.Popen(
        [*COMMAND, *arguments, "trainer.val_every=5"],
        cwd=tmp_path,
        env=environment(tmp_path, WANDB_MODE="offline"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    metrics = tmp_path / "s" / "0" / "metrics.csv"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 20:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    process.send_signal(number)  # impatience must not cut the clean-up short
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    content = record(tmp_path / "s" / "0")
    assert content["status"] == "interrupted" and signal.Signals(number).name in output
    assert not (tmp_path / "s" / "1").exists()
    assert metrics.read_text().endswith("\n") and metrics.read_text().count("\n") >= 20
    last = torch.load(tmp_path / "s" / "0" / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] > 0
    assert len(wandb_runs(tmp_path)) == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
