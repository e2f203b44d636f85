"""The report's sentences and groups come from the records, whatever state those are in."""

import json
import re

import pytest
from report_records import DENSE_TWIN, METRICS, record, specs, sweep, values

from flashmod import report
from flashmod.report.findings import findings
from flashmod.report.records import read
from flashmod.report.series import Variants, memory_points, points

pytest.importorskip("altair")
pytest.importorskip("vl_convert")


def sentences(folder):
    return {finding.topic: finding for finding in findings(read([folder]))}


def test_sentences_carry_the_numbers_of_the_records(tmp_path):
    found = sentences(sweep(tmp_path))
    assert "At 1,024 tokens flash attention peaks at 4.0 MiB" in found["Memory"].text
    assert "dense needs 99.0 MiB (measured): 25x less" in found["Memory"].text
    assert "(from 512 to 1,024 tokens)" in found["Growth"].text
    assert "2.0x for flash and 3.9x for dense." in found["Growth"].text
    assert "3e-7 (dk" in found["Gradients"].text and "under the target of 1e-5" in (
        found["Gradients"].text
    )
    assert "250,000 tokens/s with flash and 10,101 with dense: 25x the speed" in found["Speed"].text
    assert "on Some CPU, 2 threads" in found["Speed"].text
    assert "2.50 bits per byte (best of 6 runs), below the unigram entropy, 4.90" in (
        found["Learning"].text
    )
    assert found["Runs"].text == "All 6 finished."


def test_a_prediction_is_called_one_and_never_replaces_a_measurement(tmp_path):
    record(tmp_path / "a", length=1024)
    record(tmp_path / "b", length=4096, predicted=[DENSE_TWIN])
    memory = sentences(tmp_path)["Memory"].text
    assert memory.index("(measured): 25x") < memory.index("(predicted from the closed form")
    assert "4.0x for dense (predicted)" in sentences(tmp_path)["Growth"].text
    rows = values(specs(report.write([tmp_path]))["memory"])
    hollow = {(row["series"], row["x"]) for row in rows if row["predicted"]}
    assert hollow == {("dense twin", 4096)}


def test_too_little_data_is_said_and_nothing_is_invented(tmp_path):
    record(tmp_path / "a", attention="sdpa", summary={"data/seq_len": 64, "train/loss": None})
    found = sentences(tmp_path)
    for topic in ("Memory", "Growth", "Gradients", "Speed"):
        assert found[topic].tone == "missing"
        assert not re.search(r"\d (MiB|tokens/s)|\dx", found[topic].text)
    assert "Learning" not in found


@pytest.mark.parametrize(
    ("precision", "tone", "words"),
    [("32-true", "bad", "NOT under the target"), ("bf16-mixed", "plain", "precision bf16-mixed")],
)
def test_an_error_is_judged_in_fp32_only(tmp_path, precision, tone, words):
    record(
        tmp_path / "a",
        metrics={"grad_error/dv": 2e-3, "grad_error/coverage": 0.25},
        config__trainer={"precision": precision},
    )
    found = sentences(tmp_path)["Gradients"]
    assert (found.tone, words in found.text) == (tone, True)
    assert "2e-3 (dv" in found.text and "At least 25% of the rows" in found.text


def test_worse_memory_and_learning_are_not_praised(tmp_path):
    record(tmp_path / "a", metrics={"memory/attention_peak_mib": 100.0, "val/bits_per_byte": 6.0})
    found = sentences(tmp_path)
    assert found["Memory"].tone == "bad" and "x more" in found["Memory"].text
    assert found["Learning"].tone == "bad" and "NOT below" in found["Learning"].text


def test_lengths_at_which_dense_wins_are_named(tmp_path):
    sweep(tmp_path, lengths=(1024,))
    for length in (64, 128):
        for kind, (memory, speed) in {"flash": (9.0, 10.0), "dense": (1.0, 20.0)}.items():
            record(
                tmp_path / f"{kind}{length}",
                attention=kind,
                length=length,
                metrics={
                    "memory/attention_peak_mib": memory,
                    DENSE_TWIN: 1.0,
                    "throughput/tokens_per_s": speed,
                },
            )
    found = sentences(tmp_path)
    assert "At 1,024 tokens" in found["Memory"].text and "At 1,024 tokens" in found["Speed"].text
    assert "At 64 and 128 tokens flash needs more." in found["Memory"].text
    assert "At 64 and 128 tokens dense is faster." in found["Speed"].text


def test_a_few_steps_are_not_blamed_for_learning_nothing(tmp_path):
    record(tmp_path / "a", metrics={"val/bits_per_byte": 6.0}, config__trainer={"max_steps": 4})
    found = sentences(tmp_path)["Learning"]
    assert found.tone == "plain" and "after 4 steps, NOT below" in found.text


def test_each_device_gets_its_own_speed(tmp_path):
    sweep(tmp_path / "cpu")
    for kind in ("flash", "dense"):
        record(
            tmp_path / kind,
            attention=kind,
            environment__gpu="Fast GPU",
            metrics={"throughput/tokens_per_s": {"flash": 9e6, "dense": 3e6}[kind]},
        )
    speeds = [f.text for f in findings(read([tmp_path])) if f.topic == "Speed"]
    assert len(speeds) == 2 and "3.0x the speed (one run each), on Fast GPU." in speeds[0]
    assert "25x the speed (one run each), on Some CPU, 2 threads." in speeds[1]


def test_repeats_become_a_median_with_spread_and_other_workloads_stay_apart(tmp_path):
    for seed, value in enumerate((1.0, 2.0, 9.0)):
        record(
            tmp_path / f"s{seed}", metrics={"memory/attention_peak_mib": value}, config__seed=seed
        )
    record(tmp_path / "wide", config__model={"embed_dim": 64})
    runs = read([tmp_path]).measured
    found = points(runs, "memory/attention_peak_mib", Variants(runs))
    narrow = next(point for point in found if point.workload == "embed_dim=32")
    assert (narrow.value, narrow.low, narrow.high, narrow.runs) == (2.0, 1.0, 9.0, 3)
    assert {point.workload for point in found} == {"embed_dim=32", "embed_dim=64"}


def test_a_token_budget_that_grows_with_the_length_is_one_workload(tmp_path):
    runs = read([sweep(tmp_path)]).measured
    assert {Variants(runs).workload(run) for run in runs} == {""}
    assert {point.series for point in memory_points(runs, Variants(runs))} == {
        "flash",
        "dense",
        "dense twin",
    }


def test_tiles_are_told_apart(tmp_path):
    for tiles in ([32, 32], [64, 64]):
        record(tmp_path / str(tiles[0]), config__attention={"kind": "flash", "tiles": tiles})
    runs = read([tmp_path]).measured
    found = points(runs, "throughput/tokens_per_s", Variants(runs))
    assert [point.series for point in found] == ["flash (tiles 32x32)", "flash (tiles 64x64)"]


def test_runs_that_did_not_finish_are_listed_and_left_out(tmp_path):
    sweep(tmp_path)
    record(
        tmp_path / "f",
        attention="dense",
        length=2048,
        status="failed",
        error={"type": "MemoryError", "message": "needs 9 GiB", "traceback": "Traceback: x"},
    )
    for status in ("running", "interrupted"):
        record(
            tmp_path / status,
            length=4096,
            status=status,
            summary={"data/seq_len": 4096, "memory/attention_peak_mib": 16.0, DENSE_TWIN: 99.0},
        )
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/result.json").write_text('{"schema_version": 1, "stat')
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary/result.json").write_bytes(b"\xff\xfe\x00")
    record(tmp_path / "newer", schema_version=2)
    found = sentences(tmp_path)
    assert "1,024 tokens" in found["Memory"].text and found["Runs"].tone == "bad"
    assert "6 of 12 finished; 1 failed, 1 interrupted, 1 running, 3 unreadable" in (
        found["Runs"].text
    )
    assert "MemoryError: needs 9 GiB" in found["Runs"].text
    page = report.write([tmp_path]).read_text(encoding="utf-8")
    for part in (
        "MemoryError: needs 9 GiB",
        "Traceback: x",
        str(tmp_path / "cut/result.json"),
        "schema_version is 2",
    ):
        assert part in page
    assert all(part in report.as_text([tmp_path]) for part in ("needs 9 GiB", "unreadable"))


def test_junk_in_any_entry_never_stops_the_others(tmp_path):
    good = sweep(tmp_path / "good")
    keys = json.loads((good / "flash256/result.json").read_text())
    junk = (None, 3, "x", True, [], [1, {}], {}, {"a": {"b": [None]}}, float("nan"), 1e400, -1)
    for key in keys:
        for number, value in enumerate(junk):
            record(tmp_path / f"{key}{number}", **{key: value})
            record(
                tmp_path / f"in_{key}{number}",
                summary__x=value,
                environment__versions=value,
                environment__gpu=value,
                data__name=value,
                config__data={key: value},
                config__model={"window": value},
                config__attention=value,
            )
            record(tmp_path / f"of_{key}{number}", metrics=dict.fromkeys(METRICS, value))
    records = read([tmp_path])
    assert len(records.runs) + len(records.unreadable) == 6 + 3 * len(keys) * len(junk)
    assert sum(str(run.path).startswith(str(good)) for run in records.measured) == 6
    assert "<h1>" in report.write([tmp_path]).read_text(encoding="utf-8")
    assert report.as_text([tmp_path])


def test_the_figure_is_a_picture_of_memory_against_length(tmp_path):
    sweep(tmp_path / "sweep")
    picture = report.figure([tmp_path / "sweep"], tmp_path / "deep" / "memory.svg").read_text()
    assert picture.startswith("<svg") and "<script" not in picture
    assert {"flash", "dense", "1,024"} <= set(re.findall(r">([^<]+)</text>", picture))
    record(tmp_path / "one")
    with pytest.raises(report.NoRecordsError, match="two lengths"):
        report.figure([tmp_path / "one"], tmp_path / "none.svg")


def test_a_limited_address_space_is_told_before_it_ends_the_process(tmp_path, monkeypatch):
    sweep(tmp_path / "sweep")
    monkeypatch.setattr("resource.getrlimit", lambda which: (8_000_000 << 10, -1))
    with pytest.raises(OSError, match=r"64 GiB .* 7\.6 GiB .*--text"):
        report.write([tmp_path / "sweep"])
    assert "1,024" in report.as_text([tmp_path / "sweep"])
