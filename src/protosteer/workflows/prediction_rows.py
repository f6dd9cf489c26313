"""Image files become rows: what a model says of each, or the embedding of each. A file that cannot be read has a
row too, which says why."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.nn.functional as F

from protosteer.backbones import Backbone
from protosteer.data.image_files import image_bytes, in_threads
from protosteer.data.images import ForgivingFiles
from protosteer.learner import Learner
from protosteer.prediction import Prediction
from protosteer.workflows.ood import Rejection

Row = Mapping[str, Any]
# Columns of predictions that hold one value each.
FIGURES = ("path", "label", "probability", "similarity", "energy", "unknown", "task", "passes")
# Columns of suggestions. There is no label among them, so that nobody teaches a model its own guesses.
SUGGESTED = ("path", "why", "guess", "probability", "other")
_BATCH = 64  # images that are embedded at once, at most


class Kind(Protocol):
    """What a table is of."""

    @property
    def kind(self) -> str:
        """ "predictions", "embeddings" or "suggestions"."""

    @property
    def width(self) -> int:
        """Of predictions, how many classes `top` has; of embeddings, their dimensions."""


class RowMaker(Kind, Protocol):
    """Makes the rows of one kind of table."""

    @property
    def chunk(self) -> int:
        """Images that are seen at once. Sets that are cut at multiples of it give the same bits."""

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        """One row per file, in order. Of a file that cannot be read: its `path`, and as `error` what is wrong
        with it."""


class Predictions:
    """What `predict --json` says of each file."""

    kind = "predictions"

    def __init__(self, learner: Learner, top: int = 3, reject: float | None = None, explain: bool = False):
        self.learner, self.top, self.explain = learner, top, explain
        self.rejection = None if reject is None else Rejection(learner, reject)
        self.width = min(top, len(learner.classes))
        self.chunk = learner.backbone.batch_size(learner.settings.embed_batch_size)

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        learner, done = self.learner, 0
        images = ForgivingFiles(names, learner.backbone.preprocessing)
        for part in learner.stream(images, self.chunk):
            some = list(names[done : done + len(part)])
            for row in told(some, part, learner, self.top, self.rejection, self.explain):
                yield {"path": row["path"], "error": images.errors[done]} if done in images.errors else row
                done += 1


class Embeddings:
    """The backbone's embedding of each file, without a prompt, and the sha256 of the file."""

    kind = "embeddings"

    def __init__(self, backbone: Backbone):
        self.backbone = backbone
        self.width = backbone.dim
        self.chunk = backbone.batch_size(_BATCH)

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        images = ForgivingFiles(names, self.backbone.preprocessing)
        for start in range(0, len(names), 16 * self.chunk):
            some = range(start, min(start + 16 * self.chunk, len(names)))
            found = self.backbone.embed_set(
                images, batch_size=self.chunk, rows=some
            ).numpy()  # [len(some), D]
            sums = in_threads(_checksum, [names[i] for i in some])
            for i, embedding, checksum in zip(some, found, sums, strict=True):
                if i in images.errors:
                    yield {"path": names[i], "error": images.errors[i]}
                else:
                    yield {"path": names[i], "sha256": checksum, "embedding": embedding}


def _checksum(name: str) -> str | None:
    """None of a file that cannot be opened, of which its row says so."""
    try:
        return hashlib.sha256(image_bytes(Path(name))).hexdigest()
    except OSError:
        return None


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
