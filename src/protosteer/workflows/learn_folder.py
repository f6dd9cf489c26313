"""A folder of pictures becomes a task: look what is there, hold some images out, learn the others, check
oneself.

The held-out images are never learned. They tell how well the model does on this folder's classes, among all
that it knows; by the paper's rule also how similar known images are to their prototypes, from which
`rejection` takes its threshold.

Where a prompt is trained, the task is there twice: usable after one pass over its images, and finished. An
unfinished task that a model was left with is learned again in its own place, from where its training was.

Classes that are known already grow: the new task has records of them too, from the images that are new.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from protosteer.data.class_folders import Files, readable
from protosteer.data.decode_cache import kept
from protosteer.data.image_files import image_version
from protosteer.data.image_lists import is_list
from protosteer.data.images import FileImages
from protosteer.data.sources import read_labelled
from protosteer.errors import DataError, LearnerError, SettingsError
from protosteer.learner import Learner
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.paper.task import task_seed
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.util.text import check_name
from protosteer.workflows.holdout_eval import Check, calibrated
from protosteer.workflows.known_files import Again, file_digests, with_seen

HOLDOUT = 0.1
# A class with fewer images needs them all for learning.
LEAST_FOR_HOLDOUT = 5


@dataclass(frozen=True)
class FolderScan:
    """What a folder of class folders holds, before anything is spent on it; or a list, or a saved image set."""

    folder: Path
    files: Files  # that can be read and are new, class by class
    digests: list[int]  # of their contents
    unreadable: Files
    known: dict[str, list[str]]  # classes of the folder that the model has already, and their tasks
    again: list[Path]  # files that their class was learned from, or checked with, before
    other: dict[
        Path, str
    ]  # files that another class was learned from, which is named; they are learned all the same

    @property
    def counts(self) -> dict[str, int]:
        """Readable images of each class."""
        return dict(Counter(self.files.labels))

    def without_known(self) -> FolderScan:
        """The same folder as if the classes that are known already were not in it."""
        rows, bad = (
            [i for i, label in enumerate(files.labels) if label not in self.known]
            for files in (self.files, self.unreadable)
        )
        if not rows:
            raise LearnerError(f"every class of {self.folder} is known already; there is nothing to learn")
        files, digests = self.files.rows(rows), [self.digests[i] for i in rows]
        other = {path: name for path, name in self.other.items() if path in {*files.paths}}
        return FolderScan(self.folder, files, digests, self.unreadable.rows(bad), {}, [], other)

    def check_new(self) -> None:
        """Refuse a folder that has nothing to learn, before anything is spent on it."""
        if not len(self.files):
            raise LearnerError(
                f"every image of {self.folder} was learned or held out already; there is nothing to learn"
            )


@dataclass(frozen=True)
class LearnResult:
    """A new task, and how the model did on the held-out images; None where there were none."""

    record: TaskRecord
    check: Check | None
    before_training: Check | None = None  # the same check; None where nothing was trained


# Is given a learner that has the new task already, before its prompt is trained.
OnUsable = Callable[[Learner, LearnResult], None]


def scan_folder(
    folder: str | Path,
    memory: Memory | None = None,
    on_file: Callable[[int, int], None] = lambda done, of: None,
    files: Files | None = None,
    name: str | None = None,
) -> FolderScan:
    """Read every image of a folder of class folders, a list or a saved image set once, to know what can be learned
    from it.

    files: what `read_labelled` gave for the folder, if it was asked already. name: of the task to be, if it is
    not the folder's; classes of an unfinished task that teaching would go on with are not known already.
    """
    folder = Path(folder)
    files = files or read_labelled(folder)
    for label in dict.fromkeys(files.labels):
        check_name(label, f"a class of {folder},")
    if name is not None:
        check_name(name, "the task")
    left, unreadable = readable(files, lambda done: on_file(done, len(files)))
    empty = set(files.labels) - set(left.labels)
    if empty:
        raise DataError(
            f"class '{min(empty)}' of {folder} has no image that can be read; replace its files or remove it"
        )
    begun = unfinished_task(memory, folder, files.labels, name) if memory else None
    others = Memory(task for task in memory.tasks if task is not begun) if memory else Memory()
    owners = others.owners
    known = {label: owners[label] for label in dict.fromkeys(files.labels) if label in owners}
    digests = file_digests(left.paths)
    again = Again.find(others.tasks, left, digests)
    new = sorted({*range(len(left))} - {*again.same})
    return FolderScan(
        folder,
        left.rows(new),
        [digests[i] for i in new],
        unreadable,
        known,
        again=[left.paths[i] for i in again.same],
        other={left.paths[i]: label for i, label in again.other.items()},
    )


def unfinished_task(
    memory: Memory, folder: Path, labels: Iterable[str], name: str | None
) -> TaskRecord | None:
    """The task of that name, or else the folder's, of these classes, or of those that are not known otherwise, if
    its prompt is still to be trained."""
    wanted, owners = set(labels), memory.owners
    for task in memory.tasks:
        if name is None:  # where the folder's was taken, a number stands behind it
            same = re.fullmatch(rf"{re.escape(own_name(folder))}(-\d+)?", task.name) is not None
        else:
            same = task.name == name
        own = set(task.class_names)
        if task.metadata.unfinished and same and own <= wanted and wanted - own <= owners.keys():
            return task
    return None


def own_name(folder: Path) -> str:
    """What a task is called by default: after the folder, or the list without its suffix."""
    path = Path(os.path.abspath(folder))
    return path.stem if is_list(path) else path.name


def learn_folder(
    learner: Learner,
    found: FolderScan,
    name: str | None = None,
    holdout: float = HOLDOUT,
    on_stage: OnStage | None = None,
    checkpoint: CheckpointFile | None = None,
    on_usable: OnUsable | None = None,
) -> LearnResult:
    """Learn a surveyed folder as one task, named after the folder unless told otherwise.

    The learner itself changes when all is done, or not at all. on_usable: is called before a prompt is
    trained, if one is, with a copy that can be used already.
    """
    found.check_new()
    learned, held = split(found.files, holdout, learner.settings.seed)
    turn = _turn(learner, found, name)
    size = sum(file_version(path)[0] for path in learned.paths)
    today = datetime.date.today().isoformat()
    unseen = kept(FileImages(held.paths, learner.backbone.preprocessing)) if len(held) else None
    early: list[LearnResult] = []

    def told(record: TaskRecord) -> tuple[Learner, LearnResult]:
        about = dataclasses.replace(record.metadata, learned=today, image_bytes=size, held_out=len(held))
        whole = with_seen(dataclasses.replace(record, metadata=about), found.files, found.digests)
        check = None
        after = turn.after(whole)
        if unseen and after.fusion is None:
            whole = calibrated(whole, after, unseen, held.labels, on_stage)
            after = turn.after(whole)
        if unseen:
            check = Check.make(after, turn.name, unseen, held.labels, on_stage)
        return after, LearnResult(whole, check)

    def usable(record: TaskRecord) -> None:
        after, taught = told(record)
        early.append(taught)
        if on_usable:
            on_usable(after, taught)

    images = FileImages(learned.paths, learner.backbone.preprocessing)
    record = turn.before.copy().learn((images, learned.labels), turn.name, on_stage, checkpoint, usable)
    after, taught = told(record)
    learner.memory = after.memory
    return dataclasses.replace(taught, before_training=early[0].check) if early else taught


@dataclass(frozen=True)
class TaskSlot:
    """Where in the order of tasks one is learned: at the end, or in the place of an unfinished one."""

    name: str
    before: Learner  # knows the tasks that stand before it, against which it is trained
    later: tuple[TaskRecord, ...]

    def after(self, record: TaskRecord) -> Learner:
        """A learner that knows all."""
        learner = self.before.copy()
        learner.memory = Memory((*self.before.memory.tasks, record, *self.later))
        return learner


def _turn(learner: Learner, found: FolderScan, name: str | None) -> TaskSlot:
    memory = learner.memory
    begun = unfinished_task(memory, found.folder, found.files.labels, name)
    if begun is None:
        return TaskSlot(name or memory.free_name(own_name(found.folder)), learner.copy(), ())
    place = memory.tasks.index(begun)
    before = Learner(learner.backbone, learner.settings, begun.shared_prompt)
    before.memory = Memory(memory.tasks[:place])
    return TaskSlot(begun.name, before, memory.tasks[place + 1 :])


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


def checkpoint_path(
    model: Path, found: FolderScan, learner: Learner, name: str | None, holdout: float
) -> Path:
    """Where training is kept while it is under way: beside the model, for these files alone."""
    backbone = learner.backbone
    what = (name, holdout, learner.settings, backbone.fingerprint, backbone.preprocessing)
    digest = hashlib.sha256(repr(what).encode())
    for path, label in zip(found.files.paths, found.files.labels, strict=True):
        digest.update(repr((str(path.resolve()), label, *file_version(path))).encode())
    for task in _turn(learner, found, name).before.memory.tasks:
        for _, tensor in task.tensors():
            digest.update(tensor.contiguous().numpy().tobytes())
    return model.parent / f".{model.name}.{digest.hexdigest()[:16]}.part"


def file_version(path: Path) -> tuple[int, int]:
    """See `image_version`."""
    try:
        return image_version(path)
    except OSError as error:
        raise DataError(
            f"{path} has gone since its folder was read; start again ({error.strerror})"
        ) from error
