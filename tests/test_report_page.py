"""The report's page is safe, whole and offline, and its command says what went wrong."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from report_records import NASTY, record, specs, sweep, values, write_curves

from flashmod import report
from flashmod.experiments.report import main

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def test_user_text_is_escaped_everywhere(tmp_path):
    for number, length in enumerate((256, 512)):
        for data in ("synthetic", NASTY):
            record(
                tmp_path / f"{number}{data == NASTY}",
                length=length,
                name=NASTY,
                command=[NASTY],
                data__name=NASTY,
                environment__host=NASTY,
                environment__cpu=NASTY,
                config__data={"name": data, "seq_len": length},
            )
    record(
        tmp_path / "bad",
        status="failed",
        name=NASTY,
        error={"type": NASTY, "message": NASTY, "traceback": NASTY},
    )
    (tmp_path / "bad/../unreadable<b>").mkdir()
    (tmp_path / "unreadable<b>/result.json").write_text("[]")
    write_curves(tmp_path / "0True")
    page = report.write([tmp_path]).read_text(encoding="utf-8")
    assert "evil.example" in page and any(
        "evil" in json.dumps(s) for s in specs(tmp_path / "report.html").values()
    )
    assert "<img src=http" not in page and "unreadable<b>" not in page
    assert page.count("</script>") == 3  # the charts' data, the library, ours


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
        "for flag in ('--help', '--version'):\n"
        "    try: main([flag])\n    except SystemExit as e: assert e.code == 0\n"
        "assert not {'altair', 'vl_convert', 'pandas'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "result.json" in done.stdout and "flashmod-report 0." in done.stdout


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
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=6000",
            "--dump-dom",
            watched.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    found = re.search(r'<html[^>]* data-seen="([^"]*)"', done.stdout)
    assert found, "the page's scripts did not run to the end"
    return done.stdout, set(found.group(1).split())


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_in_a_browser_all_charts_draw_without_a_request_and_the_table_sorts(tmp_path):
    write_curves(sweep(tmp_path / "runs") / "flash512")
    for number, error in enumerate((2e-5, 9e-7, 1e-4)):
        record(tmp_path / f"runs/{number}", metrics={"grad_error/dq": error})
    page = report.write([tmp_path / "runs"])
    click = (
        "<script>[...document.querySelectorAll('.sortable th button')]"
        ".find(b => b.textContent === 'worst gradient error').click()</script>"
    )
    dom, asked = browse(page, tmp_path, click)
    assert not asked
    assert len(re.findall(r'<svg [^>]*class="marks"', dom)) == len(specs(page)) == 5
    assert dom.count("This chart failed to draw") == 1  # the words in the script itself
    body = dom.split('class="sortable"')[1].split("<tbody>")[1].split("</tbody>")[0]
    errors = [float(text) for text in re.findall(r">(\de-\d)</td>", body)]
    assert errors == [*[3e-7] * 6, 9e-7, 2e-5, 1e-4]


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("policy", ["", "img-src 'none'"])
def test_the_check_for_requests_sees_one(tmp_path, policy):
    page = tmp_path / "page.html"
    page.write_text(
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title></title>'
        '<img src="http://127.0.0.1:9/pixel.png">'
    )
    assert browse(page, tmp_path)[1] == {"http://127.0.0.1:9/pixel.png"}
