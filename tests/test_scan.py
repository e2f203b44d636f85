"""Attention named in source that is read, never imported; the door and the traps of each."""

import json
import re
import textwrap
from pathlib import Path

import pytest
import small_models
import torch
from small_models import SMALL
from torch import nn

import flashmod
from flashmod.integrations import doors
from flashmod.integrations.scan import doors_for, scan_source
from flashmod.integrations.sources import scan_paths


def found(text):
    return [(f.line, f.call) for f in scan_source(textwrap.dedent(text))]


def traps(text):
    return {trap for f in scan_source(textwrap.dedent(text)) for trap in f.traps}


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.nn.MultiheadAttention(8, 2)",
        "import torch.nn as nn\nnn.MultiheadAttention(8, 2)",
        "from torch import nn as n\nn.TransformerEncoderLayer(8, 2)",
        "from torch.nn import TransformerDecoder as D\nD(layer, 2)",
        "from torch.nn.modules.activation import MultiheadAttention\nMultiheadAttention(8, 2)",
        "from torch.nn import *\nTransformer(8)",
        "from functools import partial; from torch import nn\npartial(nn.MultiheadAttention, 8)",
        "import torch.nn.functional as F\nF.scaled_dot_product_attention(q, k, v)",
        "from torch.nn.functional import scaled_dot_product_attention as f\nf(q, k, v)",
        "import torch\nF = torch.nn.functional;\nF.scaled_dot_product_attention(q, k, v)",
        "from torch.nn import functional\nfunctional.multi_head_attention_forward(q, k, v)",
        "from flash_attn import flash_attn_func\nflash_attn_func(q, k, v)",
        "import flash_attn_interface as fa\nfa.flash_attn_varlen_func(q, k, v)",
        "from .flash import flash_attn\nflash_attn.flash_attn_with_kvcache(q, k, v)",
        "from torch.nn.attention.flex_attention import flex_attention\nflex_attention(q, k, v)",
        "model = AutoModel\nmodel.from_pretrained('x', attn_implementation='sdpa')",
        "model = AutoModel\nmodel.set_attn_implementation('eager')",
        "from torch import nn\nclass Mine(nn.MultiheadAttention): pass",
    ],
)
def test_found_under_any_name(text):
    last = text.count("\n") + 1
    assert [line for line, _ in found(text)] == [last]


@pytest.mark.parametrize(
    "text",
    [
        "class MultiheadAttention: pass\nMultiheadAttention(8)",
        "from .attention import MultiheadAttention\nMultiheadAttention(8, 2)",
        "def scaled_dot_product_attention(q): pass\nscaled_dot_product_attention(q)",
        "class A:\n def f(self): self.scaled_dot_product_attention(1)",
        "from .ops import scaled_dot_product_attention\nscaled_dot_product_attention(q, k, v)",
        "from torch import nn\nisinstance(m, nn.MultiheadAttention)",
        "# nn.MultiheadAttention(8, 2)\n'F.scaled_dot_product_attention(q, k, v)'",
        "from torch.nn.attention import flex_attention\nflex_attention.create_block_mask(f)",
    ],
)
def test_what_is_not_attention_of_torch_is_not_named(text):
    assert found(text) == []


def test_compiled_flex_attention_is_found_where_it_is_called():
    text = """
    import torch
    from torch.nn.attention.flex_attention import flex_attention
    flex_attention = torch.compile(flex_attention, dynamic=False)
    def f(q, k, v, mask):
        return flex_attention(q, k, v, block_mask=mask)
    """
    assert found(text) == [(6, "flex_attention")]


def test_calls_that_leave_need_weights_are_named():
    text = """
    from torch import nn
    class Block(nn.Module):
        def __init__(self):
            self.a = nn.MultiheadAttention(8, 2)
            self.b = nn.MultiheadAttention(8, 2)
            self.c = nn.MultiheadAttention(8, 2)
        def forward(self, x, **more):
            x = self.a(x, x, x, need_weights=False)[0]
            x = self.b(x, x, x)[0]
            x = self.c(x, x, x, **more)[0]
            return self.a(x, x, x, None, False)[0]
    """
    named = {f.call: f for f in scan_source(textwrap.dedent(text)) if f.traps}
    assert list(named) == ["self.b"] and named["self.b"].line == 10
    assert named["self.b"].traps == (doors.NEED_WEIGHTS,)


def test_a_module_whose_calls_are_out_of_sight_is_warned_of_where_it_is_built():
    text = "from torch import nn\nlayer = nn.MultiheadAttention(8, 2)"
    assert traps(text) == {doors.NEED_WEIGHTS}


@pytest.mark.parametrize(
    ("bound", "early"),
    [
        ("from torch.nn.functional import scaled_dot_product_attention as sdpa", True),
        ("import torch.nn.functional as F\nsdpa = F.scaled_dot_product_attention", True),
        ("import torch.nn.functional as F", False),
    ],
)
def test_early_bound_sdpa(bound, early):
    call = "sdpa(q, k, v)" if "sdpa" in bound else "F.scaled_dot_product_attention(q, k, v)"
    assert (doors.EARLY_IMPORT in traps(f"{bound}\n{call}")) == early


def test_sdpa_kept_in_an_object_is_named():
    text = "import torch.nn.functional as F\nself.f = F.scaled_dot_product_attention"
    assert traps(text) == {doors.EARLY_IMPORT}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("is_causal=True", ["top-left"]),
        ("None, 0.0, True", ["top-left"]),
        ("is_causal=mask is None", ["top-left"]),
        ("is_causal=False", []),
        ("dropout_p=0.1", ["eval"]),
        ("dropout_p=self.p", ["eval"]),
        ("dropout_p=self.p if self.training else 0.0", []),
        ("dropout_p=0", []),
    ],
)
def test_traps_of_sdpa_follow_its_arguments(arguments, words):
    text = f"import torch.nn.functional as F\nF.scaled_dot_product_attention(q, k, v, {arguments})"
    seen = traps(text)
    assert len(seen) == len(words)
    assert all(word in trap for word, trap in zip(words, seen, strict=True))


def test_traps_of_flash_attn():
    text = (
        "from flash_attn import flash_attn_func as f\nf(q, k, v, causal=True, window_size=(8, 0))"
    )
    assert len(traps(text)) == 2
    assert not traps("from flash_attn import flash_attn_func as f\nf(q, k, v)")


def test_every_name_a_door_gives_exists():
    entries = {door.enter for door in doors.DOORS.values()} | {doors.SUBCLASS, doors.EARLY_IMPORT}
    text = "\n".join([*entries, doors.hugging_face("sdpa"), doors.NEED_WEIGHTS])
    for name in set(re.findall(r"flashmod\.(\w+)", text)):
        assert name in flashmod.__all__, name
    assert "swap_attention" in text and "route_sdpa" in text


def test_a_folder_a_notebook_and_what_cannot_be_read(tmp_path):
    (tmp_path / "a.py").write_text("raise SystemExit\nimport torch\ntorch.nn.Transformer()\n")
    (tmp_path / "bad.py").write_text("def f(:\n")
    hidden = tmp_path / ".venv"
    hidden.mkdir()
    (hidden / "b.py").write_text("import torch\ntorch.nn.Transformer()\n")
    cells = [
        {"cell_type": "markdown", "source": ["torch.nn.Transformer()"]},
        {
            "cell_type": "code",
            "source": ["%matplotlib inline\n", "import torch.nn.functional as F"],
        },
        {"cell_type": "code", "source": "%%bash\npip install x"},
        {"cell_type": "code", "source": ["x = (\n"]},
        {"cell_type": "code", "source": "!ls\n\nF.scaled_dot_product_attention(q, k, v)\nq?"},
    ]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    scanned = scan_paths([tmp_path, tmp_path / "a.py"])
    where = [place.where.removeprefix(f"{tmp_path}/") for place in scanned.places]
    assert where == ["a.py:3", "n.ipynb:cell 5:3"] and scanned.files == 3
    assert len(scanned.unread) == 2
    assert "bad.py" in str(scanned) and "cell 4" in str(scanned) and "2 places" in str(scanned)
    with pytest.raises(FileNotFoundError, match="nothing"):
        scan_paths([tmp_path / "nothing"])


def test_the_small_models_are_read_as_they_are_written():
    lines = Path(small_models.__file__).read_text().splitlines()
    places = scan_paths([small_models.__file__]).places
    assert len(places) == 9
    for _, finding in places:
        assert finding.call.rpartition(".")[2] in lines[finding.line - 1]


def test_doors_of_a_model_are_those_of_its_own_classes():
    (line,) = doors_for(SMALL["nano_gpt"]()[0])
    assert "route_sdpa" in line and "small_models.py" in line and "Multihead" not in line
    (line,) = doors_for(nn.Sequential(nn.Linear(2, 2)))
    assert "flash_attention(q, k, v)" in line


def test_doors_of_a_class_without_a_file():
    namespace = {"nn": nn, "F": torch.nn.functional, "__name__": "nowhere"}
    exec("class Lost(nn.Module):\n    def forward(self, x): return x\n", namespace)
    (line,) = doors_for(namespace["Lost"]())
    assert "Lost" in line
