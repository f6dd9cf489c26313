"""Self-contained HTML pages: `page.css`, `page.js` for hover values and sorting, tables and pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from PIL import Image

from protosteer.util.text import printable

_FOLDER = Path(__file__).with_name("page")
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(title: str, *parts: str) -> str:
    """Return a self-contained page, which may not use the network."""
    style, script = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{style}</style></head>'
        f'<body><h1>{text(title)}</h1>{"".join(parts)}<div id="tip"></div><script>{script}</script></body></html>\n'
    )


def section(title: str, *parts: str) -> str:
    """Return a heading and its contents; nothing if they are empty."""
    content = "".join(parts)
    return f"<section><h2>{text(title)}</h2>{content}</section>" if content else ""


def subsection(title: str, content: str) -> str:
    """Return a small heading and its content; nothing if that is empty."""
    return f"<h3>{text(title)}</h3>{content}" if content else ""


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
    grid = "".join(figures)
    return f'<div class="tiles">{grid}</div>' if grid else paragraph("None.")


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


def jpeg_uri(picture: Image.Image) -> str:
    """Return a picture as an address, for `src`."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    return data_uri(file.getvalue(), "jpeg")


def text(words: str) -> str:
    """Escape plain text."""
    return escape(printable(words))
