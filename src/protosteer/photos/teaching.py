"""A folder of pictures becomes a task: look what is there, hold some images out, learn the others, check
oneself.

The held-out images are never learned. They tell how well the model does on this folder's classes, among all
that it knows, and how similar known images are to their prototypes, from which `rejection` takes its
threshold.
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

from protosteer.data.canvas import kept
from protosteer.data.folders import Files, read_folder, readable
from protosteer.data.images import FileImages, ImageSet
from protosteer.errors import DataError, LearnerError, SettingsError
from protosteer.learner import Learner
from protosteer.method.memory import Memory, TaskRecord
from protosteer.method.task import task_seed
from protosteer.running.progress import OnStage, Stage
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
        unreadable = [p for p in self.unreadable if p.relative_to(self.folder).parts[0] not in self.known]
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
    files: Files | None = None,
) -> Survey:
    """Read every image of a folder of class folders once, to know what can be learned from it.

    files: what `read_folder` gave for the folder, if it was asked already.
    """
    folder = Path(folder)
    files = files or read_folder(folder)
    for name in dict.fromkeys(files.labels):
        if not speakable(name):
            raise DataError(
                f"class folder {name!r} of {folder} has control characters or broken letters in its name; rename it"
            )
    left, unreadable = readable(files, lambda done: on_file(done, len(files)))
    empty = set(files.labels) - set(left.labels)
    if empty:
        raise DataError(
            f"class folder {folder / min(empty)} has no image that can be read; replace its files or remove it"
        )
    owners = memory.owners if memory else {}
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
    on_stage: OnStage | None = None,
    bookmark: Bookmark | None = None,
) -> Taught:
    """Learn a surveyed folder as one task, named after the folder unless told otherwise.

    The learner changes when all is done, or not at all.
    """
    refuse_known(found)
    learned, held = split(found.files, holdout, learner.settings.seed)
    name = name or learner.memory.free_name(Path(os.path.abspath(found.folder)).name)
    size = sum(_status(path).st_size for path in learned.paths)
    after = learner.copy()
    images = FileImages(learned.paths, learner.backbone.preprocessing)
    record = after.learn((images, learned.labels), name, on_stage, bookmark)
    today = datetime.date.today().isoformat()
    about = dataclasses.replace(record.about, learned=today, image_bytes=size, held_out=len(held))
    whole, check = dataclasses.replace(record, about=about), None
    if len(held):
        unseen = kept(FileImages(held.paths, learner.backbone.preprocessing))
        whole = _calibrated(whole, learner, unseen, held.labels, on_stage)
    after.memory.replace(record, whole)
    if len(held):
        check = Check(held.labels, _answers(after, name, "checking", unseen, on_stage)[0])
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


def held_count(images: int, holdout: float) -> int:
    """How many of a class's images are held out; of a class that needs them all for learning none."""
    if not 0.0 <= holdout <= 0.5:
        raise SettingsError(f"holdout = {holdout}: give a share from 0 (no check) to 0.5, such as 0.1")
    return max(1, round(holdout * images)) if holdout and images >= LEAST_FOR_HOLDOUT else 0


def split(files: Files, holdout: float, seed: int) -> tuple[Files, Files]:
    """Images to learn and images held out, the same ones for the same class, names and seed."""
    held: set[int] = set()
    by_class: dict[str, list[int]] = {}
    for i, label in enumerate(files.labels):
        by_class.setdefault(label, []).append(i)
    for name, rows in by_class.items():
        draw = torch.Generator().manual_seed(task_seed(seed, [name]))
        order = torch.randperm(len(rows), generator=draw).tolist()
        held |= {rows[i] for i in order[: held_count(len(rows), holdout)]}
    return files.rows(i for i in range(len(files)) if i not in held), files.rows(sorted(held))


def bookmark_path(model: Path, found: Survey, learner: Learner, name: str | None, holdout: float) -> Path:
    """Where training is kept while it is under way: beside the model, for these files alone."""
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
    record: TaskRecord, learner: Learner, unseen: ImageSet, labels: list[str], on_stage: OnStage | None
) -> TaskRecord:
    """The record with the similarities of held-out images to its prototypes, as if it was all there is."""
    alone = Learner(learner.backbone, learner.settings)
    alone.memory = Memory([record])
    _, similarities = _answers(alone, record.name, "calibrating", unseen, on_stage)
    classes = []
    for c in record.classes:
        own = torch.tensor([label == c.name for label in labels])
        classes.append(dataclasses.replace(c, similarities=similarities[own] if own.any() else None))
    return dataclasses.replace(record, classes=tuple(classes))


def _answers(
    learner: Learner, name: str, doing: str, unseen: ImageSet, on_stage: OnStage | None
) -> tuple[list[str], Tensor]:
    """Predicted classes of the held-out images, and the greatest similarity of each [h]."""
    labels: list[str] = []
    similarities: list[Tensor] = []
    for part in learner.stream(unseen):
        labels += part.labels
        similarities.append(part.scores.amax(dim=1))
        if on_stage:
            on_stage(Stage(name, doing, len(labels), len(unseen)))
    return labels, torch.cat(similarities)
