"""Learn a folder of images as one task: scan it, learn it, estimate the model's accuracy.

The accuracy over all classes is estimated by leave-one-out, which needs no held-out images. They judge training: a
trained prompt is kept unless the model does worse with it on images that it was not trained with. Then they are
learned, too. CPP inference has no leave-one-out predictions: there, held-out images estimate the accuracy, give the
similarities from which `ood` takes its threshold, and are never learned.

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
import time
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
from protosteer.data.decode_cache import DecodedCache
from protosteer.data.hf_arrow import is_set
from protosteer.data.image_files import SKIP_REASONS, image_bytes, image_version, in_threads, opened, skipped_files
from protosteer.data.image_lists import is_list
from protosteer.data.images import Chosen, FileImages, ImageSet
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
from protosteer.util.statistics import Accuracy
from protosteer.util.text import check_name
from protosteer.workflows.duplicates import duplicates, thumbnails
from protosteer.workflows.holdout_eval import Check, loo_accuracy, with_heldout_similarities
from protosteer.workflows.known_files import KnownFiles, with_file_digests
from protosteer.workflows.refit import refit

HOLDOUT = 0.1
MIN_ERRORS = 3.0  # percent; training removes a third of all errors at best, so of fewer less than one point
TIMED_IMAGES = 16
TRAINING_COST = 2.0  # of an image in an epoch, in forward passes
MIN_HOLDOUT_IMAGES = 5  # a class with fewer images needs them all for learning
_COMPARED = Preprocessing(64, (0.5,) * 3, (0.5,) * 3)  # what images are compared by before a backbone is chosen


@dataclass(frozen=True)
class FolderScan:
    """What a folder of class folders, a list or a saved image set holds, before anything is learned.

    Attributes:
        folder: The folder or list.
        files: Readable files that are new, class by class.
        digests: Digests of their contents.
        unreadable: Files that do not decode.
        reasons: Why each of them does not.
        other_files: Files that are no images, by what they are.
        copies: Files that show the same picture as another one; they are not learned.
        copy_digests: Digests of their contents.
        originals: The file that each of them copies.
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
    reasons: dict[Path, str]
    other_files: dict[str, list[Path]]
    copies: Files
    copy_digests: list[int]
    originals: Files
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

    @property
    def skipped(self) -> dict[str, list[Path]]:
        """Files that are not learned since they are no readable images, by reason."""
        found: dict[str, list[Path]] = {}
        for path in self.unreadable.paths:
            found.setdefault(self.reasons[path], []).append(path)
        return found | self.other_files

    @property
    def met(self) -> tuple[Files, list[int]]:
        """New files and copies of them, with their digests: a later scan must not take a copy for a new image."""
        files, copies = self.files, self.copies
        every = Files([*files.paths, *copies.paths], [*files.labels, *copies.labels])
        return every, [*self.digests, *self.copy_digests]

    def images(self, files: Files, preprocessing: Preprocessing) -> ImageSet:
        """Return some of the files as images; what the scan has decoded is not decoded again."""
        images = DecodedCache(FileImages(files.paths, preprocessing))
        if preprocessing == self.preprocessing:
            rows = enumerate(files.paths)
            images.store({row: self.canvases[path] for row, path in rows if path in self.canvases})
        return images

    def without_known(self) -> FolderScan:
        """Return the scan without classes that the model knows already."""
        rows, bad, copies = (
            [i for i, label in enumerate(files.labels) if label not in self.known]
            for files in (self.files, self.unreadable, self.copies)
        )
        files = self.files.rows(rows)
        return dataclasses.replace(
            self,
            files=files,
            digests=[self.digests[i] for i in rows],
            unreadable=self.unreadable.rows(bad),
            copies=self.copies.rows(copies),
            copy_digests=[self.copy_digests[i] for i in copies],
            originals=self.originals.rows(copies),
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
    """A new task, and how accurate the model is.

    Attributes:
        record: The task.
        accuracy: Over all classes: by leave-one-out, before a prompt was trained, since images are easy for a prompt
            that was trained with them. Under CPP inference on held-out images. None if there is no estimate.
        check: The predictions of held-out images; None if none were held out.
        before_training: The same before the prompt was trained; None if none was.
        training: "kept", "dropped" as it made predictions worse, "skipped" as it cannot gain much; None: not wanted.
    """

    record: TaskRecord
    accuracy: Accuracy | None
    check: Check | None
    before_training: Check | None = None
    training: str | None = None


class _SkipTrainingError(Exception):
    """Leaves learning when the untrained task is good enough."""


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
    small: list[Tensor] = []
    canvases: dict[Path, Tensor] = {}
    reasons: dict[Path, str] = {}
    kept_bytes = 0
    for row, read in enumerate(in_threads(lambda path: _read(path, preprocessing or _COMPARED), files.paths)):
        if isinstance(read, str):
            reasons[files.paths[row]] = read
        else:
            digests[row], canvas = read
            small.append(thumbnails(canvas[None])[0])
            if preprocessing is not None and kept_bytes + canvas.nbytes <= decode_cache.BUDGET:
                canvases[files.paths[row]] = canvas
                kept_bytes += canvas.nbytes
        on_file(row + 1, len(files))
    readable, unreadable = files.rows(digests), files.rows(i for i in range(len(files)) if i not in digests)
    empty = set(files.labels) - set(readable.labels)
    if empty:
        worst = min(empty)
        why = reasons[files.paths[files.labels.index(worst)]]
        message = f"class '{worst}' of {folder} has no image that can be read ({why}); replace its files or remove it"
        raise DataError(message, code="unreadable-class", name=worst)
    begun = unfinished_task(memory, folder, files.labels, name) if memory else None
    others = Memory(task for task in memory.tasks if task is not begun) if memory else Memory()
    owners = others.owners
    numbers = list(digests.values())
    found = KnownFiles.find(others.tasks, readable, numbers)
    new = sorted({*range(len(readable))} - {*found.same_class})
    copies = _copies(readable.rows(new), [numbers[i] for i in new], [small[i] for i in new])
    originals, copied = [i for row, i in enumerate(new) if row not in copies], [new[row] for row in copies]
    return FolderScan(
        folder,
        readable.rows(originals),
        [numbers[i] for i in originals],
        unreadable,
        reasons,
        skipped_files(folder) if folder.is_dir() and not is_set(folder) else {},
        readable.rows(copied),
        [numbers[i] for i in copied],
        readable.rows(new[row] for row in copies.values()),
        known={label: owners[label] for label in dict.fromkeys(files.labels) if label in owners},
        already_learned=[readable.paths[i] for i in found.same_class],
        learned_as_other_class={readable.paths[i]: found.other_class[i] for i in originals if i in found.other_class},
        preprocessing=preprocessing,
        canvases=canvases,
    )


def _copies(files: Files, digests: list[int], small: list[Tensor]) -> dict[int, int]:
    """Map rows to the row that they copy; a class keeps its images if all of them are copies of another class's."""
    copies = duplicates(digests, torch.stack(small)) if small else {}
    left = {label for row, label in enumerate(files.labels) if row not in copies}
    return {row: of for row, of in copies.items() if files.labels[row] in left}


def _read(path: Path, preprocessing: Preprocessing) -> tuple[int, Tensor] | str:
    """Digest and decode a file from one reading; return why if it is unreadable."""
    try:
        content = image_bytes(path)
        with opened(path, content) as image:
            return digest(content), preprocessing.to_canvas(image)
    except DataError as error:
        return SKIP_REASONS.get(error.code, SKIP_REASONS["unreadable-image"])
    except OSError as error:
        return f"cannot be opened: {error.strerror}"


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
    may_skip: bool = False,
) -> LearnResult:
    """Learn a scanned folder as one task.

    Args:
        learner: The learner; it changes when all is done, or not at all.
        found: The scan.
        name: Of the task; the folder's by default.
        holdout: Share of each class's images that judges training; they are learned afterwards.
        on_stage: Is given the progress.
        checkpoint: Where training is saved and resumed.
        on_usable: If a prompt is trained, is called before that with a learner that can be used already.
        may_skip: Skip training if at most `MIN_ERRORS` percent of images are wrong without it.

    Returns:
        The task and its evaluation.

    Raises:
        LearnerError: There is nothing new, or the name is taken.
    """
    after, result = TaskSlot.prepare(learner, found, name, holdout).learn(on_stage, checkpoint, on_usable, may_skip)
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
        may_skip: bool = False,
    ) -> tuple[Learner, LearnResult]:
        """Learn the task; see `learn_folder`. Returns a learner that knows it."""
        _ = self.file_versions  # complains before anything is spent on a file that has gone
        if not self.before.trains_prompt(sorted(set(self.found.files.labels))):
            every = self.found.files
            record = self.before.copy().learn((self._images(every), every.labels), self.name, on_stage)
            record = self._with_provenance(record, every)
            after = self.learner_with(record)
            if not after.reader.needs_heldout:
                return after, LearnResult(record, loo_accuracy(after), None)
        preview: list[LearnResult] = []

        def usable(record: TaskRecord) -> None:
            after, result = self._checked(record, on_stage)
            preview.append(result)
            if on_usable:
                on_usable(after, result)
            estimate = result.accuracy
            if may_skip and not after.reader.needs_heldout and estimate and 100 - estimate.percent <= MIN_ERRORS:
                raise _SkipTrainingError

        data = self._images(self.learned), self.learned.labels
        try:
            record = self.before.copy().learn(data, self.name, on_stage, checkpoint, usable)
        except _SkipTrainingError:
            return self._with_heldout(preview[0], "skipped", on_stage)
        after, result = self._checked(record, on_stage)
        if not preview:
            return after, result
        early = preview[0]
        result = dataclasses.replace(result, before_training=early.check, training="kept")
        if after.reader.needs_heldout:
            return after, result
        result = dataclasses.replace(result, accuracy=early.accuracy)
        if result.check and early.check and result.check.accuracy.right < early.check.accuracy.right:
            result = dataclasses.replace(result, record=early.record)
            return self._with_heldout(result, "dropped", on_stage)
        return self._with_heldout(result, "kept", on_stage)

    @cached_property
    def _decoded(self) -> ImageSet:
        return self.found.images(self.found.files, self.before.backbone.preprocessing)

    def seconds_per_image(self) -> float:
        """Time one forward pass over a few of the images, after a first one that warms up."""
        images = self._images(self.found.files.rows(range(min(TIMED_IMAGES, len(self.found.files)))))
        for _ in range(2):
            began = time.perf_counter()
            self.before.backbone.embed_set(images, None, self.before.settings.embed_batch_size)
        return (time.perf_counter() - began) / len(images)

    def training_seconds(self, seconds_per_image: float) -> float:
        """Estimate the time of training from that of a forward pass; 0 if nothing is trained."""
        if not self.before.trains_prompt(sorted(set(self.found.files.labels))):
            return 0.0
        return TRAINING_COST * seconds_per_image * self.before.settings.epochs * len(self.learned)

    def _images(self, files: Files) -> ImageSet:
        """Some of the files; whatever part an image is in, it is decoded once."""
        rows = {path: row for row, path in enumerate(self.found.files.paths)}
        return Chosen(self._decoded, [rows[path] for path in files.paths])

    def _with_provenance(self, record: TaskRecord, learned: Files) -> TaskRecord:
        """Return the record with its date, the files it was learned from, and all that were met."""
        size = sum(self.file_versions[path][0] for path in learned.paths)
        held, today = len(self.found.files) - len(learned), datetime.date.today().isoformat()
        metadata = dataclasses.replace(record.metadata, learned=today, image_bytes=size, held_out=held)
        return with_file_digests(dataclasses.replace(record, metadata=metadata), *self.found.met)

    def _checked(self, record: TaskRecord, on_stage: OnStage | None) -> tuple[Learner, LearnResult]:
        """Return a learner with the record, and what held-out images and leave-one-out say of it."""
        held = self.held_out
        record = self._with_provenance(record, self.learned)
        after = self.learner_with(record)
        unseen = self._images(held) if len(held) else None
        if unseen and after.reader.needs_heldout:
            record = with_heldout_similarities(record, after, unseen, held.labels, on_stage)
            after = self.learner_with(record)
        check = Check.make(after, self.name, unseen, held.labels, on_stage) if unseen else None
        estimate = check.accuracy if check and after.reader.needs_heldout else loo_accuracy(after)
        return after, LearnResult(record, estimate, check)

    def _with_heldout(
        self, result: LearnResult, training: str, on_stage: OnStage | None
    ) -> tuple[Learner, LearnResult]:
        """Learn held-out images too, now that they have judged training."""
        record, every = result.record, self.found.files
        if len(self.held_out):
            record = refit(self.before, record, self._images(every), every.labels, on_stage)
        record = self._with_provenance(record, every)
        record = dataclasses.replace(record, metadata=dataclasses.replace(record.metadata, unfinished=None))
        after = self.learner_with(record)
        accuracy = result.accuracy if training == "kept" else loo_accuracy(after)
        return after, dataclasses.replace(result, record=record, accuracy=accuracy, training=training)

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
