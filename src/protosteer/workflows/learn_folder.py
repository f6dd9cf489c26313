"""Learn a folder of images as one task: scan it, hold images out, learn the others, evaluate on those held out.

Held-out images are never learned. They measure accuracy on the folder's classes among all classes the model knows;
under CPP inference they also give the similarities from which `ood` takes its threshold.

If a prompt is trained, the task exists twice: usable after one pass over its images, and finished. An unfinished
task that a model was left with is learned again in its own place, from where its training was.

Known classes grow: the new task has records of them too, from the images that are new.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protosteer.data import decode_cache
from protosteer.data.class_folders import Files
from protosteer.data.decode_budget import DECODING, decoded_bytes
from protosteer.data.decode_cache import DecodedCache
from protosteer.data.image_files import image_bytes, image_version, in_threads, opened
from protosteer.data.image_lists import is_list
from protosteer.data.images import FileImages, ImageSet
from protosteer.data.sources import read_labelled
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError, LearnerError, SettingsError
from protosteer.learner import Learner
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.paper.task import task_seed
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.util.files import digest
from protosteer.util.text import check_name
from protosteer.workflows.holdout_eval import Check, with_heldout_similarities
from protosteer.workflows.known_files import KnownFiles, with_file_digests

HOLDOUT = 0.1
MIN_HOLDOUT_IMAGES = 5  # a class with fewer images needs them all for learning


@dataclass(frozen=True)
class FolderScan:
    """What a folder of class folders, a list or a saved image set holds, before anything is learned.

    Attributes:
        folder: The folder or list.
        files: Readable files that are new, class by class.
        digests: Digests of their contents.
        unreadable: Files that do not decode.
        known: Classes that the model has already, and their tasks.
        already_learned: Files that their class was learned from, or evaluated with, before.
        learned_as_other_class: Files that another class was learned from, with its name; they are learned too.
        preprocessing: What `canvases` were decoded for.
        canvases: Decoded images, as far as they fit into the decode cache.
    """

    folder: Path
    files: Files
    digests: list[int]
    unreadable: Files
    known: dict[str, list[str]]
    already_learned: list[Path]
    learned_as_other_class: dict[Path, str]
    preprocessing: Preprocessing | None = None
    canvases: dict[Path, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leave decoded images behind when the scan goes to another process."""
        return {**vars(self), "canvases": {}}

    @property
    def counts(self) -> dict[str, int]:
        """Readable new images of each class."""
        return dict(Counter(self.files.labels))

    def images(self, files: Files, preprocessing: Preprocessing) -> ImageSet:
        """Return some of the files as images; what the scan has decoded is not decoded again."""
        images = DecodedCache(FileImages(files.paths, preprocessing))
        if preprocessing == self.preprocessing:
            rows = enumerate(files.paths)
            images.store({row: self.canvases[path] for row, path in rows if path in self.canvases})
        return images

    def without_known(self) -> FolderScan:
        """Return the scan without classes that the model knows already.

        Raises:
            LearnerError: Nothing is left.
        """
        rows, bad = (
            [i for i, label in enumerate(files.labels) if label not in self.known]
            for files in (self.files, self.unreadable)
        )
        if not rows:
            raise all_known(self.folder)
        files = self.files.rows(rows)
        return dataclasses.replace(
            self,
            files=files,
            digests=[self.digests[i] for i in rows],
            unreadable=self.unreadable.rows(bad),
            known={},
            already_learned=[],
            learned_as_other_class={
                path: name for path, name in self.learned_as_other_class.items() if path in {*files.paths}
            },
        )

    def check_new(self) -> None:
        """Raise a LearnerError if there is nothing to learn."""
        if not len(self.files):
            message = f"every image of {self.folder} was learned or held out already; there is nothing to learn"
            raise LearnerError(message, code="no-new-images", path=self.folder)


@dataclass(frozen=True)
class LearnResult:
    """A new task, and how the model did on held-out images; a check is None without any.

    Attributes:
        record: The task.
        check: The evaluation on held-out images.
        before_training: The same before the prompt was trained; None if none was.
    """

    record: TaskRecord
    check: Check | None
    before_training: Check | None = None


# Is given a learner that has the new task already, before its prompt is trained.
OnUsable = Callable[[Learner, LearnResult], None]


def scan_folder(
    folder: str | Path,
    memory: Memory | None = None,
    on_file: Callable[[int, int], None] = lambda done, of: None,
    files: Files | None = None,
    name: str | None = None,
    preprocessing: Preprocessing | None = None,
) -> FolderScan:
    """Read every image of a folder of class folders, a list or a saved image set once.

    Args:
        folder: The folder, list or saved set.
        memory: What the model knows. Classes of an unfinished task that learning would resume are not known.
        on_file: Is given how many files are done, and of how many.
        files: What `read_labelled` returned for the folder, if it was called already.
        name: Of the task to be, if it is not the folder's.
        preprocessing: The backbone's, if it is known: then files are decoded for learning already.

    Raises:
        DataError: A class has no readable image, or a name cannot be used.
    """
    folder = Path(folder)
    files = files or read_labelled(folder)
    for label in dict.fromkeys(files.labels):
        check_name(label, f"a class of {folder},")
    if name is not None:
        check_name(name, "the task")
    digests: dict[int, int] = {}
    canvases: dict[Path, Tensor] = {}
    kept_bytes = 0
    for row, read in enumerate(in_threads(lambda path: _read(path, preprocessing), files.paths)):
        if read is not None:
            digests[row], canvas = read
            if canvas is not None and kept_bytes + canvas.nbytes <= decode_cache.BUDGET:
                canvases[files.paths[row]] = canvas
                kept_bytes += canvas.nbytes
        on_file(row + 1, len(files))
    readable, unreadable = files.rows(digests), files.rows(i for i in range(len(files)) if i not in digests)
    empty = set(files.labels) - set(readable.labels)
    if empty:
        message = f"class '{min(empty)}' of {folder} has no image that can be read; replace its files or remove it"
        raise DataError(message, code="unreadable-class", name=min(empty))
    begun = unfinished_task(memory, folder, files.labels, name) if memory else None
    others = Memory(task for task in memory.tasks if task is not begun) if memory else Memory()
    owners = others.owners
    numbers = list(digests.values())
    found = KnownFiles.find(others.tasks, readable, numbers)
    new = sorted({*range(len(readable))} - {*found.same_class})
    return FolderScan(
        folder,
        readable.rows(new),
        [numbers[i] for i in new],
        unreadable,
        known={label: owners[label] for label in dict.fromkeys(files.labels) if label in owners},
        already_learned=[readable.paths[i] for i in found.same_class],
        learned_as_other_class={readable.paths[i]: label for i, label in found.other_class.items()},
        preprocessing=preprocessing,
        canvases=canvases,
    )


def _read(path: Path, preprocessing: Preprocessing | None) -> tuple[int, Tensor | None] | None:
    """Digest and decode a file from one reading; None if it is unreadable."""
    try:
        content = image_bytes(path)
        with opened(path, content) as image:
            if preprocessing is not None:
                return digest(content), preprocessing.to_canvas(image)
            with DECODING.taken(decoded_bytes(image)):
                image.load()
    except (DataError, OSError):
        return None
    return digest(content), None


def unfinished_task(memory: Memory, folder: Path, labels: Iterable[str], name: str | None) -> TaskRecord | None:
    """Return the unfinished task that learning a folder resumes, if there is one.

    It has the given name, or the folder's; and just these classes, or those of them not known otherwise.
    """
    wanted, owners = set(labels), memory.owners
    for task in memory.tasks:
        same = task.name == name if name is not None else names_folder(task, folder)
        own = set(task.class_names)
        if task.metadata.unfinished and same and own <= wanted and wanted - own <= owners.keys():
            return task
    return None


def own_name(folder: Path) -> str:
    """Return the default name of a task: the folder's, or the list's without its suffix."""
    path = Path(os.path.abspath(folder))
    return path.stem if is_list(path) else path.name


def names_folder(task: TaskRecord, folder: Path) -> bool:
    """Return whether a task is named after a folder; a number follows if the name was taken."""
    return re.fullmatch(rf"{re.escape(own_name(folder))}(-\d+)?", task.name) is not None


def learn_folder(
    learner: Learner,
    found: FolderScan,
    name: str | None = None,
    holdout: float = HOLDOUT,
    on_stage: OnStage | None = None,
    checkpoint: CheckpointFile | None = None,
    on_usable: OnUsable | None = None,
) -> LearnResult:
    """Learn a scanned folder as one task.

    Args:
        learner: The learner; it changes when all is done, or not at all.
        found: The scan.
        name: Of the task; the folder's by default.
        holdout: Share of each class's images that is not learned.
        on_stage: Is given the progress.
        checkpoint: Where training is saved and resumed.
        on_usable: If a prompt is trained, is called before that with a learner that can be used already.

    Returns:
        The task and its evaluation.

    Raises:
        LearnerError: There is nothing new, or the name is taken.
    """
    after, result = TaskSlot.prepare(learner, found, name, holdout).learn(on_stage, checkpoint, on_usable)
    learner.memory = after.memory
    return result


@dataclass(frozen=True)
class TaskSlot:
    """A task about to be learned: its images, split, and its place in the order of tasks.

    Attributes:
        found: The scan.
        name: The task's name.
        requested_name: As the user gave it; None: the folder's.
        holdout: The share held out.
        learned: Files to learn.
        held_out: Files to evaluate with.
        before: A learner that knows the tasks before this one, against which it is trained.
        unfinished: The task that is resumed, if it is one.
        later: Tasks after it.
    """

    found: FolderScan
    name: str
    requested_name: str | None
    holdout: float
    learned: Files
    held_out: Files
    before: Learner
    unfinished: TaskRecord | None = None
    later: tuple[TaskRecord, ...] = ()

    @classmethod
    def prepare(
        cls, learner: Learner, found: FolderScan, name: str | None = None, holdout: float = HOLDOUT
    ) -> TaskSlot:
        """Split a scanned folder and find its place: at the end, or that of an unfinished task."""
        found.check_new()
        memory = learner.memory
        split_files = split(found.files, holdout, learner.settings.seed)
        begun = unfinished_task(memory, found.folder, found.files.labels, name)
        if begun is None:
            own = name or memory.free_name(own_name(found.folder))
            return cls(found, own, name, holdout, *split_files, learner.copy())
        place = memory.tasks.index(begun)
        before = Learner(learner.backbone, learner.settings, begun.shared_prompt)
        before.memory = Memory(memory.tasks[:place])
        return cls(found, begun.name, name, holdout, *split_files, before, begun, memory.tasks[place + 1 :])

    @cached_property
    def file_versions(self) -> dict[Path, tuple[int, int]]:
        """Size and time of each file; an error if one has gone since the scan."""
        return {path: _file_version(path) for path in self.found.files.paths}

    def learner_with(self, record: TaskRecord) -> Learner:
        """Return a learner that knows all tasks, this one among them."""
        learner = self.before.copy()
        learner.memory = Memory((*self.before.memory.tasks, record, *self.later))
        return learner

    def learn(
        self,
        on_stage: OnStage | None = None,
        checkpoint: CheckpointFile | None = None,
        on_usable: OnUsable | None = None,
    ) -> tuple[Learner, LearnResult]:
        """Learn the task; see `learn_folder`. Returns a learner that knows it."""
        preprocessing, held = self.before.backbone.preprocessing, self.held_out
        size = sum(self.file_versions[path][0] for path in self.learned.paths)
        today = datetime.date.today().isoformat()
        unseen = self.found.images(held, preprocessing) if len(held) else None
        preview: list[LearnResult] = []

        def finalise_record(record: TaskRecord) -> tuple[Learner, LearnResult]:
            metadata = dataclasses.replace(record.metadata, learned=today, image_bytes=size, held_out=len(held))
            whole = dataclasses.replace(record, metadata=metadata)
            whole = with_file_digests(whole, self.found.files, self.found.digests)
            after = self.learner_with(whole)
            if unseen and after.reader.needs_heldout:
                whole = with_heldout_similarities(whole, after, unseen, held.labels, on_stage)
                after = self.learner_with(whole)
            check = Check.make(after, self.name, unseen, held.labels, on_stage) if unseen else None
            return after, LearnResult(whole, check)

        def usable(record: TaskRecord) -> None:
            after, result = finalise_record(record)
            preview.append(result)
            if on_usable:
                on_usable(after, result)

        images = self.found.images(self.learned, preprocessing)
        data = images, self.learned.labels
        record = self.before.copy().learn(data, self.name, on_stage, checkpoint, usable)
        after, result = finalise_record(record)
        return after, dataclasses.replace(result, before_training=preview[0].check) if preview else result

    def checkpoint_path(self, model: Path) -> Path:
        """Return where training is saved while it runs: beside the model, for these files alone."""
        learner, files = self.before, self.found.files
        backbone = learner.backbone
        key = (self.requested_name, self.holdout, learner.settings, backbone.fingerprint)
        checksum = files_checksum((*key, backbone.precision, backbone.preprocessing), files, self.file_versions)
        for task in learner.memory.tasks:
            for _, tensor in task.tensors():
                checksum.update(tensor.contiguous().numpy().tobytes())
        return part_path(model, checksum.hexdigest())


def files_checksum(key: Any, files: Files, versions: dict[Path, tuple[int, int]] | None = None) -> Any:
    """Return a sha256 object over a key, and the places, labels and versions of files."""
    checksum = hashlib.sha256(repr(key).encode())
    for path, label in zip(files.paths, files.labels, strict=True):
        version = versions[path] if versions else _file_version(path)
        checksum.update(repr((str(path.resolve()), label, *version)).encode())
    return checksum


def part_path(model: Path, checksum: str) -> Path:
    """Return where unfinished work is kept beside a model; `forget` removes it."""
    return model.parent / f".{model.name}.{checksum[:16]}.part"


def held_count(images: int, holdout: float) -> int:
    """Return how many of a class's images are held out; 0 if it needs them all for learning.

    Raises:
        SettingsError: The share is not within 0 and 0.5.
    """
    if not 0.0 <= holdout <= 0.5:
        message = f"holdout = {holdout}: give a share from 0 (no check) to 0.5, such as 0.1"
        raise SettingsError(message, code="bad-holdout", value=holdout)
    return max(1, round(holdout * images)) if holdout and images >= MIN_HOLDOUT_IMAGES else 0


def split(files: Files, holdout: float, seed: int) -> tuple[Files, Files]:
    """Split files into those to learn and those held out, the same ones for the same class, names and seed."""
    held: set[int] = set()
    by_class: dict[str, list[int]] = {}
    for i, label in enumerate(files.labels):
        by_class.setdefault(label, []).append(i)
    for name, rows in by_class.items():
        draw = torch.Generator().manual_seed(task_seed(seed, [name]))
        order = torch.randperm(len(rows), generator=draw).tolist()
        held |= {rows[i] for i in order[: held_count(len(rows), holdout)]}
    return files.rows(i for i in range(len(files)) if i not in held), files.rows(sorted(held))


def _file_version(path: Path) -> tuple[int, int]:
    try:
        return image_version(path)
    except OSError as error:
        message = f"{path} has gone since its folder was read; start again ({error.strerror})"
        raise DataError(message, code="file-gone", path=path) from error


def all_known(folder: Path) -> LearnerError:
    """Return the error of a folder without new classes."""
    return LearnerError(
        f"every class of {folder} is known already; there is nothing to learn", code="no-new-classes", path=folder
    )
