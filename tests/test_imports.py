"""What an import costs, and that imports only go one way; each in a fresh process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ["triton", "pytorch_lightning", "lightning", "hydra", "omegaconf", "wandb"]
HEAVY += ["transformers", "pandas", "altair"]
BLOCK_TRITON = "import sys; sys.modules['triton'] = None; "
BLOCK_NUMPY = "import torch, sys; sys.modules['numpy'] = None; "  # no requirement of torch
ATTENTION = """
import torch, flashmod
q = torch.randn(2, 5, 2, 8, requires_grad=True)
out = flashmod.flash_attention(q, q, q, mask=flashmod.Mask(causal=True), dropout_p=0.1)
out.sum().backward()
assert out.isfinite().all() and q.grad.isfinite().all()
"""


def python(code: str, cwd: Path) -> str:
    """The output of `code` in a new interpreter, as a user would start it (no TRITON_INTERPRET)."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_import_loads_torch_only(tmp_path: Path) -> None:
    loaded = f"import sys; print(*[m for m in {HEAVY} if m in sys.modules])"
    assert python(f"import flashmod; {loaded}", tmp_path).split() == []


def test_attention_without_triton(tmp_path: Path) -> None:
    python(BLOCK_TRITON + ATTENTION, tmp_path)


@pytest.mark.parametrize("before", ["", BLOCK_TRITON, BLOCK_NUMPY])
def test_diagnosis(before: str, tmp_path: Path) -> None:
    code = "import runpy; runpy.run_module('flashmod', run_name='__main__', alter_sys=True)"
    said = python(before + code, tmp_path)
    assert "backend: tiled" in said and "not triton: " in said


def test_imports_go_one_way() -> None:
    run = lint_imports(ROOT)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("flashmod/rules.py", "import torch"),
        ("flashmod/spec.py", "import flashmod.functional"),
        ("flashmod/reference.py", "import triton"),
        ("flashmod/measure/__init__.py", "import pytorch_lightning"),
        ("flashmod/stray.py", "import torch"),
    ],
)
def test_contracts_notice(module: str, line: str, tmp_path: Path) -> None:
    for name in ("flashmod", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with open(tmp_path / module, "a") as file:
        file.write(f"\n{line}\n")
    run = lint_imports(tmp_path)
    name = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert run.returncode != 0 and name in run.stdout


@pytest.mark.parametrize("first", ["flashmod", "torch.utils.flop_counter"])
def test_flops_are_counted_whichever_import_is_first(first: str, tmp_path: Path) -> None:
    code = f"""
import {first}
import torch, flashmod
from torch.utils.flop_counter import FlopCounterMode
q = torch.randn(2, 5, 3, 8, requires_grad=True)
with FlopCounterMode(display=False) as counter:
    flashmod.flash_attention(q, q, q).sum().backward()
print(counter.get_total_flops())
"""
    forward, backward = 2 * 8 * 2, 2 * 8 * 5
    assert int(python(code, tmp_path)) == 2 * 5 * 5 * 3 * (forward + backward)
