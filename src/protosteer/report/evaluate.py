"""Format an evaluation: JSON, CSV, tables, and an HTML page with thumbnails."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
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
from protosteer.report import html, svg
from protosteer.report.plots import most_errors, short_name
from protosteer.report.tables import numbers, plain_table
from protosteer.util.statistics import Bins, calibration_error, reliability
from protosteer.util.text import counted, listed, printable, without_control
from protosteer.workflows.evaluate_folder import EvaluatedImage, Evaluation

MAX_LISTED = 10  # mistakes in the terminal
MAX_UNCERTAIN = 48  # thumbnails of images that were nearly misclassified
MAX_MISTAKES = 1_000  # thumbnails of mistakes
MAX_CONFUSED = 20  # pairs in a page
MAX_DRAWN = 40  # classes in the map of a page
SIDE = 112  # pixels of a thumbnail
CSV_COLUMNS = ("path", "label", "predicted", "probability", "correct", "learned", "error")


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
    """Return sentences about the accuracy of the model and the calibration of its probabilities."""
    accuracy, classes = evaluation.accuracy, len({image.label for image in evaluation.images})
    lines = [f"Accuracy: {accuracy} right, {counted(accuracy.images, 'image')} of {counted(classes, 'class')}"]
    error = calibration_error(bins(evaluation))
    lines.append(f"Calibration: probabilities are off by {error:.0f} percentage points on average")
    return lines


def overview(evaluation: Evaluation) -> list[RenderableType]:
    """Show the accuracy, every class, what is confused most, and the most confident mistakes."""
    table = plain_table(None, "Class", *numbers(["Images", "Found", "Correct when named", "F1"]))
    for row in _class_rows(evaluation):
        table.add_row(*row)
    parts: list[RenderableType] = [*map(Text, summary(evaluation)), table]
    confusions = [f"  {a} predicted as {b}: {counted(n, 'image')}" for a, b, n in evaluation.most_confused(5)]
    if confusions:
        parts.append(Text("\n".join(["Most confused:", *map(printable, confusions)])))
    mistakes = evaluation.mistakes
    lines = [f"  {i.path}: {i.predicted} {100 * i.probability:.0f} %, not {i.label}" for i in mistakes[:MAX_LISTED]]
    if mistakes:
        qualifier = f", the {MAX_LISTED} most confident" if len(mistakes) > MAX_LISTED else ""
        parts.append(Text("\n".join([f"{counted(len(mistakes), 'mistake')}{qualifier}:", *map(printable, lines)])))
    return parts


def warnings(evaluation: Evaluation) -> list[str]:
    """Return warnings about what makes the accuracy look better or worse than it is."""
    lines = []
    learned_count = sum(image.learned for image in evaluation.images)
    if learned_count:
        counts = f"{learned_count:,} of {counted(len(evaluation.images), 'image')}"
        lines.append(f"warning: the model was learned from {counts}; take new images for an honest accuracy")
    if evaluation.unknown_classes:
        lines.append(f"warning: not classes of the model, so all wrong: {listed(evaluation.unknown_classes)}")
    return lines


def _class_rows(evaluation: Evaluation) -> Iterator[list[str]]:
    """Yield name, number of images, recall, precision and F1 of each class."""
    for name, scores in evaluation.per_class().items():
        yield [name, f"{scores.support:,}", *map(_percent, (scores.recall, scores.precision, scores.f1))]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"


def as_html(evaluation: Evaluation, title: str) -> str:
    """Return a page without other files: metrics, plots, and thumbnails of mistakes and of the least certain images."""
    mistakes, least_certain = evaluation.mistakes, evaluation.least_certain[:MAX_UNCERTAIN]
    headings = ("Class", "Images", "Found (recall)", "Correct when named (precision)", "F1")
    lines = (list(map(html.text, row)) for row in _class_rows(evaluation))
    headline, *details = summary(evaluation)
    qualifier = f" (the {MAX_MISTAKES:,} most confident)" if len(mistakes) > MAX_MISTAKES else ""
    confusions = ([html.text(a), html.text(b), f"{n:,}"] for a, b, n in evaluation.most_confused(MAX_CONFUSED))
    return html.page(
        title,
        html.paragraph(headline, "big"),
        *(html.paragraph(line) for line in (*details, *warnings(evaluation))),
        html.section(f"{len(mistakes):,} mistakes{qualifier}", _tiles(mistakes[:MAX_MISTAKES])),
        html.section("Right, but least certain", _tiles(least_certain)),
        html.section("Classes", html.table(headings, lines)),
        html.section("Actual and predicted classes", _confusion(evaluation)),
        html.section("Most confused", html.table(("actual", "predicted", "images"), confusions, words=2)),
        html.section("Reliability of probabilities", svg.reliability_chart({"": bins(evaluation)})),
    )


def _confusion(evaluation: Evaluation) -> str:
    """Draw shares of each class's images, for the classes with the most errors."""
    counts = evaluation.confusion()
    classes = most_errors(counts, MAX_DRAWN).tolist()
    names = [short_name(evaluation.labels[k]) for k in classes]
    cells = [[100.0 * counts[a][b] / sum(counts[a]) if counts[a][b] else None for b in classes] for a in classes]
    remark = f" The {MAX_DRAWN} classes with the most errors are shown." if len(classes) < len(counts) else ""
    note = f"Percent of each actual class's images.{remark}"
    chart = svg.heat_map(cells, names, names, ("actual", "predicted"), decimals=0)
    return html.paragraph(note, "note") + chart


def _tiles(images: Sequence[EvaluatedImage]) -> str:
    pairs = zip(images, in_threads(lambda image: _thumbnail(image.path), images), strict=True)
    return html.tiles(html.figure(source, _caption(image), SIDE) for image, source in pairs)


def _caption(image: EvaluatedImage) -> str:
    answer = f"<b>{html.text(image.predicted)}</b> {100 * image.probability:.0f} %"
    actual = "" if image.correct else f"<br>is: <b>{html.text(image.label)}</b>"
    return f'{answer}{actual}<br><span class="file">{html.text(str(image.path))}</span>'


def _thumbnail(path: Path) -> str:
    try:
        with opened(path) as image, DECODING.reserve(decoded_bytes(image)):
            return html.jpeg_uri(ImageOps.fit(to_rgb(image), (SIDE, SIDE)))
    except (DataError, OSError):  # the file was removed after its prediction
        return ""
