"""Predictions for a person, as lines of JSON, and as CSV: one image at a time, to be streamed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from protosteer.evidence.classifier import SURE
from protosteer.util.text import counted, printable, without_control
from protosteer.workflows.prediction_rows import FIGURES, Row


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
    return _csv([*FIGURES, *others, *(["candidates", "runner_up"] if explain else [])])


def as_csv(row: Row) -> str:
    cells = [row[name] for name in FIGURES]
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
