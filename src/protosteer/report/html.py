"""Self-contained HTML pages: style, a small script for hover values and sorting, tables and pictures."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from protosteer.util.text import printable

# Okabe and Ito's colours for lines, with lighter ones in dark mode; ten steps of one hue for heat maps.
_LIGHT = ("#0072B2", "#D55E00", "#007A5A", "#A6528A", "#8A6D00", "#2E86AB", "#444444", "#8C2D04")
_DARK = ("#56B4E9", "#FF9D4D", "#3FCF9F", "#E79BC8", "#F0E442", "#9AD1F5", "#C8C8C8", "#FFB37A")
_HEAT = ("#F4F7FB", "#E1EAF4", "#CDDDEE", "#B5CDE5", "#99BBDB", "#7AA6CF", "#588FC0", "#3A76AD", "#215C93", "#0D4374")


def _style() -> str:
    light, dark = ("".join(f"--s{i}:{colour};" for i, colour in enumerate(colours)) for colours in (_LIGHT, _DARK))
    series = "".join(
        f".s{i}{{--c:var(--s{i})}}" for i in range(len(_LIGHT))
    )  # fmt: skip
    heat = "".join(
        f".h{i}{{fill:{colour}}}.t{i}{{fill:{'#102030' if i < 6 else '#fff'}}}" for i, colour in enumerate(_HEAT)
    )
    return (
        ":root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--soft:#57606a;--edge:#d5dae0;--panel:#f6f8fa;"
        + light
        + "}"
        "@media (prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e8eaed;--soft:#a2abb5;--edge:#363c44;--panel:#1d2127;"
        + dark
        + "}}"
        "*{box-sizing:border-box}body{font:16px/1.55 system-ui,sans-serif;margin:0 auto;max-width:72rem;padding:1rem 1rem 4rem;"
        "background:var(--paper);color:var(--ink)}h1{font-size:1.5rem;margin:.6rem 0}h2{font-size:1.15rem;margin:2.2rem 0 .5rem;"
        "border-bottom:1px solid var(--edge);padding-bottom:.2rem}h3{font-size:1rem;margin:1rem 0 .3rem}"
        ".big{font-size:1.25rem;font-weight:600;line-height:1.4}.note,.file,.legend,figcaption{color:var(--soft);font-size:.88rem}"
        ".scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums}"
        "td,th{padding:.25rem .7rem;text-align:right;border-bottom:1px solid var(--edge);vertical-align:top}"
        "td{white-space:nowrap}td.words{white-space:normal}td:first-child,th:first-child{text-align:left}th{font-weight:600}th[data-sort]{cursor:pointer;user-select:none}"
        "th[data-sort]:hover{text-decoration:underline}td.words,th.words{text-align:left}"
        "svg{display:block;width:100%;height:auto;margin:.4rem 0}.tick{fill:var(--soft);font-size:12px}.cell{font-size:11px}"
        ".grid{stroke:var(--edge);stroke-width:1}.name{fill:var(--ink);stroke:var(--paper);stroke-width:3;paint-order:stroke;font-size:15px;font-weight:700}.diagonal{stroke:var(--soft);stroke-dasharray:4 3}"
        ".line{fill:none;stroke:var(--c);stroke-width:2}.band{fill:var(--c);opacity:.16}.dot{fill:var(--c);stroke:var(--paper)}"
        ".dot.small{stroke:none;opacity:.8}.dashed{stroke-dasharray:6 4}[data-tip]:hover{opacity:.7}"
        + series
        + heat
        + ""
        ".key{display:inline-block;margin-right:1.1rem}.key i{display:inline-block;width:1.4rem;border-top:3px solid var(--c);"
        "margin-right:.4rem;vertical-align:middle}.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(20rem,1fr));gap:1.2rem}"
        ".tiles{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(9rem,1fr))}figure{margin:0}"
        "figure img,.shot{border-radius:6px;image-rendering:auto}figcaption{overflow-wrap:anywhere;color:var(--ink)}"
        ".file{font-size:.76rem}.track{display:inline-block;width:6rem;text-align:left}.bar{display:inline-block;height:.55rem;background:var(--s0);border-radius:2px}"
        "details{margin:.6rem 0}pre{background:var(--panel);padding:.8rem;overflow-x:auto;font-size:.78rem;border-radius:6px}"
        "#tip{position:fixed;pointer-events:none;background:var(--ink);color:var(--paper);padding:.2rem .5rem;border-radius:4px;"
        "font-size:.82rem;max-width:20rem;display:none;z-index:9}"
        "@media (max-width:34rem){body{font-size:15px;padding:.6rem .6rem 3rem}.big{font-size:1.08rem}.pair{grid-template-columns:1fr}"
        "td,th{padding:.2rem .4rem}.wide .tick{font-size:18px}.shot{width:2.4rem;height:2.4rem}.track{width:3.5rem}}"
        "@media print{body{max-width:none;background:#fff;color:#000}h2{break-after:avoid}svg,table,figure{break-inside:avoid}}"
    )


# Values on hover and touch, and tables that sort by a heading: numbers by size, words by alphabet.
_SCRIPT = """
const tip = document.getElementById("tip");
const show = (event) => {
  const text = event.target.closest?.("[data-tip]")?.dataset.tip;
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 4)) + "px";
  tip.style.top = Math.max(4, event.clientY - box.height - 10) + "px";
};
for (const kind of ["mousemove", "touchstart"]) document.addEventListener(kind, show, { passive: true });
const key = (row, i) => {
  const text = row.cells[i]?.textContent.trim() ?? "", number = parseFloat(text.replace(/,/g, "").replace("−", "-"));
  return Number.isNaN(number) ? [1, text.toLowerCase()] : [0, number];
};
for (const head of document.querySelectorAll("th[data-sort]")) {
  const sort = () => {
    const body = head.closest("table").tBodies[0], i = head.cellIndex, up = head.ariaSort !== "ascending";
    for (const other of head.parentElement.cells) other.ariaSort = null;
    head.ariaSort = up ? "ascending" : "descending";
    const order = (a, b) => {
      const [x, y] = [key(a, i), key(b, i)];
      return (x[0] - y[0] || (x[1] < y[1] ? -1 : x[1] > y[1] ? 1 : 0)) * (up ? 1 : -1);
    };
    body.append(...[...body.rows].sort(order));
  };
  head.tabIndex = 0;
  head.addEventListener("click", sort);
  head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
}
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(title: str, *parts: str) -> str:
    """Return a page without other files; it may not use the network."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_style()}</style></head>'
        f'<body><h1>{text(title)}</h1>{"".join(parts)}<div id="tip"></div><script>{_SCRIPT}</script></body></html>\n'
    )


def section(title: str, *parts: str) -> str:
    """Return a heading and its contents; nothing if they are empty."""
    whole = "".join(parts)
    return f"<section><h2>{text(title)}</h2>{whole}</section>" if whole else ""


def table(headings: Sequence[str], lines: Iterable[Sequence[str]], words: int = 1) -> str:
    """Return a sortable table of HTML cells; the first `words` columns are not numbers."""
    classes = ['class="words" ' if i < words else "" for i in range(len(headings))]
    heads = "".join(f"<th {c}data-sort>{text(head)}</th>" for c, head in zip(classes, headings, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td {c}>{cell}</td>" for c, cell in zip(classes, line, strict=True)) + "</tr>"
        for line in lines
    )
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def paragraph(words: str, kind: str = "") -> str:
    """Return a paragraph of plain text."""
    return f'<p class="{kind}">{text(words)}</p>' if kind else f"<p>{text(words)}</p>"


def tiles(figures: Iterable[str]) -> str:
    """Return figures in a grid."""
    whole = "".join(figures)
    return f'<div class="tiles">{whole}</div>' if whole else paragraph("None.")


def figure(source: str, caption: str, side: int) -> str:
    """Return a picture with a caption of HTML."""
    picture = f'<img loading="lazy" alt="" width="{side}" height="{side}" src="{source}">'
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def share_bar(percent: float | None) -> str:
    """Return a percentage with a bar as long as it; a dash for None."""
    if percent is None:
        return "–"
    bar = f'<span class="bar" style="width:{max(0.0, percent):.0f}%"></span>'
    return f'{percent:.1f} <span class="track">{bar}</span>'


def data_uri(content: bytes, kind: str) -> str:
    """Return a picture's bytes as an address, for `src`."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def text(words: str) -> str:
    """Escape plain text."""
    return escape(printable(words))


def text_block(words: str) -> str:
    """Return plain text of several lines."""
    return f"<pre>{chr(10).join(text(line) for line in words.splitlines())}</pre>"
