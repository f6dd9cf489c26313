"""A folder of pictures becomes a task: look what is there, hold some images out, learn the others, check oneself.

The held-out images are never learned. They tell how well the model does on this folder's classes, among all that it
knows, and how similar known images are to their prototypes, from which `rejection` takes its threshold.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from protosteer.data.folders import Files, read_folder, readable, without
from protosteer.data.images import FileImages
from protosteer.errors import DataError, LearnerError, SettingsError
from protosteer.learner import Learner, task_seed
from protosteer.method.memory import Memory, TaskRecord
from protosteer.running.progress import Stage
from protosteer.running.resume import Bookmark

HOLDOUT = 0.1
# A class with fewer images needs them all for learning.
LEAST_FOR_HOLDOUT = 5


@dataclass(frozen=True)
class Survey:
    """What a folder of class folders holds, before anything is spent on it."""

    folder: Path
    files: Files  # that can be read, class by class
    unreadable: list[Path]
    known: dict[str, str]  # classes of the folder that the model has already, and their tasks

    @property
    def counts(self) -> dict[str, int]:
        """Readable images of each class."""
        return dict(Counter(self.files.labels))

    def without_known(self) -> Survey:
        """The same folder as if the classes that are known already were not in it."""
        rows = [i for i, label in enumerate(self.files.labels) if label not in self.known]
        if not rows:
            raise LearnerError(f"every class of {self.folder} is known already; there is nothing to learn")
        unreadable = [
            path for path in self.unreadable if path.relative_to(self.folder).parts[0] not in self.known
        ]
        return Survey(self.folder, self.files.rows(rows), unreadable, {})


@dataclass(frozen=True)
class Check:
    """How held-out images were classified among all classes that the model knows."""

    labels: list[str]
    predicted: list[str]

    @property
    def accuracy(self) -> float:
        """Percent."""
        right = sum(a == b for a, b in zip(self.labels, self.predicted, strict=True))
        return 100.0 * right / len(self.labels)

    def per_class(self) -> dict[str, tuple[int, int]]:
        """Of each class, the held-out images and how many of them were right."""
        shown = Counter(self.labels)
        right = Counter(a for a, b in zip(self.labels, self.predicted, strict=True) if a == b)
        return {name: (shown[name], right[name]) for name in shown}

    def confused(self, most: int = 5) -> list[tuple[str, str, int]]:
        """(class, what it was taken for, how often), the most frequent first."""
        pairs = Counter((a, b) for a, b in zip(self.labels, self.predicted, strict=True) if a != b)
        ranked = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
        return [(a, b, count) for (a, b), count in ranked[:most]]


@dataclass(frozen=True)
class Taught:
    """A new task, and how the model did on the held-out images; None where there were none."""

    record: TaskRecord
    check: Check | None


def survey(
    folder: str | Path,
    memory: Memory | None = None,
    on_file: Callable[[int, int], None] = lambda done, of: None,
) -> Survey:
    """Read every image of a folder of class folders once, to know what can be learned from it."""
    folder = Path(folder)
    files = read_folder(folder)
    for name in dict.fromkeys(files.labels):
        if not speakable(name):
            raise DataError(
                f"class folder {name!r} of {folder} has control characters or broken letters in its name; rename it"
            )
    _, unreadable = readable(files.paths, lambda done: on_file(done, len(files)))
    left = without(files, unreadable)
    kept = set(left.labels)
    for name in dict.fromkeys(files.labels):
        if name not in kept:
            raise DataError(
                f"class folder {folder / name} has no image that can be read; replace its files or remove it"
            )
    owners = {name: task.name for task in memory.tasks for name in task.class_names} if memory else {}
    known = {name: owners[name] for name in dict.fromkeys(files.labels) if name in owners}
    return Survey(folder, left, unreadable, known)


def speakable(name: str) -> bool:
    """Whether a class's name can be printed in one line, and encoded for others."""
    return not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in name)


def teach(
    learner: Learner,
    found: Survey,
    name: str | None = None,
    holdout: float = HOLDOUT,
    on_stage: Callable[[Stage], None] | None = None,
    bookmark: Bookmark | None = None,
) -> Taught:
    """Learn a surveyed folder as one task, named after the folder unless told otherwise.

    The learner changes when all is done, or not at all.
    """
    refuse_known(found)
    learned, held = split(found.files, holdout, learner.settings.seed)
    name = name or learner.memory.free_name(Path(os.path.abspath(found.folder)).name)
    images = FileImages(learned.paths, learner.backbone.preprocessing)
    size = sum(_status(path).st_size for path in learned.paths)
    after = learner.copy()
    record = after.learn((images, learned.labels), name, on_stage, bookmark)
    about = record.about | {
        "learned": datetime.date.today().isoformat(),
        "image_bytes": size,
        "held_out": len(held),
    }
    whole = dataclasses.replace(record, about=about)
    check = None
    if len(held):
        whole = _calibrated(whole, learner, held, on_stage)
        after.memory.replace(record, whole)
        check = Check(held.labels, _answers(after, name, "checking", held, on_stage)[0])
    else:
        after.memory.replace(record, whole)
    learner.memory = after.memory
    return Taught(whole, check)


def refuse_known(found: Survey) -> None:
    if found.known:
        name, task = next(iter(found.known.items()))
        more = f" (and {len(found.known) - 1} more)" if len(found.known) > 1 else ""
        raise LearnerError(
            f"class '{name}'{more} was learned in task '{task}'; forget it first, rename its folder, or leave such "
            "classes out with Survey.without_known()"
        )


def split(files: Files, holdout: float, seed: int) -> tuple[Files, Files]:
    """Images to learn and images held out, the same ones for the same class, names and seed."""
    if not 0.0 <= holdout <= 0.5:
        raise SettingsError(f"holdout = {holdout}: give a share from 0 (no check) to 0.5, such as 0.1")
    held: set[int] = set()
    by_class: dict[str, list[int]] = {}
    for i, label in enumerate(files.labels):
        by_class.setdefault(label, []).append(i)
    for name, rows in by_class.items():
        if holdout and len(rows) >= LEAST_FOR_HOLDOUT:
            draw = torch.Generator().manual_seed(task_seed(seed, [name]))
            order = torch.randperm(len(rows), generator=draw).tolist()
            held |= {rows[i] for i in order[: max(1, round(holdout * len(rows)))]}
    return files.rows(i for i in range(len(files)) if i not in held), files.rows(sorted(held))


def bookmark_path(model: Path, found: Survey, learner: Learner, name: str | None, holdout: float) -> Path:
    """Where training is kept while it is under way: beside the model, for these very files and this model alone."""
    backbone = learner.backbone
    what = (name, holdout, learner.settings, backbone.fingerprint, backbone.preprocessing)
    digest = hashlib.sha256(repr(what).encode())
    for path, label in zip(found.files.paths, found.files.labels, strict=True):
        status = _status(path)
        digest.update(repr((str(path.resolve()), label, status.st_size, status.st_mtime_ns)).encode())
    for task in learner.memory.tasks:
        for _, tensor in task.tensors():
            digest.update(tensor.contiguous().numpy().tobytes())
    return model.parent / f".{model.name}.{digest.hexdigest()[:16]}.part"


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(
            f"{path} has gone since its folder was read; start again ({error.strerror})"
        ) from error


def _calibrated(
    record: TaskRecord, learner: Learner, held: Files, on_stage: Callable[[Stage], None] | None
) -> TaskRecord:
    """The record with the similarities of held-out images to its own prototypes, as if it was all there is."""
    alone = Learner(learner.backbone, learner.settings)
    alone.memory = Memory([record])
    _, similarities = _answers(alone, record.name, "calibrating", held, on_stage)
    classes = []
    for c in record.classes:
        own = torch.tensor([label == c.name for label in held.labels])
        classes.append(dataclasses.replace(c, held_out=similarities[own] if own.any() else None))
    return dataclasses.replace(record, classes=tuple(classes))


def _answers(
    learner: Learner, name: str, doing: str, held: Files, on_stage: Callable[[Stage], None] | None
) -> tuple[list[str], Tensor]:
    """Predicted classes of the held-out images, and the greatest similarity of each [h]."""
    labels: list[str] = []
    similarities: list[Tensor] = []
    for part in learner.stream(FileImages(held.paths, learner.backbone.preprocessing)):
        labels += part.labels
        similarities.append(part.scores.amax(dim=1))
        if on_stage:
            on_stage(Stage(name, doing, len(labels), len(held)))
    return labels, torch.cat(similarities)
