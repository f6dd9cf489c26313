"""What a prediction tells: names, probabilities and similarities, from the numbers of a match."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from protosteer.evidence.matches import ClassifierMatches
from protosteer.model.index import Index
from protosteer.paper.inference import Matches


@dataclass(frozen=True)
class Prediction:
    """What `Learner.predict` returns: one row per image; columns of scores follow `classes`.

    Among very many classes n candidates are scored of each image, and `columns` tells which.
    """

    classes: list[str]
    labels: list[str]
    scores: Tensor  # [B, C]: the greatest is the label's; cosines by the paper's rule, logits by evidence
    similarities: Tensor  # [B, C]: cosines
    probabilities: Tensor  # [B, C]: softmax of scores / temperature
    energy: Tensor  # [B]: low for images like those learned, high for unknown ones
    tasks: list[str]  # the task that the predicted class was first learned in
    candidates: list[list[str]]  # the tasks whose prompts were tried
    embeddings: Tensor  # [B, D]: the image under the prompt that won
    passes: Tensor  # int64 [B]: forward passes that each image took
    columns: Tensor | None = (
        None  # [B, n]: the classes that were scored, as numbers; None: all, in their order
    )

    def __len__(self) -> int:
        return len(self.labels)

    def ranked(self, top: int) -> list[list[tuple[str, float, float]]]:
        """The `top` likeliest classes of each image, the likeliest first: name, probability, similarity.

        The label comes first also where another class is exactly as similar.
        """
        labels = self.scores.argmax(dim=1, keepdim=True)
        places = self.scores.scatter(1, labels, math.inf).topk(min(top, self.scores.shape[1]), dim=1).indices
        numbers = places if self.columns is None else self.columns.gather(1, places)
        rows = (numbers, self.probabilities.gather(1, places), self.similarities.gather(1, places))
        return [
            [(self.classes[c], p, s) for c, p, s in zip(*row, strict=True)]
            for row in zip(*(column.tolist() for column in rows), strict=True)
        ]

    def column(self, row: int, name: str) -> int:
        """Where a class that was scored stands in a row of scores."""
        number = self.classes.index(name)
        return number if self.columns is None else self.columns[row].tolist().index(number)

    @classmethod
    def build(cls, index: Index, matches: Matches, temperature: float) -> Prediction:
        """Name what was found by the numbers of an index."""
        scores = similarities = matches.scores
        columns = other_mass = None
        if isinstance(matches, ClassifierMatches):
            similarities, columns = matches.similarities, matches.class_ids
            other_mass = matches.log_other_mass
        best = scores.argmax(dim=1)
        if columns is not None:
            best = columns.gather(1, best[:, None])[:, 0]
        logits = (scores if other_mass is None else torch.cat([scores, other_mass[:, None]], 1)) / temperature
        return cls(
            classes=list(index.classes),
            labels=[index.classes[i] for i in best.tolist()],
            scores=scores,
            similarities=similarities,
            probabilities=logits.softmax(dim=1)[:, : scores.shape[1]],
            energy=-temperature * logits.logsumexp(dim=1),
            tasks=[index.tasks[i] for i in index.class_tasks[best].tolist()],
            candidates=[[index.tasks[t] for t in row.nonzero()[:, 0].tolist()] for row in matches.candidates],
            embeddings=matches.embeddings,
            passes=matches.passes,
            columns=columns,
        )
