"""Draws docs/images/{method,operations}-{light,dark}.svg: python tools/draw_diagrams.py"""

from __future__ import annotations

from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
COLOURS = {
    "light": {
        "ink": "#1f2933",
        "line": "#52606d",
        "box": "#f0f4f8",
        "frozen": "#dbeafe",
        "stored": "#d1fae5",
        "gone": "#fee2e2",
    },
    "dark": {
        "ink": "#e4e7eb",
        "line": "#9aa5b1",
        "box": "#27303a",
        "frozen": "#1e3a5f",
        "stored": "#14532d",
        "gone": "#5f1e1e",
    },
}
WIDTH, ROW = 168, 22


class Drawing:
    """A list of SVG elements in one colour scheme."""

    def __init__(self, scheme: str, width: int, height: int, title: str):
        self.colours, self.size, self.title = COLOURS[scheme], (width, height), title
        self.parts: list[str] = []

    def box(self, x: int, y: int, lines: list[str], kind: str = "box", width: int = WIDTH) -> None:
        """Draw a box with a bold first line."""
        height = ROW * len(lines) + 16
        fill, ink, line = self.colours[kind], self.colours["ink"], self.colours["line"]
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{line}"/>'
        )
        for i, text in enumerate(lines):
            weight = ' font-weight="600"' if i == 0 else ""
            self.parts.append(
                f'<text x="{x + width // 2}" y="{y + 24 + ROW * i}" text-anchor="middle"{weight} fill="{ink}">{escape(text)}</text>'
            )

    def text(self, x: int, y: int, text: str, anchor: str = "middle") -> None:
        """Write one line of small text."""
        ink = self.colours["ink"]
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="13" fill="{ink}">{escape(text)}</text>'
        )

    def arrow(self, x1: int, y1: int, x2: int, y2: int, dashed: bool = False) -> None:
        """Draw a line with a head at its end."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        line = self.colours["line"]
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{line}" stroke-width="1.6"{dash} marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """Return the file."""
        (width, height), line = self.size, self.colours["line"]
        head = f'<path d="M0 0 L8 4 L0 8 z" fill="{line}"/>'
        marker = f'<marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">{head}</marker>'
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="15">\n<title>{escape(self.title)}</title>\n'
            f"<defs>{marker}</defs>\n{body}\n</svg>\n"
        )


def method(scheme: str) -> str:
    """Draw the way of an image to a prediction."""
    d = Drawing(scheme, 940, 300, "How protosteer predicts")
    d.box(10, 30, ["image", "any size"], width=120)
    d.box(180, 30, ["frozen ViT", "one forward pass"], "frozen")
    d.box(398, 30, ["features", "of several layers"])
    d.box(616, 30, ["scores of all classes", "whitened cosines,", "kernel ridge"], width=180)
    d.box(180, 180, ["shared prompt", "trained once", "(preset fast)"], "stored")
    d.box(398, 180, ["class summaries", "up to 34 vectors", "per class"], "stored")
    d.box(616, 180, ["leave-one-out", "layer weights, scale,", "threshold"], width=180)
    d.box(830, 30, ["class", "probability", "unknown?"], width=100)
    for x1, x2 in ((130, 180), (348, 398), (566, 616), (796, 830)):
        d.arrow(x1, 62, x2, 62)
    d.arrow(264, 180, 264, 92)
    d.arrow(482, 92, 482, 180, dashed=True)
    d.text(490, 140, "learn", "start")
    d.arrow(566, 200, 640, 114)
    d.arrow(566, 232, 616, 232)
    d.arrow(720, 180, 720, 114)
    d.text(
        10,
        288,
        "blue: pre-trained, never changes · green: stored in the model file · dashed: while a task is learned",
        "start",
    )
    return d.svg()


def operations(scheme: str) -> str:
    """Draw learn, forget and merge as operations on a list of records."""
    d = Drawing(scheme, 940, 330, "Learn, forget and merge are list operations")
    for x, title in ((20, "learn"), (340, "forget"), (660, "merge")):
        d.box(x, 10, [title], width=90)
    d.box(20, 70, ["january", "one, two, zero"], "stored")
    d.box(20, 140, ["february", "three, four"], "stored")
    d.box(20, 240, ["march", "five, six"], "box")
    d.arrow(104, 238, 104, 204)
    d.text(114, 226, "append a record", "start")
    d.box(340, 70, ["january", "one, two, zero"], "stored")
    d.box(340, 140, ["february", "three, four"], "gone")
    d.box(340, 210, ["march", "five, six"], "stored")
    d.arrow(508, 170, 560, 170)
    d.text(566, 175, "removed", "start")
    d.box(660, 70, ["january", "one, two, zero"], "stored", 130)
    d.box(660, 140, ["march", "five, six"], "stored", 130)
    d.box(800, 70, ["april", "seven, eight"], "stored", 130)
    d.box(700, 240, ["january, march, april"], "stored", 210)
    d.arrow(725, 200, 790, 238)
    d.arrow(865, 130, 840, 238)
    d.text(
        20,
        318,
        "Each record is self-contained: names, class summaries, and a prompt if one was trained. No images.",
        "start",
    )
    return d.svg()


def main() -> None:
    """Write all diagrams."""
    for scheme in COLOURS:
        for name, draw in (("method", method), ("operations", operations)):
            (IMAGES / f"{name}-{scheme}.svg").write_text(draw(scheme), encoding="utf-8")


if __name__ == "__main__":
    main()
