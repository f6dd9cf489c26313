"""Labels in doubt: images of class folders that look like another class once they are left out.

Every image is taken as a point of its class, so that what the evidence would be without it is a closed form
(`calibration.loo_probabilities`), whether a model has learned it or not. Classes that the model knows and the folder
does not have may be the right ones, too. No prompt is used: one that was trained with a wrong label believes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.data.class_folders import Files
from protosteer.data.images import ForgivingFiles
from protosteer.errors import DataError
from protosteer.evidence.calibration import loo_probabilities
from protosteer.evidence.summary_table import SummaryTable
from protosteer.learner import Learner
from protosteer.model.class_table import ClassTable
from protosteer.runtime.progress import OnStage, Stage
from protosteer.workflows.active_learning import (
    COUNT,
    Suggestion,
    Suggestions,
    check_count,
    errors_of,
    readable_rows,
)


@dataclass(frozen=True)
class Doubt:
    """An image that is likelier of another class than of its own."""

    row: int
    label: str  # the likeliest class
    probability: float
    own: float  # the probability of the class that it is filed under


def mislabelled(
    learner: Learner, files: Files, count: int = COUNT, on_stage: OnStage | None = None
) -> Suggestions:
    """Of files in class folders, those that are likely in the wrong one, the likeliest first."""
    check_count(count)
    images = ForgivingFiles(files.paths, learner.backbone.preprocessing)

    def on_batch(done: int) -> None:
        if on_stage:
            on_stage(Stage("", "checking", done, len(images)))

    embeddings = learner.backbone.embed_set(
        images, batch_size=learner.settings.embed_batch_size, on_batch=on_batch
    )
    read = readable_rows(images)
    labels = [files.labels[i] for i in read]
    own = set(labels)
    table = learner.memory.table.without(own)
    rivals = table.take((table.lengths("plain") > 0).nonzero()[:, 0])
    if len(own) + len(rivals) < 2:
        raise DataError(
            f"'{labels[0]}' is the only class there is; labels can be doubted where there are two",
            code="one-class",
            name=labels[0],
        )
    doubts = doubted(embeddings[read], labels, rivals)
    chosen = [
        Suggestion(images.paths[read[d.row]], "mislabelled", d.label, d.probability, labels[d.row])
        for d in doubts[:count]
    ]
    return Suggestions(len(read), {"mislabelled": len(doubts)}, chosen, errors_of(images))


def doubted(embeddings: Tensor, labels: Sequence[str], rivals: ClassTable | None = None) -> list[Doubt]:
    """The labels [n] of embeddings [n, D] that are not the likeliest ones, the least likely first.

    rivals: other classes with summaries, perhaps several times. An image that is alone in its class says nothing of it.
    """
    classes = sorted(set(labels))
    number = {name: i for i, name in enumerate(classes)}
    owners = torch.tensor([number[label] for label in labels])
    order = owners.argsort(stable=True)  # of the points: class by class
    units = F.normalize(embeddings[order].float(), dim=1)
    ones, lengths = torch.ones(len(units), dtype=torch.int64), owners.bincount()
    own = SummaryTable(units, ones, torch.zeros(len(classes), units.shape[1]), lengths)
    others = rivals.summaries("plain") if rivals else None
    bulk = own if others is None else SummaryTable.concatenate([own, others])
    for name in rivals.names if rivals else ():
        number.setdefault(name, len(number))
    names = list(number)
    numbers = torch.tensor(
        [*range(len(classes)), *(number[name] for name in (rivals.names if rivals else ()))]
    )
    found = list[Doubt]()
    several = (owners.bincount()[owners[order]] > 1).nonzero()[:, 0]
    for points, shares in loo_probabilities(bulk, numbers, several):
        likeliest, mine = shares.max(dim=1), shares.gather(1, owners[order[points]][:, None])[:, 0]
        columns = (order[points], likeliest.indices, likeliest.values, mine)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        found += [Doubt(row, names[best], p, q) for row, best, p, q in rows if names[best] != labels[row]]
    return sorted(found, key=lambda doubt: (doubt.own, doubt.row))
