"""The page that the demo ends with: what happened in three sentences, tables and pictures, in one HTML file."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from PIL import Image
from torch import Tensor

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
_STYLE = """
:root { color-scheme: light dark; } body { font: 16px/1.55 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem;
padding: 0 1rem; } .lead { font-size: 1.25rem; } table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #8884; }
td:first-child, th:first-child { text-align: left; } tr.ours { font-weight: 600; } img.plot { max-width: 100%; background: white; }
.samples { display: flex; flex-wrap: wrap; gap: .8rem; } figure { margin: 0; text-align: center; }
.samples img { image-rendering: pixelated; border-radius: 6px; } figcaption { font-size: .85rem; } .wrong { color: #d33; }
"""


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
    lead = "".join(f"<p class=lead>{escape(sentence)}</p>" for sentence in sentences)
    body = "".join(_part(part, ours) for part in parts)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>protosteer demo</title><style>{_STYLE}</style><h1>What the demo showed</h1>{lead}{body}</html>\n"
    )


def _part(part: Part, ours: str) -> str:
    head = "".join(f"<th>{escape(title)}" for title in ("method", *COLUMNS.values()))
    rows = "".join(
        f"<tr{' class=ours' if name == ours else ''}><td>{escape(name)}"
        + "".join(f"<td>{_number(values.get(column))}" for column in COLUMNS)
        for name, values in part.variants.items()
    )
    samples = "".join(_figure(sample) for sample in part.samples)
    plots = "".join(
        f"<h3>{escape(PLOTS[name])}</h3><img class=plot alt='{escape(PLOTS[name])}' src='{_address(part.plots[name])}'>"
        for name in PLOTS
        if name in part.plots
    )
    return (
        f"<h2>{escape(part.title)}</h2><table><tr>{head}{rows}</table>"
        f"<p>New images, with the class that {escape(ours)} predicts:</p><div class=samples>{samples}</div>{plots}"
    )


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _figure(sample: Sample) -> str:
    picture = Image.fromarray(sample.pixels.permute(1, 2, 0).numpy()).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    out = io.BytesIO()
    picture.save(out, "PNG")
    right = sample.actual == sample.predicted
    told = (
        escape(sample.predicted)
        if right
        else f"<span class=wrong>{escape(sample.predicted)}</span>, is {escape(sample.actual)}"
    )
    return f"<figure><img width={SIDE} height={SIDE} alt='' src='{_address(out.getvalue())}'><figcaption>{told}</figcaption></figure>"


def _address(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
