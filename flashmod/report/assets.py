"""Style and script of the page, kept in Python so that no data file can be left out of a wheel."""

STYLE = """
:root { color-scheme: light dark; --bg: #ffffff; --fg: #1c2128; --soft: #5a6472; --line: #dde2e8;
  --card: #f6f8fa; --flash: #2f7ed8; --sdpa: #1f9d76; --dense: #e4572e; --twin: #f0a35e;
  --good: #1a7f4b; --bad: #c0351c; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171c; --fg: #e4e8ee; --soft: #9aa5b4;
  --line: #323945; --card: #1c2129; --good: #4cc38a; --bad: #ff7d66; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--fg);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem clamp(1rem, 3vw, 2.5rem) 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .3rem 0 .8rem; max-width: 48rem; }
.soft { color: var(--soft); font-size: .9rem; overflow-wrap: anywhere; }
.findings { list-style: none; margin: 1.2rem 0 0; padding: 0; display: grid; gap: .5rem; }
.findings li { display: grid; grid-template-columns: 6.5rem 1fr; gap: .2rem 1rem;
  padding: .6rem 1rem; background: var(--card); border-left: 4px solid var(--line);
  border-radius: 4px; overflow-wrap: anywhere; }
.findings .good { border-left-color: var(--good); }
.findings .bad { border-left-color: var(--bad); }
.findings .missing span { color: var(--soft); }
.grid { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
.grid h3 { margin: .4rem 0; }
figure { margin: 0; min-width: 0; }
.chart { width: 100%; min-height: 8rem; position: relative; }
.chart.vega-embed { padding-right: 0 !important; display: block; }
.chart details[title] { opacity: .6; }
.bar { display: grid; grid-template-columns: minmax(7rem, 14rem) 1fr minmax(8rem, 16rem);
  gap: .8rem; align-items: center; padding: .25rem 0; }
.bar .label { overflow-wrap: anywhere; }
.bar .value { font-variant-numeric: tabular-nums; }
.track { display: block; height: 1.1rem; }
.track i { display: block; height: 100%; background: var(--soft); border-radius: 2px; }
.track .flash { background: var(--flash); } .track .sdpa { background: var(--sdpa); }
.track .dense { background: var(--dense); } .track .dense-twin { background: var(--twin); }
.track .hollow { background: none; border: 2px solid var(--twin); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th button { all: unset; cursor: pointer; }
th button:focus-visible { outline: 2px solid var(--flash); }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th.number { white-space: normal; }
.sortable td:first-child { min-width: 12rem; max-width: 26rem; overflow-wrap: anywhere; }
.short { display: block; max-width: 9rem; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; }
.sortable td:last-child { white-space: nowrap; }
.over, .error, .badge.failed { color: var(--bad); }
.error { font-size: .8rem; overflow-wrap: anywhere; }
.badge.ok { color: var(--good); } .badge.running, .badge.interrupted { color: var(--twin); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .75rem; color: var(--fg); }
code { font-size: .85rem; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; font-size: .9rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.list { padding-left: 1.2rem; font-size: .9rem; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  .findings li, .bar { grid-template-columns: 1fr; gap: .1rem; }
  dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; }
}
"""

SCRIPT = """
const specs = JSON.parse(document.getElementById("specs").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
function theme() {
  const fg = dark.matches ? "#e4e8ee" : "#1c2128", soft = dark.matches ? "#9aa5b4" : "#5a6472";
  const line = dark.matches ? "#2b313b" : "#e4e8ed";
  return {
    background: "transparent", font: "system-ui, Segoe UI, Roboto, Liberation Sans, sans-serif",
    axis: { labelColor: soft, titleColor: soft, gridColor: line, domainColor: soft,
            tickColor: soft, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" },
    legend: { labelColor: fg, labelFontSize: 12, symbolStrokeWidth: 3, symbolSize: 90,
              symbolOpacity: 1 },
    text: { color: fg, fontSize: 12 }, rule: { color: soft }, view: { stroke: null },
  };
}
function draw() {
  for (const [id, spec] of Object.entries(specs)) {
    const box = document.getElementById(id);
    vegaEmbed(box, spec, {
      mode: "vega-lite", renderer: "svg", ast: true, config: theme(),
      downloadFileName: "flashmod-" + id,
      actions: { export: true, source: false, compiled: false, editor: false },
    }).catch(error => { box.textContent = "This chart failed to draw: " + error.message; });
  }
}
draw();
dark.addEventListener("change", draw);

for (const button of document.querySelectorAll(".sortable th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, table = head.closest("table"), column = head.cellIndex;
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = row => row.cells[column].dataset.sort;
    const order = (a, b) => {
      const x = value(a), y = value(b);
      if (x === "" || y === "") return (x === "") - (y === "");
      const numeric = head.classList.contains("number");
      const sign = numeric ? Number(x) - Number(y) : x.localeCompare(y, "en", { numeric: true });
      return up ? sign : -sign;
    };
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort(order));
  });
}
"""
