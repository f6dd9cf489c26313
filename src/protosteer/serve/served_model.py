"""What is served at one moment. It never changes: a change to the model is another snapshot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protosteer.evaluation.metrics import calibration_error, reliability
from protosteer.learner import Learner
from protosteer.model.thumbnails import Thumb
from protosteer.model.thumbnails import read as read_thumbnails
from protosteer.rules import Reader
from protosteer.serve.projection import Projection
from protosteer.workflows.model_summary import describe
from protosteer.workflows.ood import Rejection, calibrated
from protosteer.workflows.prediction_table import prediction_rows


class Snapshot:
    def __init__(self, learner: Learner, path: Path, thumbnails: bool = False):
        self.learner = learner
        self.memory = learner.memory
        self.path = path
        # What is computed of the records is computed here, by whoever makes the change, not by the next prediction.
        self.projection = Projection.fit(self.memory, learner.reader)
        self.calibrated = calibrated(learner)
        self.rejection = lru_cache(maxsize=64)(partial(Rejection, learner))
        self.reliability = _reliability(learner.reader)
        self.thumbnails = _by_class(read_thumbnails(path, self.memory)) if thumbnails else {}
        self._owners = self.memory.owners

    def predict(self, pixels: Tensor, top: int) -> list[dict[str, Any]]:
        """One answer per image, but for its name and whether it is unknown, which its request decides from its
        greatest similarity to any class."""
        prediction = self.learner.predict(pixels)
        rows = prediction_rows(self.learner, prediction, [""] * len(prediction), top)
        more = zip(
            rows,
            prediction.candidates,
            prediction.similarities.amax(dim=1).tolist(),
            self.projection.place(prediction.embeddings),
            strict=True,
        )
        return [
            {
                **{name: value for name, value in row.to_dict().items() if name not in ("path", "unknown")},
                "candidates": candidates,
                "greatest": greatest,
                "top": [{**other, "task": self._owners[other["label"]][0]} for other in row.top],
                "position": position,
            }
            for row, candidates, greatest, position in more
        ]

    def trainable(self, name: str = "") -> bool:
        """Whether a class that is added, or more of one that is there, would get a prompt of its own."""
        return self.learner.trains_prompt([name])

    def classes(self) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {
            name: {
                "name": name,
                "task": tasks[0],
                "tasks": tasks,
                "images": 0,
                "centroids": 0,
                "thumbnails": 0,
            }
            for name, tasks in self._owners.items()
        }
        table = self.memory.table
        plain, values = table.lengths("plain"), table.lengths("values")
        counts = torch.where(plain > 0, plain, values).tolist()
        for name, images, prototypes in zip(table.names, table.images.tolist(), counts, strict=True):
            found[name]["images"] += images
            found[name]["centroids"] += prototypes
        for name, thumbs in self.thumbnails.items():
            found[name]["thumbnails"] = len(thumbs)
        return list(found.values())

    @cached_property
    def description(self) -> dict[str, Any]:
        """As `protosteer inspect` describes the model; where files lie here is nobody else's business."""
        description = describe(dataclasses.replace(self.learner.model, path=self.path), self.learner.reader)
        description["file"]["path"] = self.path.name
        description["backbone"]["weights"] = None
        return description


def _by_class(thumbs: Iterable[Thumb]) -> dict[str, list[bytes]]:
    """JPEG files of each class that has some."""
    found: dict[str, list[bytes]] = {}
    for thumb in thumbs:
        found.setdefault(thumb.name, []).append(thumb.jpeg)
    return found


def _reliability(reader: Reader) -> dict[str, Any] | None:
    """How often answers of some probability are right; None where no image can be left out to tell."""
    loo = reader.loo_predictions()
    if loo is None or not len(loo.correct):
        return None
    bins = reliability(loo.confidence, loo.correct)
    return {
        "images": len(loo.correct),
        "calibration_error": calibration_error(bins),
        "bins": bins,
    }
