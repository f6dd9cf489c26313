"""Label issues: images of class folders that look like another class under leave-one-out.

Every image counts as a prototype of its class, so its leave-one-out probabilities have a closed form
(`calibration.loo_probabilities`), whether a model has learned it or not. Classes that only the model knows may be the
correct ones, too. No prompt is used, since a prompt that was trained with a wrong label has learned that label.
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
from protosteer.runtime.progress import OnStage, counting
from protosteer.workflows.active_learning import COUNT, Suggestion, Suggestions, check_count


@dataclass(frozen=True)
class LabelIssue:
    """An image that is more probable under another class than under its given label.

    Attributes:
        row: Its row.
        label: The most probable class.
        probability: Of that class.
        given_label_prob: The probability of the given label.
    """

    row: int
    label: str
    probability: float
    given_label_prob: float


def mislabelled(learner: Learner, files: Files, count: int = COUNT, on_stage: OnStage | None = None) -> Suggestions:
    """Suggest files in class folders that are probably in the wrong one, the most probable first.

    Args:
        learner: The model; classes that only it knows may be the right ones.
        files: Files and their given labels.
        count: At most this many.
        on_stage: Is given the progress.

    Returns:
        The suggestions.

    Raises:
        DataError: There is one class alone, or no file can be read.
    """
    check_count(count)
    images = ForgivingFiles(files.paths, learner.backbone.preprocessing)
    on_batch = counting(on_stage, "", "checking", len(images))
    embeddings = learner.backbone.embed_set(images, batch_size=learner.settings.embed_batch_size, on_batch=on_batch)
    rows = images.readable_rows()
    labels = [files.labels[i] for i in rows]
    class_names = set(labels)
    table = learner.memory.table.without(class_names)
    rivals = table.take((table.lengths("plain") > 0).nonzero()[:, 0])
    if len(class_names) + len(rivals) < 2:
        message = f"'{labels[0]}' is the only class there is; label issues need two"
        raise DataError(message, code="one-class", name=labels[0])
    issues = find_label_issues(embeddings[rows], labels, rivals)
    suggestions = [
        Suggestion(images.paths[rows[issue.row]], "mislabelled", issue.label, issue.probability, labels[issue.row])
        for issue in issues[:count]
    ]
    return Suggestions(len(rows), {"mislabelled": len(issues)}, suggestions, images.errors_by_path())


def find_label_issues(embeddings: Tensor, labels: Sequence[str], rivals: ClassTable | None = None) -> list[LabelIssue]:
    """Return the given labels that are not the most probable ones, the least probable first.

    An image that is alone in its class has no leave-one-out probability and is not returned.

    Args:
        embeddings: [n, D].
        labels: n given labels.
        rivals: Other classes with summaries; a class may have several rows.
    """
    classes = sorted(set(labels))
    number = {name: i for i, name in enumerate(classes)}
    owners = torch.tensor([number[label] for label in labels])
    order = owners.argsort(stable=True)  # class by class
    units = F.normalize(embeddings[order].float(), dim=1)
    ones, lengths = torch.ones(len(units), dtype=torch.int64), owners.bincount()
    folder_table = SummaryTable(units, ones, torch.zeros(len(classes), units.shape[1]), lengths)
    rival_table = rivals.summaries("plain") if rivals else None
    bulk = folder_table if rival_table is None else SummaryTable.concatenate([folder_table, rival_table])
    for name in rivals.names if rivals else ():
        number.setdefault(name, len(number))
    names = list(number)
    numbers = torch.tensor([*range(len(classes)), *(number[name] for name in (rivals.names if rivals else ()))])
    issues = list[LabelIssue]()
    several = (owners.bincount()[owners[order]] > 1).nonzero()[:, 0]
    for points, shares in loo_probabilities(bulk, numbers, several):
        top, given_probs = shares.max(dim=1), shares.gather(1, owners[order[points]][:, None])[:, 0]
        columns = (order[points], top.indices, top.values, given_probs)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        issues += [LabelIssue(row, names[top1], p, q) for row, top1, p, q in rows if names[top1] != labels[row]]
    return sorted(issues, key=lambda issue: (issue.given_label_prob, issue.row))
