"""Format an evaluation: JSON, CSV, tables, and an HTML page with thumbnails."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from PIL import ImageOps
from rich.console import RenderableType
from rich.text import Text

from protosteer.data.decode_budget import DECODING, decoded_bytes
from protosteer.data.image_files import in_threads, opened
from protosteer.data.transforms import to_rgb
from protosteer.errors import DataError
from protosteer.report.plots import confusion_matrix
from protosteer.report.reliability import reliability_plot
from protosteer.report.tables import numbers, plain_table
from protosteer.util.statistics import Bins, calibration_error, reliability
from protosteer.util.text import counted, listed, printable, without_control
from protosteer.workflows.evaluate_folder import EvaluatedImage, Evaluation

MAX_LISTED = 10  # mistakes in the terminal
MAX_UNCERTAIN = 48  # thumbnails of images that were nearly misclassified
MAX_MISTAKES = 1_000  # thumbnails of mistakes
SIDE = 112  # pixels of a thumbnail
CSV_COLUMNS = ("path", "label", "predicted", "probability", "correct", "learned", "error")
_STYLE = """
:root { color-scheme: light dark; } body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem;
padding: 0 1rem; } h1 { font-size: 1.5rem; } .big { font-size: 2.2rem; font-weight: 600; } table { border-collapse:
collapse; } td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8884; } td:first-child,
th:first-child { text-align: left; } .grid { display: grid; gap: 1rem;
grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); } figure { margin: 0; } figure img { border-radius: 6px; }
figcaption { font-size: .85rem; overflow-wrap: anywhere; } .file { opacity: .65; font-size: .75rem; }
img.plot { max-width: 100%; background: white; }
"""


def bins(evaluation: Evaluation) -> Bins:
    """Return accuracy by confidence, of all images."""
    confidence = torch.tensor([image.probability for image in evaluation.images])
    return reliability(confidence, torch.tensor([image.correct for image in evaluation.images]))


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Return all metrics as plain data."""
    accuracy = evaluation.accuracy
    return {
        "accuracy": accuracy.percent,
        "interval": list(accuracy.interval),
        "calibration_error": calibration_error(bins(evaluation)),
        "images": accuracy.images,
        "learned_images": sum(image.learned for image in evaluation.images),
        "unknown_classes": evaluation.unknown_classes,
        "classes": {name: vars(metrics) for name, metrics in evaluation.per_class().items()},
        "confusion": {"classes": evaluation.labels, "counts": evaluation.confusion()},
        "confused": [
            {"class": actual, "predicted": predicted, "images": count}
            for actual, predicted, count in evaluation.most_confused()
        ],
        "mistakes": [
            {"path": str(i.path), "label": i.label, "predicted": i.predicted, "probability": i.probability}
            for i in evaluation.mistakes
        ],
        "unreadable": {str(path): error for path, error in evaluation.errors.items()},
    }


def as_csv(evaluation: Evaluation) -> str:
    """Return one line per file, with a heading."""
    out = io.StringIO()
    table = csv.DictWriter(out, CSV_COLUMNS, restval="", lineterminator="\n")
    table.writeheader()
    for image in evaluation.images:
        flags = {"correct": str(image.correct).lower(), "learned": str(image.learned).lower()}
        row = {**vars(image), **flags, "probability": f"{image.probability:.6f}"}
        table.writerow({name: without_control(str(value)) for name, value in row.items()})
    for path, error in evaluation.errors.items():
        table.writerow({"path": without_control(str(path)), "error": without_control(error)})
    return out.getvalue().rstrip("\n")


def summary(evaluation: Evaluation) -> list[str]:
    """Say how accurate the model is and how far its probabilities can be trusted."""
    accuracy, classes = evaluation.accuracy, len({image.label for image in evaluation.images})
    lines = [f"Accuracy: {accuracy} right, {counted(accuracy.images, 'image')} of {counted(classes, 'class')}"]
    off = calibration_error(bins(evaluation))
    lines.append(f"Calibration: probabilities are off by {off:.0f} percentage points on average")
    return lines


def overview(evaluation: Evaluation) -> list[RenderableType]:
    """Show the accuracy, every class, what is confused most, and the most confident mistakes."""
    table = plain_table(None, "Class", *numbers(["Images", "Found", "Correct when named", "F1"]))
    for name, one in evaluation.per_class().items():
        shares = [_percent(value) for value in (one.recall, one.precision, one.f1)]
        table.add_row(Text(printable(name)), f"{one.support:,}", *shares)
    parts: list[RenderableType] = [*map(Text, summary(evaluation)), table]
    confused = [f"  {a} predicted as {b}: {counted(n, 'image')}" for a, b, n in evaluation.most_confused(5)]
    if confused:
        parts.append(Text("\n".join(["Most confused:", *map(printable, confused)])))
    mistakes = evaluation.mistakes
    lines = [f"  {i.path}: {i.predicted} {100 * i.probability:.0f} %, not {i.label}" for i in mistakes[:MAX_LISTED]]
    if mistakes:
        more = f", the {MAX_LISTED} most confident" if len(mistakes) > MAX_LISTED else ""
        parts.append(Text("\n".join([f"Mistakes: {len(mistakes):,}{more}:", *map(printable, lines)])))
    return parts


def warnings(evaluation: Evaluation) -> list[str]:
    """Say what makes the accuracy look better or worse than it is."""
    lines = []
    learned = sum(image.learned for image in evaluation.images)
    if learned:
        counts = f"{learned:,} of {counted(len(evaluation.images), 'image')}"
        lines.append(f"warning: the model was learned from {counts}; take new images for an honest accuracy")
    if evaluation.unknown_classes:
        lines.append(f"warning: not classes of the model, so all wrong: {listed(evaluation.unknown_classes)}")
    return lines


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"


def as_html(evaluation: Evaluation, title: str) -> str:
    """Return a page without other files: metrics, plots, and thumbnails of mistakes and of the least certain images."""
    mistakes, uncertain = evaluation.mistakes, evaluation.least_certain[:MAX_UNCERTAIN]
    rows = "".join(
        f"<tr><td>{_text(name)}</td><td>{one.support:,}</td><td>{_percent(one.recall)}</td>"
        f"<td>{_percent(one.precision)}</td><td>{_percent(one.f1)}</td></tr>"
        for name, one in evaluation.per_class().items()
    )
    heads = "".join(
        f"<th>{word}</th>" for word in ("Class", "Images", "Found (recall)", "Correct when named (precision)", "F1")
    )
    first, *others = summary(evaluation)
    plots = (confusion_matrix(evaluation.labels, evaluation.confusion()), reliability_plot({"": [bins(evaluation)]}))
    pictures = "".join(f'<p><img class="plot" alt="" src="{_data(plot, "png")}"></p>' for plot in plots)
    said = "".join(f"<p>{_text(line)}</p>" for line in (*others, *warnings(evaluation)))
    more = f" (the {MAX_MISTAKES:,} most confident)" if len(mistakes) > MAX_MISTAKES else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><h1>{_text(title)}</h1>'
        f'<p class="big">{_text(first)}</p>{said}'
        f"<h2>{len(mistakes):,} mistakes{more}</h2>{_grid(mistakes[:MAX_MISTAKES])}"
        f"<h2>Right, but least certain</h2>{_grid(uncertain)}"
        f"<h2>Classes</h2><table><tr>{heads}</tr>{rows}</table>{pictures}</html>\n"
    )


def _grid(images: Sequence[EvaluatedImage]) -> str:
    shown = zip(images, in_threads(lambda image: _thumbnail(image.path), images), strict=True)
    return f'<div class="grid">{"".join(_figures(shown))}</div>' if images else "<p>None.</p>"


def _figures(shown: Iterable[tuple[EvaluatedImage, str]]) -> Iterable[str]:
    for image, source in shown:
        answer = f"<b>{_text(image.predicted)}</b> {100 * image.probability:.0f} %"
        actual = "" if image.correct else f"<br>is: <b>{_text(image.label)}</b>"
        file = f'<br><span class="file">{_text(str(image.path))}</span>'
        picture = f'<img loading="lazy" alt="" width="{SIDE}" height="{SIDE}" src="{source}">'
        yield f"<figure>{picture}<figcaption>{answer}{actual}{file}</figcaption></figure>"


def _thumbnail(path: Path) -> str:
    out = io.BytesIO()
    try:
        with opened(path) as image, DECODING.taken(decoded_bytes(image)):
            ImageOps.fit(to_rgb(image), (SIDE, SIDE)).save(out, "JPEG", quality=80)
    except (DataError, OSError):  # gone since it was predicted
        return ""
    return _data(out.getvalue(), "jpeg")


def _data(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _text(words: str) -> str:
    return escape(printable(words))
