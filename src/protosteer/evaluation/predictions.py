"""Predictions of a run, image by image: stored after each task, so that tests and plots need no new evaluation."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from protosteer.errors import RunError
from protosteer.methods.base import Answer
from protosteer.util.files import read_regular, write_atomically

TOP = 5  # classes per image of which scores are stored
MAX_BYTES = 2**28  # of all arrays of a file; a million images take less
_FORMS = {"classes": ("U", 1), "confidence": ("f", 1), "top_classes": ("i", 2), "top_scores": ("f", 2)}

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Predictions:
    """What was predicted for N test images after a task; classes are numbers into `classes`.

    Attributes:
        classes: The names of all classes of the stream, in its order.
        task: The task that each image belongs to, int32 [N].
        actual: Its class, int32 [N].
        predicted: The predicted class, int32 [N].
        given_task: The predicted class among those of the image's own task, int32 [N]; None without scores.
        confidence: The predicted probability of the prediction, float32 [N]; None if the method reports none.
        top_classes: The `TOP` classes of the largest scores, the largest first, int32 [N, k]; None without scores.
        top_scores: Their scores, float32 [N, k]: probabilities if there is a confidence.
    """

    classes: npt.NDArray[np.str_]
    task: Ints
    actual: Ints
    predicted: Ints
    given_task: Ints | None = None
    confidence: Floats | None = None
    top_classes: Ints | None = None
    top_scores: Floats | None = None

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Whether each prediction is right, [N]."""
        return self.predicted == self.actual

    def save(self, path: Path) -> None:
        """Write a compressed .npz file; equal predictions give equal bytes."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        file = io.BytesIO()
        np.savez_compressed(file, **{name: array for name, array in named.items() if array is not None})
        write_atomically(path, file.getvalue())

    @classmethod
    def load(cls, path: Path) -> Predictions:
        """Read what `save` wrote; raises RunError (code "no-predictions") if it is missing or damaged."""
        try:
            with np.load(io.BytesIO(read_regular(path)), allow_pickle=False) as arrays:
                if sum(entry.file_size for entry in arrays.zip.infolist()) > MAX_BYTES:
                    raise ValueError("its arrays are too large")
                found = cls(**arrays)
            found._check()
            return found
        except Exception as error:  # numpy and zipfile raise nearly anything
            state = "cannot be read: it is damaged or was altered" if path.exists() else "is missing"
            message = f"{path} {state}; to write predictions again: protosteer evaluate-run"
            raise RunError(message, code="no-predictions", path=path) from error

    def _check(self) -> None:
        """Raise ValueError unless all arrays are as documented: a file may be another's."""
        for name, array in vars(self).items():
            if array is None:
                continue
            kind, axes = _FORMS.get(name, ("i", 1))
            fits = array.dtype.kind == kind and array.ndim == axes
            if not fits or (name != "classes" and len(array) != len(self.actual)):
                raise ValueError(f"{name} is {array.dtype} {list(array.shape)}")
            if (
                kind == "i"
                and name != "task"
                and array.size
                and not 0 <= array.min() <= array.max() < len(self.classes)
            ):
                raise ValueError(f"{name} has numbers of no class")
            if name == "confidence" and not np.isfinite(array).all():
                raise ValueError("a confidence is not finite")
        if not len(self.actual):
            raise ValueError("there is no image")
        "".join(self.classes.tolist()).encode()  # raises ValueError for what is no text

    def confusion(self) -> npt.NDArray[np.int64]:
        """Count images by actual and predicted class, [K, K]."""
        size = len(self.classes)
        return np.bincount(self.actual.astype(np.int64) * size + self.predicted, minlength=size**2).reshape(size, size)

    def by_class(self) -> dict[str, Any]:
        """Return precision, recall and F1 in percent, support, and confusions, for every class that was tested."""
        size = len(self.classes)
        codes, images = np.unique(self.actual.astype(np.int64) * size + self.predicted, return_counts=True)
        actual, predicted = np.divmod(codes, size)
        support, given = (np.bincount(numbers, minlength=size) for numbers in (self.actual, self.predicted))
        hits = np.bincount(self.actual[self.right], minlength=size)
        figures = {
            str(self.classes[k]): {
                "precision": 100.0 * float(hits[k]) / max(1, int(given[k])),
                "recall": 100.0 * float(hits[k]) / int(support[k]),
                "f1": 200.0 * float(hits[k]) / int(support[k] + given[k]),
                "support": int(support[k]),
            }
            for k in np.flatnonzero(support)
        }
        names = self.classes.tolist()
        wrong = sorted(np.flatnonzero(actual != predicted).tolist(), key=lambda row: -images[row])
        pairs = [
            {"actual": names[actual[row]], "predicted": names[predicted[row]], "images": int(images[row])}
            for row in wrong
        ]
        return {"classes": figures, "confusion": pairs}


class PredictionsBuilder:
    """Collects the answers of one evaluation.

    Args:
        stream_classes: All classes of the stream, in its order.
        method_classes: The classes that the method knows: an answer is a position in this list.
    """

    def __init__(self, stream_classes: Sequence[str], method_classes: Sequence[str]):
        self.classes = np.array(stream_classes, dtype=np.str_)
        position = {name: k for k, name in enumerate(stream_classes)}
        self.position = torch.tensor([position[name] for name in method_classes])
        self.number = {name: k for k, name in enumerate(method_classes)}
        self.parts: list[dict[str, npt.NDArray[Any]]] = []

    def add(self, task: int, own: Sequence[str], labels: Sequence[str], answer: Answer) -> None:
        """Add the answers for the test images of a task whose own classes are given."""
        actual = self.position[torch.tensor([self.number[label] for label in labels])]
        found: dict[str, torch.Tensor] = {
            "task": torch.full_like(actual, task),
            "actual": actual,
            "predicted": self.position[answer.classes],
        }
        if answer.confidence is not None:
            found["confidence"] = answer.confidence
        if answer.scores is not None:
            known = torch.tensor([self.number[name] for name in own if name in self.number])
            top = answer.scores.topk(min(TOP, answer.scores.shape[1]), dim=1)
            found["given_task"] = self.position[known[answer.scores[:, known].argmax(dim=1)]]
            found |= {"top_classes": self.position[top.indices], "top_scores": top.values}
        self.parts.append({k: t.float().numpy() if t.is_floating_point() else _ints(t) for k, t in found.items()})

    def build(self) -> Predictions:
        """Return all predictions; what one answer lacks, all lack."""
        names = set.intersection(*(set(part) for part in self.parts))
        return Predictions(self.classes, **{name: np.concatenate([p[name] for p in self.parts]) for name in names})


def _ints(tensor: torch.Tensor) -> Ints:
    return tensor.numpy().astype(np.int32)
