"""flashmod-verify: each check turns red when what it watches is broken, and says so."""

import io
import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch

from flashmod import TileConfig
from flashmod.backends import sequence_tiles, tiled
from flashmod.experiments import verify
from flashmod.spec import UNBOUNDED, on_tensors
from flashmod.stats import KIND, PARTIAL, RESCALES
from flashmod.verify import NAMES, context, drawing, memory, picture, precision, ragged, truth
from flashmod.verify.context import Runner
from flashmod.verify.progress import Progress
from flashmod.verify.rows import Row, Target, number

TILED = Runner("tiled", "cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch tiles alone, and few cases of each kind."""
    monkeypatch.setattr(context, "find_runners", lambda: (TILED,))
    monkeypatch.setattr(precision, "SHAPES", 30)


class Outcome:
    """What one run of the program left."""

    def __init__(self, folder: Path, *arguments: str):
        files = ("--json", str(folder / "verify.json"), "--picture", str(folder / "verify.svg"))
        self.code = verify.main(["--quick", *arguments, *files])
        self.content = json.loads((folder / "verify.json").read_text())
        self.rows: list[dict[str, Any]] = self.content["rows"]

    def named(self, *words: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if all(word in row["name"] for word in words)]

    def status(self, *words: str) -> set[str]:
        assert self.named(*words), f"no row with {words}"
        return {row["status"] for row in self.named(*words)}


def forward_that(change: Callable[..., Any]) -> Callable[..., Any]:
    genuine = tiled.forward
    return lambda q, k, v, call: change(genuine(q, k, v, call), call)


def backward_that(change: Callable[..., Any]) -> Callable[..., Any]:
    genuine = tiled.backward
    return lambda *arguments: change(genuine(*arguments))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "memory"])
def test_a_right_backend_passes(name: str, tmp_path: Path) -> None:
    outcome = Outcome(tmp_path, "--only", name)
    assert outcome.code == 0 and outcome.content["status"] == "passed"
    assert outcome.status() == {"passed"}
    assert {row["check"] for row in outcome.rows} == {name}


def test_slightly_wrong_numbers_in_float64(tmp_path, monkeypatch):
    wrong = forward_that(lambda f, call: f._replace(out=f.out * (1 + 1e-8)))
    monkeypatch.setattr(tiled, "forward", wrong)
    outcome = Outcome(tmp_path, "--only", "precision")
    assert outcome.code == 1 and outcome.content["status"] == "missed"
    assert outcome.status("dense") == outcome.status("recurrence") == {"missed"}


def test_a_slightly_wrong_gradient_in_float64(tmp_path, monkeypatch):
    monkeypatch.setattr(tiled, "backward", backward_that(lambda g: g._replace(k=g.k * (1 + 1e-8))))
    outcome = Outcome(tmp_path, "--only", "precision")
    assert outcome.code == 1
    assert (outcome.status("dense"), outcome.status("recurrence")) == ({"missed"}, {"passed"})


@pytest.mark.parametrize("operand", ["q", "k", "v", "attn_mask", "sink"])
def test_a_gradient_that_is_not_the_slope(operand, tmp_path, monkeypatch):
    def change(grads):
        x = getattr(grads, operand)
        wrong = x.double() * (1 + 1e-5) if x is not None else None
        return grads._replace(**{operand: None if x is None else wrong.to(x.dtype)})

    monkeypatch.setattr(tiled, "backward", backward_that(change))
    outcome = Outcome(tmp_path, "--only", "accuracy")
    assert outcome.code == 1 and outcome.status("finite differences") == {"missed"}


def test_an_inaccurate_float32(tmp_path, monkeypatch):
    wrong = forward_that(lambda f, call: f._replace(out=f.out * (1 + 3e-4)))
    monkeypatch.setattr(tiled, "forward", wrong)
    outcome = Outcome(tmp_path, "--only", "accuracy")
    assert outcome.status("float32") == {"missed"}
    assert outcome.status("bfloat16") == {"passed"}  # it allows that much


def test_overflow_at_large_logits(tmp_path, monkeypatch):
    def change(forward, call):
        overflows = forward.saved[0].max() > 1e5
        return forward._replace(lse=forward.lse * float("nan")) if overflows else forward

    monkeypatch.setattr(tiled, "forward", forward_that(change))
    outcome = Outcome(tmp_path, "--only", "extremes")
    assert outcome.code == 1 and outcome.status("1e6") == {"missed"}
    assert outcome.named("1e6")[0]["measured"] == "inf"
    assert outcome.status("1e-8") == outcome.status("1e-1,") == {"passed"}


def test_rows_without_a_key_that_are_not_zero(tmp_path, monkeypatch):
    def change(forward, call):
        out = forward.out
        return forward._replace(out=torch.where(out == 0, 1e-30, out))

    monkeypatch.setattr(tiled, "forward", forward_that(change))
    outcome = Outcome(tmp_path, "--only", "empty_rows")
    assert outcome.code == 1 and outcome.status("without a key") == {"missed"}
    assert outcome.status("lse") == outcome.status("skipped") == {"passed"}


def test_tiles_that_are_not_skipped(tmp_path, monkeypatch):
    def change(forward, call):
        if forward.tile_stats is not None:
            forward.tile_stats[KIND] = PARTIAL
        return forward

    monkeypatch.setattr(tiled, "forward", forward_that(change))
    outcome = Outcome(tmp_path, "--only", "empty_rows")
    assert outcome.code == 1 and outcome.status("skipped") == {"missed"}


def test_a_rescale_too_many(tmp_path, monkeypatch):
    def change(forward, call):
        forward.tile_stats[RESCALES, 0] += 1
        return forward

    monkeypatch.setattr(tiled, "forward", forward_that(change))
    outcome = Outcome(tmp_path, "--only", "rescales")
    assert outcome.code == 1
    assert outcome.status("with rescales unlike") == {"missed"}
    assert outcome.status("first maxima") == {"passed"}


def test_linear_memory_passes_and_quadratic_memory_does_not(tmp_path, monkeypatch):
    good = Outcome(tmp_path, "--only", "memory")
    assert good.code == 0 and good.status() == {"passed"}
    assert (tmp_path / "verify.svg").read_text().count("<polyline") == 2
    monkeypatch.setattr(sequence_tiles, "DEFAULT_TILES", TileConfig(1 << 20, 1 << 20))
    bad = Outcome(tmp_path, "--only", "memory")
    assert bad.code == 1
    assert bad.status("growth", "torch tiles") == bad.status("score tensor") == {"missed"}
    assert bad.status("peak at", "torch tiles") == {"missed"}


def test_dense_attention_that_is_not_quadratic_is_no_yardstick(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "attend_dense", memory.attend_flash)
    monkeypatch.setattr(memory, "QUICK_LENGTHS", (64, 128, 256, 512))
    outcome = Outcome(tmp_path, "--only", "memory")
    assert outcome.code == 1 and outcome.status("dense") == {"missed"}


def test_a_rule_that_is_wrong_everywhere(tmp_path, monkeypatch):
    """Reference and backends share the rules; the truth of the checks does not."""
    genuine = on_tensors.key_interval

    def off_by_one(q_idx, limits):
        lo, hi = genuine(q_idx, limits)
        return lo, hi - int(limits.window_right < UNBOUNDED)

    monkeypatch.setattr(on_tensors, "key_interval", off_by_one)
    outcome = Outcome(tmp_path, "--only", "ragged")
    assert outcome.code == 1 and outcome.status("ragged") == {"missed"}


@pytest.mark.parametrize("operand", ["k", "attn_mask"])
def test_a_wrong_gradient_in_a_ragged_batch(operand, tmp_path, monkeypatch):
    def change(grads):
        x = getattr(grads, operand)
        return grads._replace(**{operand: None if x is None else x * (1 + 1e-7)})

    monkeypatch.setattr(tiled, "backward", backward_that(change))
    assert Outcome(tmp_path, "--only", "ragged").code == 1


def test_other_bits_that_are_the_same_everywhere(tmp_path, monkeypatch):
    genuine = on_tensors.dropout_bits
    monkeypatch.setattr(on_tensors, "dropout_bits", lambda word, kv: genuine(word, kv) ^ 1 << 15)
    outcome = Outcome(tmp_path, "--only", "dropout")
    assert outcome.code == 1 and outcome.status("one rate") == {"missed"}


def test_bits_that_depend_on_the_tile(tmp_path, monkeypatch):
    def change(forward, call):  # as if the hash saw positions within a tile
        first = forward.out[:, : call.tiles[0]]
        out = torch.cat([first] * (forward.out.shape[1] // first.shape[1] + 1), 1)
        return forward._replace(out=out[:, : forward.out.shape[1]])

    monkeypatch.setattr(tiled, "forward", forward_that(change))
    outcome = Outcome(tmp_path, "--only", "dropout")
    assert outcome.code == 1 and outcome.status("one rate") == {"missed"}


def test_backends_that_differ_from_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(context, "find_runners", lambda: (TILED, Runner("triton", "cpu")))
    wrong = forward_that(lambda f, call: f._replace(tile_stats=f.tile_stats * 0))
    monkeypatch.setattr(tiled, "forward", wrong)
    outcome = Outcome(tmp_path, "--only", "rescales")
    assert outcome.code == 1 and outcome.status("backends count") == {"missed"}
    assert outcome.status("Triton") == {"passed"}


def test_record_says_what_ran_where(tmp_path, capsys):
    outcome = Outcome(tmp_path, "--only", "precision", "rescales", "--seed", "3")
    content = outcome.content
    assert content["schema_version"] == 1 and content["seed"] == 3 and content["quick"]
    assert content["environment"]["versions"]["torch"] == torch.__version__
    assert content["backends"] == {"tiled": "cpu"} and content["seconds"] > 0
    first = outcome.rows[0]
    assert (first["sign"], first["bound"], first["target"]) == ("<", 1e-9, "< 1e-9")
    assert len(first["data"]["errors"]) == len(first["data"]["shapes"]) == 3
    assert first["data"]["shapes"][0]["length"] % 2 == 1
    said = capsys.readouterr().out.splitlines()
    count = len(outcome.rows)
    assert said[-3].startswith(f"{count} of {count} targets met in ")
    assert said[-2:] == [str(tmp_path / "verify.json"), str(tmp_path / "verify.svg")]
    names = [line.split("  ")[0] for line in said[1 : count + 1]]
    assert names == [row["name"] for row in outcome.rows]


def test_a_check_that_crashes_is_a_red_row_and_the_others_run(tmp_path, monkeypatch, capsys):
    def broken(*arguments):
        raise ZeroDivisionError("by a tile")

    monkeypatch.setattr(precision, "run", broken)
    outcome = Outcome(tmp_path, "--only", "rescales", "precision")
    crashed, *rest = outcome.rows
    assert outcome.code == 1 and crashed["status"] == "crashed"
    assert "ZeroDivisionError: by a tile" in crashed["detail"]
    assert "in broken" in crashed["trace"]
    assert rest and {row["status"] for row in rest} == {"passed"}
    said = capsys.readouterr()
    assert "CRASHED" in said.out and "1 MISSED" in said.out


def test_without_triton_its_lines_are_not_run(tmp_path, monkeypatch, capsys):
    monkeypatch.undo()
    genuine = context.load

    def load(name):
        if name == "triton":
            raise ImportError("No module named 'triton'")
        return genuine(name)

    monkeypatch.setattr(context, "load", load)
    outcome = Outcome(tmp_path, "--only", "empty_rows", "rescales", "dropout", "ragged")
    assert outcome.code == 0
    assert outcome.status("Triton") == {"not run"} and outcome.status("torch tiles") == {"passed"}
    assert outcome.status("backends count") == outcome.status("one backend alone") == {"not run"}
    assert all(row["measured"] is None for row in outcome.named("Triton"))
    said = capsys.readouterr().out
    assert "No module named 'triton'" in said and "NOT RUN and so not verified" in said


@pytest.mark.parametrize("name", [n for n in NAMES if n != "memory"])  # of the torch tiles alone
def test_every_check_has_lines_for_a_missing_backend(name):
    missing = Runner("triton", "cpu", "it is gone")
    rows = list(import_module(f"flashmod.verify.{name}").run(context.Context(0, True, (missing,))))
    assert {row.status for row in rows} == {"not run"}
    assert all("it is gone" in row.detail for row in rows)


def test_random_batches_hold_every_feature():
    for sizes in ragged.SIZES.values():
        drawn = drawing.each(1, sizes.batches, sizes.longest, sizes.widest)
        counts = Counter(f for batch in drawn for f in drawing.features(batch.spec))
        assert len(counts) == 17 and min(counts.values()) >= 3, counts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_writes_what_was_measured(number, tmp_path, monkeypatch, capsys):
    def interrupted(surroundings):
        yield Row("first", Target("<", 1.0), 0.5)
        os.kill(os.getpid(), number)
        yield Row("never", Target("<", 1.0), 0.5)

    monkeypatch.setattr(precision, "run", interrupted)
    outcome = Outcome(tmp_path)
    assert outcome.code == 128 + number
    assert outcome.content["status"] == "interrupted"
    assert [row["name"] for row in outcome.rows] == ["first"]
    assert "INTERRUPTED" in capsys.readouterr().out


def test_kernels_are_interpreted_where_there_is_no_gpu(monkeypatch):
    monkeypatch.undo()
    loaded = []
    monkeypatch.setattr(context, "load", loaded.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert context.find_runners() == (TILED, Runner("triton", "cpu"))
    assert os.environ.pop("TRITON_INTERPRET") == "1" and loaded == ["tiled", "triton"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert context.find_runners()[1] == Runner("triton", "cuda")
    assert "TRITON_INTERPRET" not in os.environ
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "triton", object())
    assert "TRITON_INTERPRET=1" in context.find_runners()[1].missing
    monkeypatch.setitem(sys.modules, "triton", None)  # as where it cannot be imported
    assert not context.find_runners()[1].missing and os.environ.pop("TRITON_INTERPRET") == "1"


def test_list_and_usage(tmp_path, capsys):
    assert verify.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(NAMES)
    with pytest.raises(SystemExit, match="2"):
        verify.main(["--only", "precison"])
    assert "there is no check precison; there are precision," in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        verify.main(["--version"])
    assert capsys.readouterr().out.startswith("flashmod-verify ")


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    where = str(tmp_path / "file" / "verify.json")
    code = verify.main(["--quick", "--only", "rescales", "--json", where])
    assert code == 1 and "cannot write" in capsys.readouterr().err


def test_targets():
    assert Target("<", 1.0).met(0.5) and not Target("<", 1.0).met(1.0)
    assert Target(">=", 50, "x").met(50.0) and str(Target(">=", 50, "x")) == ">= 50x"
    for sign in ("<", "<=", "=", ">=", ">"):
        assert not Target(sign, 1.0).met(float("nan"))
    assert Row("r", Target("<", 1.0), float("nan")).bad
    assert [number(x) for x in (0.0, 3.0, 0.52, 68.44, 2.1e-13, 1e-9, 425.6, float("inf"))] == [
        "0", "3", "0.52", "68.4", "2.1e-13", "1e-9", "426", "inf",
    ]  # fmt: skip


def test_picture_is_drawn_from_the_record():
    errors = {"errors": [0.0, 3e-16, 2e-8, "nan"], "backend": "Triton"}
    peaks = {"lengths": [512, 1024], "flash": [1.0, 2.0], "dense": [2.0, 8.0]}
    drawn = picture.draw([{"data": {}}, {"data": errors}, {"data": peaks}])
    root = ElementTree.fromstring(drawn)
    titles = [x.text or "" for x in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["Triton: 1 from 1e-18", "Triton: 1 from 1e-16", "Triton: 1 from 1e-8",
                      "Triton: 1 from 1e1"]  # fmt: skip
    assert drawn.count("<polyline") == 2 and "prefers-color-scheme: dark" in drawn
    assert picture.draw([{"data": {}}]) == ""


def test_progress_is_a_line_on_a_terminal_and_plain_in_a_log(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    row = Row("a row", Target("<", 1.0), 0.5)
    for stream in (Terminal(), io.StringIO()):
        progress = Progress(stream)
        progress.started("precision")
        progress.tick(3, 4)
        progress.given(row)
        assert ("\r" in stream.getvalue()) == ("3/4" in stream.getvalue()) == stream.isatty()
        assert stream.getvalue().splitlines()[-1].endswith("a row: 0.5 (target < 1)")


def test_bits_of_the_truth_are_those_of_the_other_oracle():
    seed, sequence = -0x1234_5678_9ABC_DEF1, 70_001
    got = truth.random_bits(seed, sequence, (3, 20, 40))
    h, i, j = torch.meshgrid(*map(torch.arange, got.shape), indexing="ij")
    want = oracle.random_bits(seed, sequence, h.numpy(), i.numpy(), j.numpy())
    assert torch.equal(got, torch.from_numpy(want.astype("int64")))


@pytest.mark.slow
def test_the_program_on_both_backends(tmp_path):
    command = [sys.executable, "-m", "flashmod.experiments.verify", "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "runs" / "verify" / "verify.json").read_text())
    assert {row["status"] for row in content["rows"]} == {"passed"}
    assert {row["check"] for row in content["rows"]} == set(NAMES)
