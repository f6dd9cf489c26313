"""Predictions for a person, as lines of JSON, and as CSV: one image at a time, to be streamed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.nn.functional as F

from protosteer.learner import Learner
from protosteer.method.fusion import SURE
from protosteer.method.inference import Prediction
from protosteer.photos.rejection import Rejection
from protosteer.util.text import counted, printable, without_control

COLUMNS = ("path", "label", "probability", "similarity", "energy", "unknown", "task", "passes")
Row = Mapping[str, Any]


def told(
    paths: list[str],
    prediction: Prediction,
    learner: Learner,
    top: int,
    rejection: Rejection | None,
    explain: bool,
) -> Iterator[Row]:
    """What JSON has of each image. rejection: tells unknown ones; None: nothing is unknown."""
    greatest = prediction.similarities.amax(dim=1).tolist()
    reasons = _evidence if learner.fusion else _centroids
    for i, (path, ranking) in enumerate(zip(paths, prediction.ranked(max(top, 2)), strict=True)):
        label, probability, similarity = ranking[0]
        yield {
            "path": path,
            "label": label,
            "probability": probability,
            "similarity": similarity,
            "energy": float(prediction.energy[i]),
            "unknown": rejection is not None and rejection.unknown(label, greatest[i]),
            "task": prediction.tasks[i],
            "passes": int(prediction.passes[i]),
            "top": [{"label": name, "probability": p, "similarity": s} for name, p, s in ranking[:top]],
            **(reasons(prediction, learner, i, [name for name, *_ in ranking[:2]]) if explain else {}),
        }


def _evidence(prediction: Prediction, learner: Learner, i: int, ranking: list[str]) -> dict[str, Any]:
    """The tasks whose own prompts were tried, and the class that came second."""
    name = ranking[1] if len(ranking) > 1 else None
    second = None if name is None else prediction.column(i, name)
    return {
        "candidates": prediction.candidates[i],
        "runner_up": name,
        "runner_up_probability": None if second is None else float(prediction.probabilities[i, second]),
        "runner_up_similarity": None if second is None else float(prediction.similarities[i, second]),
    }


def _centroids(prediction: Prediction, learner: Learner, i: int, ranking: list[str]) -> dict[str, Any]:
    """The tasks that were retrieved, which centroid of the class won, and the class that came second."""
    scores, index = prediction.scores[i], learner.index
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


def as_text(row: Row, evidence: bool) -> str:
    """Probabilities by evidence; else similarities, as probabilities at the temperature of training are nearly
    flat."""

    def figure(one: Row) -> str:
        return _percent(one["probability"]) if evidence else f"{one['similarity']:.3f}"

    others = ", ".join(f"{other['label']} {figure(other)}" for other in row["top"][1:])
    strange = (
        f"unknown, similarity {row['similarity']:.3f}; if known, " if evidence else "unknown, nearest to "
    )
    prefix = strange if row["unknown"] else ""
    text = f"{row['path']}: {prefix}{row['label']} {figure(row)}"
    text = printable(f"{text}  ({others})" if others else text)
    if "candidates" not in row:
        return text
    why = _passes(row) if evidence else _won(row)
    if row["runner_up"] is None:
        why += "; no other class is known"
    else:
        similar = f"{row['runner_up_similarity']:.3f}"
        share = f"{_percent(row['runner_up_probability'])}, similarity {similar}" if evidence else similar
        why += f"; runner-up: {row['runner_up']}, {share}"
    return f"{text}\n    {printable(why)}"


def _passes(row: Row) -> str:
    """What an image was tried under, and why no more than that."""
    passes, tried = counted(row["passes"], "pass"), row["candidates"]
    if tried:
        why = f"{passes}, prompts tried: {', '.join(tried)}"
    elif row["passes"] > 1:
        why = f"{passes}, with and without the prompt for all classes"
    elif row["probability"] >= SURE:
        why = "sure after one pass, no task's prompt was needed"
    else:
        why = "one pass, no further prompt to try"
    return f"{why}; similarity {row['similarity']:.3f}"


def _won(row: Row) -> str:
    retrieved, centroid = ", ".join(row["candidates"]), f"{row['centroid']} of {row['centroids']}"
    similarity = f"similarity {row['centroid_similarity']:.3f}"
    return f"retrieved: {retrieved}; won by centroid {centroid}, {similarity}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


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
    plain = (
        f"{cell:.6f}" if isinstance(cell, float) else without_control(cell) if isinstance(cell, str) else cell
        for cell in cells
    )
    csv.writer(text, lineterminator="").writerow(str(c).lower() if isinstance(c, bool) else c for c in plain)
    return text.getvalue()
