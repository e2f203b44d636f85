"""What the README says runs: its Python block, its commands, its file tree."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SHORT = ["trainer.max_steps=1", "trainer.val_every=1", "trainer.val_batches=1", "report=false"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run(words: list[str], cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def less_memory(said: str) -> None:
    peaks = dict(re.findall(r"'memory/(\w+)_peak_mib': '([\d.]+)'", said))
    assert float(peaks["attention"]) < float(peaks["dense_attention"]) / 4


def same_result(said: str) -> None:
    routed, error = said.rsplit(" ", 1)
    assert routed == "Routing(calls=1, left_to_torch={})" and float(error) < 1e-5


def swapped(said: str) -> None:
    assert "gradient error, largest" in said and "2 swapped, 0 skipped" in said
    peaks = re.search(r"peak memory of a step\s+([\d.]+) MiB\s+([\d.]+) MiB", said)
    assert peaks is not None and float(peaks[2]) < float(peaks[1])


# What a block's output must show, by a word of the block.
CLAIMS = {"swap_attention": swapped, "measure.track": less_memory, "route_sdpa": same_result}


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[1])
def test_python_block(code: str, tmp_path: Path) -> None:
    assert len(code.splitlines()) <= 10
    said = run([sys.executable, "-c", code], tmp_path)
    for word, claim in CLAIMS.items():
        if word in code:
            claim(said)


def test_every_claim_has_its_block() -> None:
    assert all(sum(word in code for code in blocks("python")) == 1 for word in CLAIMS)


@pytest.mark.parametrize("words", [w for w in commands() if w[0] == "make"], ids=" ".join)
def test_make_targets_exist(words: list[str]) -> None:
    run(["make", "--dry-run", *words[1:]], ROOT)


@pytest.mark.parametrize(
    "words", [w for w in commands() if w[0].endswith("flashmod-train")], ids=" ".join
)
def test_training_commands(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("one", "two", "three", "four"):
        (tmp_path / "docs" / f"{name}.md").write_text(f"# {name}\n" + "some text\n" * 200)
    program = [sys.executable, "-m", "flashmod.experiments.train"]
    run([*program, *words[1:], *SHORT], tmp_path)
    records = list((tmp_path / "runs").rglob("result.json"))
    assert records and all('"status": "ok"' in r.read_text() for r in records)


def test_report_commands(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "flashmod.experiments.train"]
    run([*program, "experiment=debug", *SHORT], tmp_path)
    said = [w for w in commands() if w[0].endswith("flashmod-report")]
    assert len(said) == 2
    for words in said:
        run([sys.executable, "-m", "flashmod.experiments.report", *words[1:]], tmp_path)
    # One run has no chart to draw, but it has its row.
    assert "experiment=debug" in (tmp_path / "report.html").read_text()


def test_diagnosis_answers_its_questions(tmp_path: Path) -> None:
    said = run([sys.executable, "-m", "flashmod"], tmp_path)
    for question in ("versions", "devices", "triton", "tiles", "W&B", "backend: tiled"):
        assert question in said


def test_file_tree_is_the_disk() -> None:
    tree = next(block for block in blocks("text") if block.startswith("flashmod/"))
    named = set(re.findall(r"(?<![\w/])(\w+\.py|\w+/)(?=[\s:;])", tree))
    for name in named - {"flashmod/"}:
        folders = (".", "flashmod", "flashmod/backends", "configs")
        found = [ROOT / folder / name for folder in folders]
        assert any(path.exists() for path in found), name
    modules = {p.name for p in (ROOT / "flashmod").glob("[a-z]*.py")}
    modules |= {f"{p.parent.name}/" for p in (ROOT / "flashmod").glob("*/__init__.py")}
    assert not modules - named


def test_signature_in_the_readme_is_the_code() -> None:
    import inspect

    import flashmod

    text = next(block for block in blocks("text") if block.startswith("flash_attention("))
    signature = re.search(r"flash_attention\((.*?)\)", text, re.S)
    assert signature is not None
    written = re.findall(r"\w+", signature.group(1))
    assert written == list(inspect.signature(flashmod.flash_attention).parameters)
