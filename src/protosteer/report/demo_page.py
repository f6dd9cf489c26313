"""Format the result of the demo as one HTML file: three sentences, tables and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor

from protosteer.report import html

SIDE = 96  # pixels of a sample
COLUMNS = {
    "last_accuracy": "correct at the end (%)",
    "last_forgetting": "forgotten (percentage points)",
    "calibration_error": "confidence off by (percentage points)",
    "passes_per_image": "forward passes per image",
    "bytes_per_class": "bytes per class",
}
PLOTS = {
    "curve.png": "Accuracy on everything learned so far, after each task",
    "matrix.png": "Accuracy on each task, after each task",
    "reliability.png": "How often predictions are correct, by how confident they are",
    "tsne.png": "Test images before and after training, in two dimensions",
}


@dataclass(frozen=True)
class Sample:
    """A test image with its class and the class that the reloaded model predicts."""

    pixels: Tensor  # uint8 [3, h, w]
    actual: str
    predicted: str


@dataclass(frozen=True)
class Part:
    """One half of the demo: its metrics, samples, and plots as PNG files."""

    title: str
    variants: Mapping[str, Mapping[str, Any]]
    samples: Sequence[Sample]
    plots: Mapping[str, bytes]


def page(sentences: Sequence[str], parts: Sequence[Part], ours: str) -> str:
    """Return the page; it needs no other file."""
    lead = [html.paragraph(sentence, "big") for sentence in sentences]
    return html.page("What the demo showed", *lead, *(html.section(part.title, _part(part, ours)) for part in parts))


def _part(part: Part, ours: str) -> str:
    lines = (_line(name, values, name == ours) for name, values in part.variants.items())
    samples = html.paragraph(f"New images, with the class that {ours} predicts:") + html.tiles(
        map(_figure, part.samples)
    )
    plots = (
        html.subsection(title, f'<img class="plot" alt="{title}" src="{html.data_uri(part.plots[name], "png")}">')
        for name, title in PLOTS.items()
        if name in part.plots
    )
    return html.table(["method", *COLUMNS.values()], lines) + samples + "".join(plots)


def _line(name: str, values: Mapping[str, Any], bold: bool) -> list[str]:
    cells = [html.text(name), *(_number(values.get(column)) for column in COLUMNS)]
    return [f"<b>{cell}</b>" for cell in cells] if bold else cells


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _figure(sample: Sample) -> str:
    picture = Image.fromarray(sample.pixels.permute(1, 2, 0).numpy()).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    caption = html.text(sample.predicted)
    if sample.predicted != sample.actual:
        caption = f'<span class="wrong">{caption}</span>, is {html.text(sample.actual)}'
    return html.figure(html.jpeg_uri(picture), caption, SIDE)
