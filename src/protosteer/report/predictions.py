"""Predictions for a person, as lines of JSON, and as CSV: one image at a time, to be streamed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.nn.functional as F

from protosteer.method.inference import Index, Prediction
from protosteer.photos.rejection import Rejection
from protosteer.util.text import printable

COLUMNS = ("path", "label", "probability", "similarity", "energy", "unknown", "task")
Row = Mapping[str, Any]


def told(
    paths: list[str],
    prediction: Prediction,
    index: Index,
    top: int,
    rejection: Rejection | None,
    explain: bool,
) -> Iterator[Row]:
    """What JSON has of each image. rejection: tells unknown ones; None: nothing is unknown."""
    for i, (path, ranking) in enumerate(zip(paths, prediction.ranked(max(top, 2)), strict=True)):
        label, probability, similarity = ranking[0]
        reasons = _reasons(prediction, index, i, [name for name, *_ in ranking[:2]]) if explain else {}
        yield {
            "path": path,
            "label": label,
            "probability": probability,
            "similarity": similarity,
            "energy": float(prediction.energy[i]),
            "unknown": rejection is not None and rejection.unknown(label, similarity),
            "task": prediction.tasks[i],
            "top": [{"label": name, "probability": p, "similarity": s} for name, p, s in ranking[:top]],
            **reasons,
        }


def _reasons(prediction: Prediction, index: Index, i: int, ranking: list[str]) -> dict[str, Any]:
    """The tasks that were retrieved, which centroid of the class won, and the class that came second."""
    scores = prediction.scores[i]
    winner, *others = (prediction.classes.index(name) for name in ranking)
    own = (index.value_classes == winner).nonzero()[:, 0]
    similarity = F.normalize(prediction.embeddings[i], dim=0) @ index.values[own].T
    second = others[0] if others else None
    return {
        "candidates": prediction.candidates[i],
        "centroid": int(similarity.argmax()) + 1,
        "centroids": len(own),
        "centroid_similarity": float(similarity.max()),
        "runner_up": None if second is None else prediction.classes[second],
        "runner_up_similarity": None if second is None else float(scores[second]),
        "margin": None if second is None else float(scores[winner] - scores[second]),
    }


def as_text(row: Row) -> str:
    """Similarities, not probabilities: at the temperature of training these are nearly flat."""
    others = ", ".join(f"{other['label']} {other['similarity']:.3f}" for other in row["top"][1:])
    nearest = "unknown, nearest to " if row["unknown"] else ""
    text = f"{row['path']}: {nearest}{row['label']} {row['similarity']:.3f}"
    text = printable(f"{text}  ({others})" if others else text)
    if "candidates" not in row:
        return text
    why = f"retrieved: {', '.join(row['candidates'])}; won by centroid {row['centroid']} of "
    why += f"{row['centroids']}, similarity {row['centroid_similarity']:.3f}; "
    if row["runner_up"] is None:
        why += "no other class is known"
    else:
        why += f"runner-up: {row['runner_up']}, {row['runner_up_similarity']:.3f}"
    return f"{text}\n    {printable(why)}"


def csv_header(top: int, explain: bool) -> str:
    others = [f"{name}_{place}" for place in range(2, top + 1) for name in ("label", "probability")]
    return _csv([*COLUMNS, *others, *(["candidates", "runner_up"] if explain else [])])


def as_csv(row: Row) -> str:
    cells = [row[name] for name in COLUMNS]
    for other in row["top"][1:]:
        cells += [other["label"], other["probability"]]
    if "candidates" in row:
        cells += [";".join(row["candidates"]), row["runner_up"] or ""]
    return _csv(cells)


def _csv(cells: Iterable[str | float | bool]) -> str:
    text = io.StringIO()
    plain = (f"{cell:.6f}" if isinstance(cell, float) else cell for cell in cells)
    csv.writer(text, lineterminator="").writerow(str(c).lower() if isinstance(c, bool) else c for c in plain)
    return text.getvalue()
