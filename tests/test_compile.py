"""Every kernel compiles for every target with no GPU present, and fits it.

Compilers run in processes of their own: jitted functions are decided at import, and this process
imports them for the interpreter.
"""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

KEEPS_REGISTERS = not triton.__version__.startswith("3.6.")  # which spills more in dK/dV
HALF = ("float16", "bfloat16")
FAST = [
    # target, variants, dtypes, head dimensions
    ("sm_80", "plain", "bfloat16", "64"),
    ("sm_90", "plain key_mask pair_bias dropout everything", "bfloat16", "64"),
    ("sm_90", "plain everything", "float64", "16"),
    ("sm_90", "plain", "float32", "16"),
    ("sm_100", "plain", "bfloat16", "64"),
    ("gfx942", "plain", "bfloat16", "64"),
]
EVERY_VARIANT = (
    "plain mask_fn labels key_mask key_bias pair_mask pair_bias softcap alibi sink dropout "
    "dropout_rates stats everything"
)
WITH_BIAS_GRADIENT = {"key_bias", "pair_bias", "everything"}
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
SLOW = [
    *((target, EVERY_VARIANT, "float16", "64 128") for target in TARGETS),
    *((target, "plain everything", "float16", "256") for target in TARGETS),
    *((target, "plain everything", "float32 float64", "64") for target in TARGETS),
    ("sm_90", EVERY_VARIANT, "float64", "64"),
]
GOLDEN = Path(__file__).parent / "golden_sm90.json"


def run_python(*arguments):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True
    )


def check_report(target, variants, dtypes, head_dims):
    done = run_python(
        "-m", "flashmod.kernel_report", "--target", target, "--variant", *variants.split(),
        "--dtype", *dtypes.split(), "--head-dim", *head_dims.split(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines(), delimiter="\t"))
    kernels = sum(5 if name in WITH_BIAS_GRADIENT else 4 for name in variants.split())
    assert len(rows) == kernels * len(dtypes.split()) * len(head_dims.split())
    for row in rows:
        assert row["note"] == "ok", row
        if row["kernel"] == "delta":
            continue
        if row["dtype"] in HALF:
            assert int(row["tensor-core"]) > 0, row
        known = row["in-loop"] != "-"
        if known and KEEPS_REGISTERS and row["dtype"] in HALF and row["variant"] == "plain":
            assert int(row["in-loop"]) <= 8, row


@pytest.mark.parametrize("request_", FAST, ids=" ".join)
def test_kernels_compile_and_fit(request_):
    check_report(*request_)


@pytest.mark.slow
@pytest.mark.parametrize("request_", SLOW, ids=" ".join)
def test_every_variant_compiles_and_fits(request_):
    check_report(*request_)


def test_the_report_names_every_variant():
    from flashmod.kernel_report.cases import VARIANTS

    assert EVERY_VARIANT.split() == list(VARIANTS)


def test_no_feature_costs_a_plain_call_an_instruction(tmp_path):
    """The main loops of all kernels, bfloat16 on sm_90: `make golden` records them anew."""
    golden = json.loads(GOLDEN.read_text())
    if triton.__version__ != golden["triton"]:
        pytest.skip(f"recorded with Triton {golden['triton']}, here is {triton.__version__}")
    done = run_python("-m", "flashmod.kernel_report", "--golden", str(tmp_path / "now.json"))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "now.json").read_text()) == golden


COUNT_COMPILES = """
import json, torch
from flashmod import Mask, TileConfig
from flashmod.backends import triton as backend
from flashmod.functional import prepare
from flashmod.kernel_report import TARGETS, compiling_for

def launch(q, k, **kwargs):
    ready = prepare(q, k, k, tiles=TileConfig(16, 16, 4, 1), **kwargs)
    out, _, saved, *_ = backend.forward(*ready)
    backend.backward(out, None, ready.q, ready.k, ready.v, out, saved, ready.call, False)

def counts(calls):
    kernels = {}
    with compiling_for(TARGETS["sm_90"]) as records:
        for lengths, kwargs in calls:
            if isinstance(lengths, list):
                q = torch.zeros(sum(lengths) + 1, 2, 16, dtype=torch.float16)
                cu = torch.tensor([0, *lengths]).cumsum(0).int()
                launch(q, q, cu_seqlens_q=cu, **kwargs)
            else:
                q = torch.zeros(*lengths[:2], 2, 16, dtype=torch.float16)
                launch(q, torch.zeros(lengths[0], lengths[2], 2, 16, dtype=q.dtype), **kwargs)
    for record in records:
        kernels.setdefault(record.name, set()).add(id(record.kernel))
    return {name: len(ids) for name, ids in kernels.items()}

windows = [{"mask": Mask(causal=True)}, {"mask": Mask(window=(16, 1), prefix_len=3)}]
calls = [
    ([7, 33], windows[0]), ([1], {}), ([16] * 16, windows[1]),
    ([1000, 0, 24], {"softmax_scale": 0.5}), ((1, 1, 1), {}), ((3, 17, 64), windows[0]),
    ((2, 64, 1), windows[1]), ((16, 16, 16), {}),
]
print(json.dumps(counts(calls)))
"""


def test_sizes_lengths_and_windows_never_recompile():
    done = run_python("-c", COUNT_COMPILES)
    assert done.returncode == 0, done.stderr
    kernels = ("forward_kernel", "delta_kernel", "dq_kernel", "dkv_kernel")
    assert json.loads(done.stdout) == dict.fromkeys(kernels, 1)


REASONS = """
import torch
from flashmod.backends import triton as backend
from flashmod.functional import prepare
x = torch.zeros(1, 4, 1, 8)
print(backend.unsupported_reasons(*prepare(x, x, x)))
"""


def test_without_the_interpreter_a_cpu_tensor_is_refused():
    done = run_python("-c", REASONS)
    assert "needs a GPU" in done.stdout and "TRITON_INTERPRET=1" in done.stdout, done.stderr


def test_the_report_says_that_the_interpreter_cannot_compile(capsys):
    from flashmod.kernel_report.__main__ import main

    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("this process compiles")
    assert main(["--target", "sm_90"]) == 2
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err
