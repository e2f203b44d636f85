"""Records and metrics are whole at every moment, whatever happens to the disk or the process."""

import csv
import errno
import json
import logging
import math
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from flashmod.training import environment
from flashmod.training.records import RunRecord, read_record
from flashmod.training.summary import summary_rows
from flashmod.training.tracking import MetricsCsv


def new_record(directory: Path) -> RunRecord:
    return RunRecord(
        directory,
        name="n",
        command=["flashmod-train", "seed=1"],
        overrides=["seed=1"],
        config={"seed": 1, "attention": {"kind": "flash"}, "trainer": {"accelerator": "cpu"}},
        seed=1,
    )


def on_disk(directory: Path) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (directory / "result.json").read_text(encoding="utf-8")
    return json.loads(text, parse_constant=refuse)


@contextmanager
def files_at_most(size: int):
    """No file can grow beyond ``size`` bytes: a full disk without a disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_record_runs_then_ends_ok(tmp_path):
    record = new_record(tmp_path / "run")
    record.start()
    assert on_disk(tmp_path / "run")["status"] == "running"
    record.update(summary={"val/bits_per_byte": 2.5}, predicted=["memory/x"])
    record.update(summary={"train/loss": torch.tensor(1.5)})
    record.finish("ok")
    content = on_disk(tmp_path / "run")
    assert content["summary"] == {"val/bits_per_byte": 2.5, "train/loss": 1.5}
    assert content["status"] == "ok" and content["error"] is None
    assert content["ended"] >= content["started"] and content["duration_s"] >= 0
    assert {"host", "cpu", "threads", "gpu", "driver", "commit"} <= content["environment"].keys()
    assert content["environment"]["versions"]["torch"] == torch.__version__
    assert read_record(tmp_path / "run") == content


def test_failure_is_recorded_with_its_traceback(tmp_path):
    record = new_record(tmp_path)
    record.start()
    try:
        raise KeyError("lost")
    except KeyError as error:
        record.finish("failed", error)
    error = on_disk(tmp_path)["error"]
    assert error["type"] == "KeyError" and "lost" in error["message"]
    assert "test_failure_is_recorded_with_its_traceback" in error["traceback"]


def test_numbers_that_json_lacks_become_null(tmp_path):
    record = new_record(tmp_path)
    record.update(summary={"a": math.nan, "b": -math.inf, "c": (1, 2.5)})
    assert on_disk(tmp_path)["summary"] == {"a": None, "b": None, "c": [1, 2.5]}


def test_a_full_disk_leaves_the_last_whole_record(tmp_path):
    record = new_record(tmp_path)
    record.start()
    before = (tmp_path / "result.json").read_bytes()
    with files_at_most(len(before)), pytest.raises(OSError, match=r"record.*result\.json") as full:
        record.update(summary={f"metric/{i}": float(i) for i in range(1000)})
    assert full.value.errno == errno.EFBIG
    assert (tmp_path / "result.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["result.json"]


def test_unreadable_records_are_none(tmp_path):
    assert read_record(tmp_path) is None
    for text in ("{", "[]", '{"schema_version": 2}'):
        (tmp_path / "result.json").write_text(text)
        assert read_record(tmp_path) is None


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_is_on_disk_at_once_and_new_metrics_add_columns(tmp_path):
    metrics = MetricsCsv(tmp_path / "metrics.csv")
    metrics.log_metrics({"train/loss": 2.0, "epoch": 0}, step=1)
    assert rows_of(metrics.path)[0]["train/loss"] == "2.0"
    metrics.log_metrics({"mine/value": 3, "train/loss": math.nan}, step=2)
    rows = rows_of(metrics.path)
    assert [row["step"] for row in rows] == ["1", "2"]
    assert [row["mine/value"] for row in rows] == ["", "3.0"]
    assert rows[0]["train/loss"] == "2.0" and rows[1]["train/loss"] == "nan"
    assert "epoch" not in rows[0]


def test_a_full_disk_ends_metrics_with_one_warning_and_a_whole_row(tmp_path, caplog):
    metrics = MetricsCsv(tmp_path / "metrics.csv")
    metrics.log_metrics({"train/loss": 1.0}, step=1)
    whole = metrics.path.read_bytes()
    with caplog.at_level(logging.WARNING), files_at_most(len(whole) + 10):
        for step in (2, 3):
            metrics.log_metrics({"train/loss": 1.0}, step=step)
        metrics.log_metrics({"another": 1.0}, step=4)
    assert metrics.path.read_bytes() == whole
    assert len(caplog.records) == 1 and "metrics.csv" in caplog.text


def test_summary_starts_with_the_device_and_marks_predictions(tmp_path):
    record = new_record(tmp_path)
    record.content["summary"] = {
        "val/bits_per_byte": 2.5,
        "data/unigram_entropy": 4.7,
        "throughput/tokens_per_s": 12345.6,
        "throughput/padding_saved": 0.25,
        "memory/attention_peak_mib": 1.5,
        "memory/dense_attention_peak_mib": 2048.0,
        "grad_error/out": 1e-7,
        "grad_error/dq": 2e-7,
        "grad_error/coverage": 0.5,
    }
    record.content["predicted"] = ["memory/dense_attention_peak_mib"]
    rows = dict(summary_rows(record.content))
    assert next(iter(rows)) == "device" and rows["device"].startswith("CPU: ")
    assert "2.500" in rows["bits per byte"] and "4.700" in rows["bits per byte"]
    assert rows["tokens/s"] == "12,346" and rows["padding saved"] == "25%"
    assert rows["attention peak"] == "1.50 MiB flash, 2,048.00 MiB dense (predicted)"
    assert "dq 2.0e-07" in rows["error"] and "50.0% of the query rows" in rows["error"]
    assert "step peak" not in rows
    record.content["config"] = {"attention": {"kind": "dense"}}
    assert dict(summary_rows(record.content))["padding computed"] == "25%"


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU here")
def test_an_nvidia_device_that_torch_cannot_use_is_told_with_the_remedy(monkeypatch):
    monkeypatch.setattr(environment, "nvidia_present", lambda: False)
    assert environment.unused_nvidia_gpu() is None
    monkeypatch.setattr(environment, "nvidia_present", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    hint = environment.unused_nvidia_gpu()
    assert torch.__version__ in hint and "without CUDA" in hint and "PIP_ARGS=" in hint
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(environment, "_cuda_error", lambda: "the driver is too old")
    hint = environment.unused_nvidia_gpu()
    assert "the driver is too old" in hint and "13.0" in hint and "PIP_ARGS=" in hint
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environment.unused_nvidia_gpu() is None


def test_another_rank_keeps_its_record_to_itself(tmp_path):
    record = RunRecord(
        tmp_path / "run", name="n", command=[], overrides=[], config={}, seed=0, write=False
    )
    record.start()
    record.finish("ok")
    assert record.content["status"] == "ok" and not (tmp_path / "run").exists()
