"""Evaluate a model on a folder of labelled images that it has not learned."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from protosteer.data.class_folders import Files
from protosteer.data.images import ForgivingFiles
from protosteer.learner import Learner
from protosteer.runtime.progress import OnStage, counting
from protosteer.util.statistics import Accuracy
from protosteer.workflows.holdout_eval import most_confused
from protosteer.workflows.known_files import KnownFiles, digests_of


@dataclass(frozen=True)
class EvaluatedImage:
    """One labelled image and its prediction."""

    path: Path
    label: str  # actual
    predicted: str
    probability: float  # of the predicted class
    learned: bool  # the model was learned from this file, so that its prediction says little

    @property
    def correct(self) -> bool:
        """Whether the prediction is the label."""
        return self.predicted == self.label


@dataclass(frozen=True)
class ClassMetrics:
    """Metrics of one class, in percent; None where there is nothing to divide by."""

    precision: float | None  # of images predicted as it, the share that is of it
    recall: float | None  # of its images, the share predicted as it
    f1: float | None
    support: int  # images of it


@dataclass(frozen=True)
class Evaluation:
    """Predictions of labelled images.

    Attributes:
        images: The images that could be read.
        errors: What is wrong with the others.
        known: Classes of the model.
    """

    images: list[EvaluatedImage]
    errors: dict[Path, str]
    known: list[str]

    @property
    def accuracy(self) -> Accuracy:
        """How many images were classified correctly."""
        return Accuracy(sum(image.correct for image in self.images), len(self.images))

    @property
    def mistakes(self) -> list[EvaluatedImage]:
        """Images that were misclassified, the most confident mistake first."""
        return sorted((i for i in self.images if not i.correct), key=lambda i: (-i.probability, str(i.path)))

    @property
    def least_certain(self) -> list[EvaluatedImage]:
        """Images that were classified correctly, the least confident first."""
        return sorted((i for i in self.images if i.correct), key=lambda i: (i.probability, str(i.path)))

    @property
    def unknown_classes(self) -> list[str]:
        """Classes of the folder that the model does not have; all their images are mistakes."""
        return sorted({image.label for image in self.images} - {*self.known})

    @cached_property
    def pairs(self) -> Counter[tuple[str, str]]:
        """How often images of one class were predicted as another, or as their own."""
        return Counter((image.label, image.predicted) for image in self.images)

    @cached_property
    def labels(self) -> list[str]:
        """Classes that occur among labels or predictions, by alphabet."""
        return sorted({name for pair in self.pairs for name in pair})

    def confusion(self) -> list[list[int]]:
        """Return counts [C, C] by `labels`: rows are actual classes, columns predicted ones."""
        return [[self.pairs[actual, predicted] for predicted in self.labels] for actual in self.labels]

    def most_confused(self, limit: int = 10) -> list[tuple[str, str, int]]:
        """Return (actual class, predicted class, count), the most frequent first."""
        return most_confused(self.pairs, limit)

    def per_class(self) -> dict[str, ClassMetrics]:
        """Return the metrics of every class that occurs."""
        support, predicted = Counter[str](), Counter[str]()
        for (label, guess), count in self.pairs.items():
            support[label] += count
            predicted[guess] += count

        def share(part: float, of: float) -> float | None:
            return 100.0 * part / of if of else None

        def metrics(name: str) -> ClassMetrics:
            hits, images, guesses = self.pairs[name, name], support[name], predicted[name]
            return ClassMetrics(share(hits, guesses), share(hits, images), share(2 * hits, images + guesses), images)

        return {name: metrics(name) for name in self.labels}


def evaluate_folder(learner: Learner, files: Files, on_stage: OnStage | None = None) -> Evaluation:
    """Predict labelled files and compare the predictions with their labels.

    Raises:
        DataError: No file can be read.
    """
    images = ForgivingFiles(files.paths, learner.backbone.preprocessing)
    answers: list[tuple[str, float]] = []
    report = counting(on_stage, "", "predicting", len(images))
    for part in learner.stream(images):
        answers += [(label, probability) for ((label, probability, _),) in part.ranked(1)]
        report(len(answers))
    rows = images.readable_rows()
    readable = files.rows(rows)
    known_files = KnownFiles.find(learner.memory.tasks, readable, digests_of(readable.paths))
    known_rows = {*known_files.same_class, *known_files.other_class}
    evaluated = [
        EvaluatedImage(files.paths[row], files.labels[row], *answers[row], i in known_rows)
        for i, row in enumerate(rows)
    ]
    return Evaluation(evaluated, images.errors_by_path(), learner.classes)
