"""Predictions for a person, as lines of JSON, and as CSV: one image at a time, to be streamed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from protosteer.method.inference import Index, Prediction
from protosteer.photos.rejection import Rejection
from protosteer.util.text import printable


@dataclass(frozen=True)
class Line:
    """What is said of one image. `explained`: why, if that was asked for."""

    path: str
    label: str
    probability: float
    similarity: float
    energy: float
    unknown: bool
    task: str
    top: list[dict[str, Any]]
    explained: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if name != "explained"}
        return plain | (self.explained or {})

    def as_csv(self) -> str:
        row: list[Any] = [self.path, self.label, f"{self.probability:.6f}", f"{self.similarity:.6f}"]
        row += [f"{self.energy:.6f}", str(self.unknown).lower(), self.task]
        for other in self.top[1:]:
            row += [other["label"], f"{other['probability']:.6f}"]
        if self.explained:
            row += [";".join(self.explained["candidates"]), self.explained["runner_up"] or ""]
        return csv_row(row)

    def as_text(self) -> str:
        """Similarities, not probabilities: at the temperature of training these are nearly flat."""
        others = ", ".join(f"{other['label']} {other['similarity']:.3f}" for other in self.top[1:])
        best = f"{self.label} {self.similarity:.3f}"
        if self.unknown:
            best = f"unknown, nearest to {best}"
        text = printable(f"{self.path}: {best}" + (f"  ({others})" if others else ""))
        if self.explained:
            text += f"\n    {printable(_reasons(self.explained))}"
        return text


def lines(
    paths: list[str],
    prediction: Prediction,
    index: Index,
    top: int,
    rejection: Rejection | None,
    explain: bool,
) -> Iterator[Line]:
    """One line per image. rejection: tells unknown ones; None: nothing is unknown."""
    for row, (path, ranking) in enumerate(zip(paths, prediction.ranked(max(top, 2)), strict=True)):
        label, probability, similarity = ranking[0]
        yield Line(
            path=path,
            label=label,
            probability=probability,
            similarity=similarity,
            energy=float(prediction.energy[row]),
            unknown=rejection is not None and rejection.unknown(label, similarity),
            task=prediction.tasks[row],
            top=[{"label": name, "probability": p, "similarity": s} for name, p, s in ranking[:top]],
            explained=_explain(prediction, index, row, [name for name, *_ in ranking[:2]])
            if explain
            else None,
        )


def csv_header(top: int, explain: bool) -> str:
    names = ["path", "label", "probability", "similarity", "energy", "unknown", "task"]
    for place in range(2, top + 1):
        names += [f"label_{place}", f"probability_{place}"]
    return csv_row(names + (["candidates", "runner_up"] if explain else []))


def csv_row(values: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return text.getvalue()


def _explain(prediction: Prediction, index: Index, row: int, ranking: list[str]) -> dict[str, Any]:
    """The tasks that were retrieved, which centroid of the class won, and the class that came second."""
    scores = prediction.scores[row]
    winner, *others = (prediction.classes.index(name) for name in ranking)
    own = (index.value_classes == winner).nonzero()[:, 0]
    similarity = F.normalize(prediction.embeddings[row], dim=0) @ index.values[own].T
    second = others[0] if others else None
    return {
        "candidates": prediction.candidates[row],
        "centroid": int(similarity.argmax()) + 1,
        "centroids": len(own),
        "centroid_similarity": float(similarity.max()),
        "runner_up": None if second is None else prediction.classes[second],
        "runner_up_similarity": None if second is None else float(scores[second]),
        "margin": None if second is None else float(scores[winner] - scores[second]),
    }


def _reasons(explained: dict[str, Any]) -> str:
    words = f"retrieved: {', '.join(explained['candidates'])}; won by centroid {explained['centroid']} of "
    words += f"{explained['centroids']}, similarity {explained['centroid_similarity']:.3f}"
    if explained["runner_up"] is None:
        return f"{words}; no other class is known"
    return f"{words}; runner-up: {explained['runner_up']}, {explained['runner_up_similarity']:.3f}"
