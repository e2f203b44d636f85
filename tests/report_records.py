"""Run records for the report's tests, and what its page holds."""

import json
import re

DENSE_TWIN = "memory/dense_attention_peak_mib"
ERRORS = {"out": 1e-7, "dq": 2e-7, "dk": 3e-7, "dv": 2e-7}
METRICS = ("memory/attention_peak_mib", "throughput/tokens_per_s", "grad_error/dq", DENSE_TWIN)
NASTY = "</script><img src=http://evil.example/x.png onerror=alert(1)>\"'&"


def record(folder, *, attention="flash", length=512, status="ok", metrics=None, **entries):
    """Write one run's record; flash memory grows linearly, dense memory almost quadratically."""
    flash, dense = length / 256, 98.5 * (length / 1024) ** 2 + 0.5
    own = dense if attention == "dense" else flash
    summary = {
        "data/seq_len": length,
        "memory/attention_peak_mib": own,
        DENSE_TWIN: dense,
        "throughput/tokens_per_s": 1e6 / own,
        "val/bits_per_byte": 2.5,
        "data/unigram_entropy": 4.9,
        **{f"grad_error/{name}": value for name, value in ERRORS.items()},
    }
    content = {
        "schema_version": 1,
        "status": status,
        "task": "train",
        "error": None,
        "name": f"attention={attention},data.seq_len={length}",
        "command": ["flashmod-train"],
        "config": {
            "attention": {"kind": attention, "tiles": None},
            "model": {"embed_dim": 32},
            "data": {"name": "synthetic", "seq_len": length},
            "batch": {"tokens": 4 * length},
            "trainer": {"precision": "32-true", "accelerator": "auto"},
            "seed": 0,
        },
        "seed": 0,
        "summary": summary | (metrics or {}) if status == "ok" else {},
        "predicted": [],
        "environment": {
            "host": "h",
            "cpu": "Some CPU",
            "threads": 2,
            "commit": "0123456789abcdef",
            "versions": {"torch": "2.13.0"},
        },
        "data": {"name": "synthetic"},
        "started": "2026-12-01T10:00:00+00:00",
        "duration_s": 1.5,
        "files": {"metrics": "metrics.csv"},
    }
    for key, value in entries.items():
        part, _, rest = key.partition("__")
        (content[part].__setitem__(rest, value) if rest else content.__setitem__(part, value))
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(content))
    return folder


def sweep(folder, lengths=(256, 512, 1024), kinds=("flash", "dense")):
    for kind in kinds:
        for length in lengths:
            record(folder / f"{kind}{length}", attention=kind, length=length)
    return folder


def write_curves(folder, steps=40):
    rows = [f"{step},{6 - step / 20:.3f}," for step in range(steps)]
    rows += [f"{step},,{6 - step / 25:.3f}" for step in range(0, steps, 10)]
    (folder / "metrics.csv").write_text(
        "step,train/bits_per_byte,val/bits_per_byte\n" + "\n".join(rows) + "\nbroken,line\n,,x\n"
    )


def specs(page):
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="specs">(.*?)</script>', text, re.S).group(1))


def values(spec):
    return (
        [row for data in spec["datasets"].values() for row in data]
        if "datasets" in spec
        else (
            [
                row
                for layer in [spec, *spec["layer"]]
                for row in layer.get("data", {}).get("values", [])
            ]
        )
    )
