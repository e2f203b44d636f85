"""The report: its sentences come from the records, its page is safe, whole and offline."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from flashmod.experiments.report import main

from flashmod import report
from flashmod.report.findings import findings
from flashmod.report.records import read
from flashmod.report.series import Variants, memory_points, points

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DENSE_TWIN = "memory/dense_attention_peak_mib"
ERRORS = {"out": 1e-7, "dq": 2e-7, "dk": 3e-7, "dv": 2e-7}
NASTY = "</script><img src=http://evil.example/x.png onerror=alert(1)>\"'&"


def record(folder, *, attention="flash", length=512, status="ok", metrics=None, **entries):
    """Write one run's record; flash memory grows linearly, dense memory almost quadratically."""
    flash, dense = length / 256, 98.5 * (length / 1024) ** 2 + 0.5
    own = dense if attention == "dense" else flash
    summary = {
        "data/seq_len": length, "memory/attention_peak_mib": own, DENSE_TWIN: dense,
        "throughput/tokens_per_s": 1e6 / own,
        "val/bits_per_byte": 2.5, "data/unigram_entropy": 4.9,
        **{f"grad_error/{name}": value for name, value in ERRORS.items()},
    }
    content = {
        "schema_version": 1, "status": status, "task": "train", "error": None,
        "name": f"attention={attention},data.seq_len={length}", "command": ["flashmod-train"],
        "config": {
            "attention": {"kind": attention, "tiles": None}, "model": {"embed_dim": 32},
            "data": {"name": "synthetic", "seq_len": length}, "batch": {"tokens": 4 * length},
            "trainer": {"precision": "32-true", "accelerator": "auto"}, "seed": 0,
        },
        "seed": 0, "summary": summary | (metrics or {}) if status == "ok" else {}, "predicted": [],
        "environment": {"host": "h", "cpu": "Some CPU", "threads": 2, "commit": "0123456789abcdef",
                        "versions": {"torch": "2.13.0"}},
        "data": {"name": "synthetic"}, "started": "2026-12-01T10:00:00+00:00", "duration_s": 1.5,
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


def sentences(folder):
    return {finding.topic: finding for finding in findings(read([folder]))}


def specs(page):
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="specs">(.*?)</script>', text, re.S).group(1))


def values(spec):
    return [row for data in spec["datasets"].values() for row in data] if "datasets" in spec else (
        [row for layer in [spec, *spec["layer"]] for row in layer.get("data", {}).get("values", [])]
    )


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
    record(tmp_path / "a", metrics={"grad_error/dv": 2e-3, "grad_error/coverage": 0.25},
           config__trainer={"precision": precision})
    found = sentences(tmp_path)["Gradients"]
    assert (found.tone, words in found.text) == (tone, True)
    assert "2e-3 (dv" in found.text and "At least 25% of the rows" in found.text


def test_worse_memory_and_learning_are_not_praised(tmp_path):
    record(tmp_path / "a", metrics={"memory/attention_peak_mib": 100.0, "val/bits_per_byte": 6.0})
    found = sentences(tmp_path)
    assert found["Memory"].tone == "bad" and "x more" in found["Memory"].text
    assert found["Learning"].tone == "bad" and "NOT below" in found["Learning"].text


def test_repeats_become_a_median_with_spread_and_other_workloads_stay_apart(tmp_path):
    for seed, value in enumerate((1.0, 2.0, 9.0)):
        record(tmp_path / f"s{seed}", metrics={"memory/attention_peak_mib": value},
               config__seed=seed)
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
        "flash", "dense", "dense twin"
    }


def test_tiles_are_told_apart(tmp_path):
    for tiles in ([32, 32], [64, 64]):
        record(tmp_path / str(tiles[0]), config__attention={"kind": "flash", "tiles": tiles})
    runs = read([tmp_path]).measured
    found = points(runs, "throughput/tokens_per_s", Variants(runs))
    assert [point.series for point in found] == ["flash (tiles 32x32)", "flash (tiles 64x64)"]


def test_runs_that_did_not_finish_are_listed_and_left_out(tmp_path):
    sweep(tmp_path)
    record(tmp_path / "f", attention="dense", length=2048, status="failed",
           error={"type": "MemoryError", "message": "needs 9 GiB", "traceback": "Traceback: x"})
    for status in ("running", "interrupted"):
        record(tmp_path / status, length=4096, status=status)
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
    for part in ("MemoryError: needs 9 GiB", "Traceback: x", str(tmp_path / "cut/result.json"),
                 "schema_version is 2"):
        assert part in page
    assert all(part in report.as_text([tmp_path]) for part in ("needs 9 GiB", "unreadable"))


def test_junk_in_any_entry_never_stops_the_others(tmp_path):
    good = sweep(tmp_path / "good")
    keys = json.loads((good / "flash256/result.json").read_text())
    junk = (None, 3, "x", True, [], [1, {}], {}, {"a": {"b": [None]}}, float("nan"), 1e400, -1)
    for key in keys:
        for number, value in enumerate(junk):
            record(tmp_path / f"{key}{number}", **{key: value})
            record(tmp_path / f"in_{key}{number}", summary__x=value, environment__versions=value,
                   environment__gpu=value, data__name=value, config__data={key: value},
                   config__model={"window": value}, config__attention=value)
    records = read([tmp_path])
    assert len(records.runs) + len(records.unreadable) == 6 + 2 * len(keys) * len(junk)
    assert sum(str(run.path).startswith(str(good)) for run in records.measured) == 6
    assert "<h1>" in report.write([tmp_path]).read_text(encoding="utf-8")
    assert report.as_text([tmp_path])


def test_user_text_is_escaped_everywhere(tmp_path):
    for number, length in enumerate((256, 512)):
        for data in ("synthetic", NASTY):
            record(tmp_path / f"{number}{data == NASTY}", length=length, name=NASTY,
                   command=[NASTY], data__name=NASTY, environment__host=NASTY,
                   environment__cpu=NASTY, config__data={"name": data, "seq_len": length})
    record(tmp_path / "bad", status="failed", name=NASTY,
           error={"type": NASTY, "message": NASTY, "traceback": NASTY})
    (tmp_path / "bad/../unreadable<b>").mkdir()
    (tmp_path / "unreadable<b>/result.json").write_text("[]")
    write_curves(tmp_path / "0True")
    page = report.write([tmp_path]).read_text(encoding="utf-8")
    assert "evil.example" in page and any("evil" in json.dumps(s) for s in specs(
        tmp_path / "report.html").values())
    assert "<img src=http" not in page and "unreadable<b>" not in page
    assert page.count("</script>") == 3  # the charts' data, the library, ours


def write_curves(folder, steps=40):
    rows = [f"{step},{6 - step / 20:.3f}," for step in range(steps)]
    rows += [f"{step},,{6 - step / 25:.3f}" for step in range(0, steps, 10)]
    (folder / "metrics.csv").write_text(
        "step,train/bits_per_byte,val/bits_per_byte\n" + "\n".join(rows) + "\nbroken,line\n,,x\n"
    )


def test_the_page_has_the_charts_and_refers_to_nothing_outside(tmp_path):
    write_curves(sweep(tmp_path) / "flash512")
    path = report.write([tmp_path], tmp_path / "new" / "page.html")
    text = path.read_text(encoding="utf-8")
    assert set(specs(path)) == {"memory", "error0", "error1", "speed", "training"}
    assert not re.search(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", text, re.I)
    outside = r"<script[^>]*\ssrc|<link\b|<iframe|@import|url\(\s*['\"]?http"
    assert not re.search(outside, text, re.I)
    assert "default-src &#x27;none&#x27;" in text
    assert "$schema" not in text.split('id="specs">')[1].split("</script>")[0]
    training = values(specs(path)["training"])
    assert {row.get("split") for row in training} >= {"train", "validation"}
    assert any(row.get("text") == "unigram entropy 4.90" for row in training)
    assert any(row.get("text") == "target 1e-5 (fp32)" for row in values(specs(path)["error0"]))


def test_one_run_gets_bars_and_numbers_instead_of_empty_charts(tmp_path):
    path = report.write([record(tmp_path / "a")])
    text = path.read_text(encoding="utf-8")
    assert path == tmp_path / "a" / "report.html" and specs(path) == {}
    assert len(text) < 50_000 and text.count('class="bar"') == 2
    assert ">2.0 MiB<" in text and ">3e-7<" in text and "500,000 tokens/s" in text


def test_command_line(tmp_path, capsys):
    sweep(tmp_path / "runs", lengths=(256, 512), kinds=("flash",))
    target = tmp_path / "page.html"
    assert main([str(tmp_path / "runs"), "-o", str(target)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(target) and target.exists()
    assert main(["--text", str(tmp_path / "runs")]) == 0
    assert "attention=flash,data.seq_len=256" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    for name, state in (("empty", "holds no result.json"), ("missing", "does not exist")):
        assert main([str(tmp_path / "runs"), str(tmp_path / name)]) == 2
        message = capsys.readouterr().err
        assert f"{tmp_path / name} {state}" in message and "flashmod-train" in message
    assert main([str(tmp_path / "runs"), "-o", str(target / "below_a_file.html")]) == 1
    assert str(target) in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "page.html", "runs"]


def test_without_altair_the_extra_is_named_and_text_still_works(tmp_path, monkeypatch, capsys):
    sweep(tmp_path, lengths=(256,), kinds=("flash",))
    monkeypatch.setitem(sys.modules, "altair", None)
    assert main([str(tmp_path)]) == 1
    assert "pip install 'flashmod[report]'" in capsys.readouterr().err
    assert main([str(tmp_path), "--text"]) == 0


def test_help_and_version_load_no_chart_library():
    code = (
        "import sys\nfrom flashmod.experiments.report import main\n"
        "try: main([sys.argv[1]])\nexcept SystemExit as e: assert e.code == 0\n"
        "assert not {'altair', 'vl_convert', 'pandas'} & set(sys.modules)"
    )
    for flag, word in (("--help", "result.json"), ("--version", "flashmod-report 0.")):
        done = subprocess.run([sys.executable, "-c", code, flag], capture_output=True, text=True)
        assert done.returncode == 0 and word in done.stdout, done.stderr


WATCH = """<script>
const seen = [];
addEventListener("securitypolicyviolation", event => seen.push(event.blockedURI));
setTimeout(() => {
  seen.push(...performance.getEntriesByType("resource").map(entry => entry.name));
  document.documentElement.dataset.seen = seen.join(" ");
}, 3000);
</script>"""


def browse(page, tmp_path, extra=""):
    """The document after its scripts ran, and every address it asked for, refused or not."""
    head, tail = page.read_text(encoding="utf-8").split("<title>", 1)
    watched = tmp_path / "watched.html"
    watched.write_text(f"{head}{WATCH}<title>{tail}{extra}", encoding="utf-8")
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--disable-background-networking", "--disable-component-update", "--no-first-run",
         "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}",
         "--virtual-time-budget=6000", "--dump-dom", watched.as_uri()],
        capture_output=True, text=True, timeout=60, env={**os.environ, "HOME": str(tmp_path)},
    )
    found = re.search(r'<html[^>]* data-seen="([^"]*)"', done.stdout)
    assert found, "the page's scripts did not run to the end"
    return done.stdout, set(found.group(1).split())


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_in_a_browser_all_charts_draw_without_a_request_and_the_table_sorts(tmp_path):
    write_curves(sweep(tmp_path / "runs") / "flash512")
    page = report.write([tmp_path / "runs"])
    click = (
        "<script>[...document.querySelectorAll('.sortable th button')]"
        ".find(b => b.textContent === 'tokens/s').click()</script>"
    )
    dom, asked = browse(page, tmp_path, click)
    assert not asked
    assert len(re.findall(r'<svg [^>]*class="marks"', dom)) == len(specs(page)) == 5
    assert dom.count("This chart failed to draw") == 1  # the words in the script itself
    speeds = [float(text.replace(",", "")) for text in re.findall(
        r"<td[^>]*>([\d,]+)</td>", dom.split("<tbody>")[-1].split("</tbody>")[0]
    ) if int(text.replace(",", "")) > 2048]
    assert len(set(speeds)) == 6 and speeds == sorted(speeds)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("policy", ["", "img-src 'none'"])
def test_the_check_for_requests_sees_one(tmp_path, policy):
    page = tmp_path / "page.html"
    page.write_text(
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title></title>'
        '<img src="http://127.0.0.1:9/pixel.png">'
    )
    assert browse(page, tmp_path)[1] == {"http://127.0.0.1:9/pixel.png"}
