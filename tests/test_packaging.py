"""What is shipped: metadata, pins, wheel and sdist, each tried in a clean environment."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
# The triton that each CUDA build of torch requires.
PAIRS = {"2.11.0": "3.6.0", "2.12.0": "3.7.0", "2.13.0": "3.7.1", "2.14.1": "3.8.0"}
# Names of Python's settings that would let this checkout reach into a clean environment.
INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TRITON_INTERPRET", "WANDB_MODE")
BUILT_ONCE = pytest.mark.xdist_group("packaging")


def run(command: list[str | Path], cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in INHERITED}
    done = subprocess.run(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of a copy of this tree, and the wheel made from that sdist."""
    source, out = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("dist")
    junk = (".*", "runs", "build", "dist", "outputs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*junk))
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out], source)
    return out


@pytest.fixture
def clean_python(tmp_path: Path) -> Iterator[Path]:
    """The python of a new, empty environment, removed afterwards because torch is large."""
    venv.create(tmp_path / "venv", with_pip=True)
    yield tmp_path / "venv" / "bin" / "python"
    shutil.rmtree(tmp_path / "venv")


def install(python: Path, built: Path, extras: str = "") -> None:
    (wheel,) = built.glob("*.whl")
    quiet = ["--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    run([python, "-m", "pip", "install", *quiet, f"{wheel}{extras}"], ROOT)


def test_every_package_is_listed() -> None:
    folders = {f.parent.relative_to(ROOT) for f in (ROOT / "flashmod").rglob("__init__.py")}
    names = {".".join(folder.parts) for folder in folders}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(names | {"flashmod.configs", "flashmod.experiments"}) == sorted(listed)


def test_every_folder_with_code_is_a_package() -> None:
    bare = {f.parent for f in (ROOT / "flashmod").rglob("*.py")}
    assert [str(folder) for folder in bare if not (folder / "__init__.py").exists()] == []


def test_base_requires_torch_alone() -> None:
    assert PROJECT["project"]["dependencies"] == ["torch>=2.11"]


def test_versions_agree() -> None:
    from flashmod import __version__

    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_pins_are_public_and_paired() -> None:
    assert [name for name, version in PINS.items() if "+" in version] == []
    assert PAIRS[PINS["torch"]] == PINS["triton"]


def test_extras_are_pinned() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = {re.split(r"[>=<;\[ ]", line)[0] for lines in extras.values() for line in lines}
    assert wanted - {"flashmod"} <= set(PINS)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_make_explains_every_target() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    said = run(["make"], ROOT)
    assert targets and [t for t in targets if f"make {t} " not in said] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
@pytest.mark.parametrize("torch", [True, False])
def test_make_uses_an_environment_by_its_python(torch: bool, tmp_path: Path) -> None:
    venv.create(tmp_path)
    if torch:
        (packages,) = tmp_path.glob("lib/python3*/site-packages")
        (packages / "torch").mkdir()
    said = run(["make", "-n", "setup", f"PYTHON={tmp_path}/bin/python", "PIP_ARGS=--quiet"], ROOT)
    pins = "/dev/null" if torch else "constraints.txt"
    assert f"{tmp_path}/bin/python -m pip install" in said
    assert f"-e '.[dev]' -c {pins} --quiet" in said and "rm -rf" not in said


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_make_keeps_the_environment_when_python_is_mistyped(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    stamp = tmp_path / ".venv" / ".flashmod-installed"
    stamp.parent.mkdir()
    stamp.write_text(f"{tmp_path} python3 constraints.txt\n")
    command = ["make", "setup", "PYTHON=/nowhere/python"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and stamp.exists()
    assert "PYTHON=/nowhere/python: there is no such command" in done.stdout


@BUILT_ONCE
def test_wheel_contents(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder, package in (("flashmod", "flashmod"), ("experiments", "flashmod/experiments")):
        for file in (ROOT / folder).rglob("*.py"):
            assert f"{package}/{file.relative_to(ROOT / folder)}" in names
    for file in (ROOT / "configs").rglob("*.yaml"):
        assert f"flashmod/configs/{file.relative_to(ROOT / 'configs')}" in names
    assert {"flashmod/py.typed", "flashmod/configs/__init__.py"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"flashmod"}


@BUILT_ONCE
def test_sdist_contents(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "CHANGELOG.md", "CITATION.cff", "Makefile", "constraints.txt"}
    assert wanted | {"tests/conftest.py", "configs/__init__.py", "experiments/train.py"} <= names


@BUILT_ONCE
def test_bare_wheel_runs_the_readme(built: Path, clean_python: Path, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert block is not None, "README.md has no Python block"
    install(clean_python, built)
    empty = tmp_path / "empty"
    empty.mkdir()
    run([clean_python, "-c", block[1]], empty)
    missing = "import importlib.util as u; print(u.find_spec('triton'), u.find_spec('hydra'))"
    assert run([clean_python, "-c", missing], empty).split() == ["None", "None"]
    assert "torch" in run([clean_python, "-m", "flashmod"], empty)


@BUILT_ONCE
def test_train_wheel_takes_a_step(built: Path, clean_python: Path, tmp_path: Path) -> None:
    install(clean_python, built, "[train]")
    empty = tmp_path / "empty"
    empty.mkdir()
    script = clean_python.with_name("flashmod-train")
    run([script, "experiment=debug", "trainer.max_steps=1"], empty)
    (record,) = empty.glob("runs/train/*/result.json")
    assert json.loads(record.read_text())["status"] == "ok"


@pytest.mark.parametrize("way", ["console script", "python -m", "script path"])
def test_configs_are_found_from(way: str, tmp_path: Path) -> None:
    commands = {
        "console script": [Path(sys.executable).with_name("flashmod-train")],
        "python -m": [sys.executable, "-m", "flashmod.experiments.train"],
        "script path": [sys.executable, ROOT / "experiments" / "train.py"],
    }
    shown = run([*commands[way], "experiment=debug", "--cfg", "job"], tmp_path)
    assert "trainer:" in shown
