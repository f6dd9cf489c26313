"""An immutable snapshot of the served model: a change makes another snapshot."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protosteer.learner import Learner
from protosteer.model.thumbnails import Thumb
from protosteer.model.thumbnails import read as read_thumbnails
from protosteer.rules import Reader
from protosteer.serve.projection import Projection
from protosteer.util.statistics import calibration_error, reliability
from protosteer.workflows.holdout_eval import most_confused
from protosteer.workflows.model_summary import describe
from protosteer.workflows.ood import Rejection, is_calibrated
from protosteer.workflows.prediction_table import prediction_rows


class Snapshot:
    """A learner with everything that is computed once per change: the map, thresholds, reliability."""

    def __init__(self, learner: Learner, path: Path, thumbnails: bool = False, earlier_map: Projection | None = None):
        self.learner = learner
        self.memory = learner.memory
        self.path = path
        # Computed here, by the request that makes the change, not by the next prediction.
        self.projection = Projection.fit(self.memory, learner.reader, earlier_map)
        self.calibrated = is_calibrated(learner)
        self.rejection = lru_cache(maxsize=64)(partial(Rejection, learner))
        self.reliability = _reliability(learner.reader)
        self.thumbnails = _by_class(read_thumbnails(path, self.memory)) if thumbnails else {}
        self._owners = self.memory.owners

    def predict(self, pixels: Tensor, top: int) -> list[dict[str, Any]]:
        """Predict pixels [n, 3, h, w]; return n rows.

        The request adds each image's name, and decides from "greatest", the similarity to the nearest class,
        whether it is unknown.
        """
        prediction = self.learner.predict(pixels)
        rows = prediction_rows(self.learner, prediction, [""] * len(prediction), top)
        columns = zip(
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
                "top": [{**candidate, "task": self._owners[candidate["label"]][0]} for candidate in row.top],
                "position": position,
            }
            for row, candidates, greatest, position in columns
        ]

    def trainable(self, name: str = "") -> bool:
        """Return True if a class that is added, known or new, would get a prompt of its own."""
        return self.learner.trains_prompt([name])

    def classes(self) -> list[dict[str, Any]]:
        """Describe every class, in the order in which they were learned."""
        counters = {"images": 0, "centroids": 0, "thumbnails": 0, "checked": 0, "right": 0, "confused_with": None}
        classes: dict[str, dict[str, Any]] = {
            name: {"name": name, "task": tasks[0], "tasks": tasks, **counters} for name, tasks in self._owners.items()
        }
        table = self.memory.table
        prototype_counts, value_counts = table.lengths("plain"), table.lengths("values")
        numbers = torch.where(prototype_counts > 0, prototype_counts, value_counts).tolist()
        for name, images, prototypes in zip(table.names, table.images.tolist(), numbers, strict=True):
            classes[name]["images"] += images
            classes[name]["centroids"] += prototypes
        for name, thumbs in self.thumbnails.items():
            classes[name]["thumbnails"] = len(thumbs)
        for name, check in self._loo_checks.items():
            classes[name] |= check
        return list(classes.values())

    @cached_property
    def _loo_checks(self) -> dict[str, dict[str, Any]]:
        """Count each class's stored images and those right by leave-one-out, and name its most frequent confusion."""
        loo, names = self.learner.reader.loo_predictions(), self.memory.classes
        if loo is None or loo.predicted is None or len(names) < 2:
            return {}
        labels, predicted = ([names[place] for place in places.tolist()] for places in (loo.labels, loo.predicted))
        pairs = Counter(zip(labels, predicted, strict=True))
        checks: dict[str, dict[str, Any]] = {name: {"checked": 0, "right": 0, "confused_with": None} for name in names}
        for name, count in Counter(labels).items():
            checks[name] |= {"checked": count, "right": pairs[name, name]}
        for actual, mistake, _ in reversed(most_confused(pairs, len(pairs))):  # the most frequent comes last
            checks[actual]["confused_with"] = mistake
        return checks

    @cached_property
    def description(self) -> dict[str, Any]:
        """Describe the model as `protosteer inspect` does, without paths of this machine."""
        description = describe(dataclasses.replace(self.learner.model, path=self.path), self.learner.reader)
        description["file"]["path"] = self.path.name
        description["backbone"]["weights"] = None
        return description


def _by_class(thumbs: Iterable[Thumb]) -> dict[str, list[bytes]]:
    """Group JPEG files by class."""
    groups: dict[str, list[bytes]] = {}
    for thumb in thumbs:
        groups.setdefault(thumb.name, []).append(thumb.jpeg)
    return groups


def _reliability(reader: Reader) -> dict[str, Any] | None:
    """Compute reliability bins from leave-one-out predictions; None if there are none."""
    loo = reader.loo_predictions()
    if loo is None or not len(loo.correct):
        return None
    bins = reliability(loo.confidence, loo.correct)
    return {"images": len(loo.correct), "calibration_error": calibration_error(bins), "bins": bins}
