"""What `Learner.predict` returns: labels, probabilities and similarities, from the numbers of a match."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from protosteer.errors import ModelFileError
from protosteer.evidence.matches import ClassifierMatches
from protosteer.model.index import Index


@dataclass(frozen=True)
class Prediction:
    """Predictions of B images, one row each, in columns for C `classes`.

    From 20,000 classes on, the default classifier scores n candidates per image. In either case, `class_ids` holds the
    class of each column.

    Attributes:
        classes: Names of the columns.
        labels: The class of each image: the one with the largest score.
        scores: [B, C] logits; cosines under CPP inference.
        similarities: [B, C] cosines: the mean of those to the class mean with and without whitening; under CPP inference
            those to the nearest value prototype of the class.
        probabilities: [B, C] calibrated, so that about nine in ten predictions with 0.9 are correct. Under CPP inference
            softmax of scores / temperature, which is nearly flat.
        energy: [B] low for images like those learned, high for unknown images: -temperature * logsumexp(scores / temperature).
        tasks: The task that each label was first learned in.
        candidates: Names of the tasks whose prompts were tried on each image.
        embeddings: [B, D] last layer of the first pass; under CPP inference, the embedding with the greatest score.
        passes: int64 [B] forward passes that each image took.
        columns: [B, n] the candidates of each image as positions in `classes`; None: all classes are scored, in their order.
    """

    classes: list[str]
    labels: list[str]
    scores: Tensor
    similarities: Tensor
    probabilities: Tensor
    energy: Tensor
    tasks: list[str]
    candidates: list[list[str]]
    embeddings: Tensor
    passes: Tensor
    columns: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def class_ids(self) -> Tensor:
        """int64 [B, C] or [B, n]: the class of each column, as its position in `classes`."""
        positions = torch.arange(len(self.classes)).expand(len(self), -1)
        return positions if self.columns is None else self.columns

    def ranked(self, top: int) -> list[list[tuple[str, float, float]]]:
        """Return the `top` most probable classes of each image: name, probability, similarity.

        The label comes first, even if another class has exactly its score.

        Args:
            top: Number of classes.

        Returns:
            A list per image.
        """
        labels = self.scores.argmax(dim=1, keepdim=True)
        ranking = self.scores.scatter(1, labels, math.inf).topk(min(top, self.scores.shape[1]), dim=1).indices
        columns = (self.class_ids, self.probabilities, self.similarities)
        rows = zip(*(column.gather(1, ranking).tolist() for column in columns), strict=True)
        return [[(self.classes[c], p, s) for c, p, s in zip(*row, strict=True)] for row in rows]

    def column(self, row: int, name: str) -> int:
        """Return the column of a class in a row of scores.

        Args:
            row: The image.
            name: The class.

        Returns:
            The column.

        Raises:
            ValueError: The class is not among the row's candidates.
        """
        return self.class_ids[row].tolist().index(self.classes.index(name))

    @classmethod
    def build(cls, index: Index, matches: ClassifierMatches, temperature: float) -> Prediction:
        """Build the prediction from matches and the names of an index; scores / temperature are logits.

        Raises:
            ModelFileError: A number is NaN or infinite (code "not-finite").
        """
        scores, log_other_mass, columns = matches.scores, matches.log_other_mass, matches.class_ids
        winners = scores.argmax(dim=1)
        if columns is not None:
            winners = columns.gather(1, winners[:, None])[:, 0]
        logits = scores if log_other_mass is None else torch.cat([scores, log_other_mass[:, None]], 1)
        logits = logits / temperature
        probabilities, energy = (logits.softmax(dim=1)[:, : scores.shape[1]], -temperature * logits.logsumexp(dim=1))
        for numbers in (scores, matches.similarities, probabilities, energy):
            if not numbers.isfinite().all():
                raise ModelFileError(
                    "similarities to what was learned are not finite numbers; the model or the backbone's weights "
                    "are damaged: use another copy",
                    code="not-finite",
                )
        return cls(
            classes=list(index.classes),
            labels=[index.classes[i] for i in winners.tolist()],
            scores=scores,
            similarities=matches.similarities,
            probabilities=probabilities,
            energy=energy,
            tasks=[index.tasks[i] for i in index.class_tasks[winners].tolist()],
            candidates=[[index.tasks[t] for t in row.nonzero()[:, 0].tolist()] for row in matches.candidates],
            embeddings=matches.embeddings,
            passes=matches.passes,
            columns=columns,
        )
