"""Learn a scanned folder of images as one task, and estimate the model's accuracy.

Leave-one-out estimates the accuracy over all classes, without held-out images. Held-out images judge training: a
trained prompt is kept unless they are classified worse with it. A task-specific prompt must do better, since it costs
another forward pass. Then held-out images are learned, too. CPP inference has no leave-one-out predictions. There,
held-out images estimate the accuracy, give the similarities from which `ood` takes its threshold, and are never learned.

If a prompt is trained, the model first gets an unfinished task, which is usable after one pass over its images. If
training was interrupted, it resumes from its checkpoint, and the finished task replaces the unfinished one.

If a class is known already, the new task has another record of it, from its new images.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from protosteer.data.class_folders import Files, rows_by_label
from protosteer.data.image_files import image_version
from protosteer.data.images import Chosen, ImageSet
from protosteer.errors import DataError, SettingsError
from protosteer.learner import Learner
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.paper.task import task_seed
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.util.statistics import Accuracy
from protosteer.workflows.folder_scan import FolderScan, default_name, unfinished_task
from protosteer.workflows.holdout_eval import Check, loo_accuracy, refit, with_heldout_similarities
from protosteer.workflows.known_files import with_file_digests

HOLDOUT = 0.1
MIN_ERRORS = 3.0  # percent; training removes a third of all errors at best, so of fewer less than one point
TIMED_IMAGES = 16
TRAINING_COST = 2.0  # of an image in an epoch, in forward passes
MIN_HOLDOUT_IMAGES = 5  # a class with fewer images needs them all for learning


@dataclass(frozen=True)
class LearnResult:
    """A new task, and how accurate the model is.

    Attributes:
        record: The task.
        accuracy: Over all classes: by leave-one-out, before a prompt was trained, since images are easy for a prompt
            that was trained with them. Under CPP inference on held-out images. None if there is no estimate.
        check: The predictions of held-out images; None if none were held out.
        before_training: The same before the prompt was trained; None if none was.
        training: "kept", "dropped" as it did not help, "skipped" as it cannot gain much; None: not wanted.
    """

    record: TaskRecord
    accuracy: Accuracy | None
    check: Check | None
    before_training: Check | None = None
    training: str | None = None

    @property
    def improvement(self) -> int | None:
        """How many more held-out images training classifies correctly; None if none were held out."""
        if self.check is None or self.before_training is None:
            return None
        return self.check.accuracy.right - self.before_training.accuracy.right


class _SkipTrainingError(Exception):
    """Raised to stop learning when the untrained task is good enough."""


# Is given a learner that has the new task already, before its prompt is trained.
OnUsable = Callable[[Learner, LearnResult], None]


def learn_folder(
    learner: Learner,
    scan: FolderScan,
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
        scan: The scanned folder.
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
    new_learner, result = TaskSlot.prepare(learner, scan, name, holdout).learn(
        on_stage, checkpoint, on_usable, may_skip
    )
    learner.memory = new_learner.memory
    return result


@dataclass(frozen=True)
class TaskSlot:
    """A task about to be learned: its images, split, and its place in the order of tasks.

    Attributes:
        scan: The scanned folder.
        name: The task's name.
        requested_name: As the user gave it; None: the folder's.
        holdout: The share held out.
        learned: Files to learn.
        held_out: Files to evaluate with.
        base: A learner that knows the tasks before this one, against which it is trained.
        unfinished: The task that is resumed, if it is one.
        later_tasks: Tasks after it.
    """

    scan: FolderScan
    name: str
    requested_name: str | None
    holdout: float
    learned: Files
    held_out: Files
    base: Learner
    unfinished: TaskRecord | None = None
    later_tasks: tuple[TaskRecord, ...] = ()

    @classmethod
    def prepare(cls, learner: Learner, scan: FolderScan, name: str | None = None, holdout: float = HOLDOUT) -> TaskSlot:
        """Split a scanned folder and find its place: at the end, or that of an unfinished task."""
        scan.check_new()
        memory = learner.memory
        parts = split_files(scan.files, holdout, learner.settings.seed)
        unfinished = unfinished_task(memory, scan.folder, scan.files.labels, name)
        if unfinished is None:
            task_name = name or memory.free_name(default_name(scan.folder))
            return cls(scan, task_name, name, holdout, *parts, learner.copy())
        place = memory.tasks.index(unfinished)
        base = Learner(learner.backbone, learner.settings, unfinished.shared_prompt)
        base.memory = Memory(memory.tasks[:place])
        return cls(scan, unfinished.name, name, holdout, *parts, base, unfinished, memory.tasks[place + 1 :])

    @cached_property
    def file_versions(self) -> dict[Path, tuple[int, int]]:
        """Size and time of each file; an error if one has gone since the scan."""
        return {path: _file_version(path) for path in self.scan.files.paths}

    @property
    def trains_prompt(self) -> bool:
        """Whether learning the task trains a prompt."""
        return self.base.trains_prompt(sorted(set(self.scan.files.labels)))

    def learner_with(self, record: TaskRecord) -> Learner:
        """Return a learner that knows all tasks, with this one as `record`."""
        learner = self.base.copy()
        learner.memory = Memory((*self.base.memory.tasks, record, *self.later_tasks))
        return learner

    def learn(
        self,
        on_stage: OnStage | None = None,
        checkpoint: CheckpointFile | None = None,
        on_usable: OnUsable | None = None,
        may_skip: bool = False,
    ) -> tuple[Learner, LearnResult]:
        """Learn the task, see `learn_folder`; return a learner that knows it, and the result."""
        _ = self.file_versions  # raises before training if a file has gone
        if not self.trains_prompt:
            all_files = self.scan.files
            record = self.base.copy().learn((self._images(all_files), all_files.labels), self.name, on_stage)
            record = self._with_provenance(record, all_files)
            learner = self.learner_with(record)
            if not learner.reader.needs_heldout:
                return learner, LearnResult(record, loo_accuracy(learner), None)
        preview: list[LearnResult] = []

        def evaluate_preview(record: TaskRecord) -> None:
            learner, result = self._evaluate(record, on_stage)
            preview.append(result)
            if on_usable:
                on_usable(learner, result)
            estimate = result.accuracy
            if may_skip and not learner.reader.needs_heldout and estimate and 100 - estimate.percent <= MIN_ERRORS:
                raise _SkipTrainingError

        data = self._images(self.learned), self.learned.labels
        try:
            record = self.base.copy().learn(data, self.name, on_stage, checkpoint, evaluate_preview)
        except _SkipTrainingError:
            return self._with_heldout(preview[0], "skipped", on_stage)
        learner, result = self._evaluate(record, on_stage)
        if not preview:
            return learner, result
        preview_result = preview[0]
        result = dataclasses.replace(result, before_training=preview_result.check, training="kept")
        if learner.reader.needs_heldout:
            return learner, result
        result = dataclasses.replace(result, accuracy=preview_result.accuracy)
        if result.improvement is not None and result.improvement < (0 if record.prompt_is_shared else 1):
            return self._with_heldout(dataclasses.replace(result, record=preview_result.record), "dropped", on_stage)
        return self._with_heldout(result, "kept", on_stage)

    @cached_property
    def _decoded(self) -> ImageSet:
        return self.scan.images(self.scan.files, self.base.backbone.preprocessing)

    def seconds_per_image(self) -> float:
        """Time one forward pass over a few of the images, after a first one that warms up."""
        images = self._images(self.scan.files.rows(range(min(TIMED_IMAGES, len(self.scan.files)))))
        for _ in range(2):
            began = time.perf_counter()
            self.base.backbone.embed_set(images, None, self.base.settings.embed_batch_size)
        return (time.perf_counter() - began) / len(images)

    def training_seconds(self, seconds_per_image: float) -> float:
        """Estimate the time of training from that of a forward pass; 0 if nothing is trained."""
        epochs = self.base.settings.epochs if self.trains_prompt else 0
        return TRAINING_COST * seconds_per_image * epochs * len(self.learned)

    def _images(self, files: Files) -> ImageSet:
        """Return the images of some of the files; each image of the scan is decoded once."""
        rows = {path: row for row, path in enumerate(self.scan.files.paths)}
        return Chosen(self._decoded, [rows[path] for path in files.paths])

    def _with_provenance(self, record: TaskRecord, learned: Files) -> TaskRecord:
        """Return the record with its date, the size of its `learned` files, and digests of all scanned files."""
        size = sum(self.file_versions[path][0] for path in learned.paths)
        held_out, today = len(self.scan.files) - len(learned), datetime.date.today().isoformat()
        metadata = dataclasses.replace(record.metadata, learned=today, image_bytes=size, held_out=held_out)
        return with_file_digests(
            dataclasses.replace(record, metadata=metadata), self.scan.files_and_copies, self.scan.digests
        )

    def _evaluate(self, record: TaskRecord, on_stage: OnStage | None) -> tuple[Learner, LearnResult]:
        """Return a learner with the record, and its evaluation by held-out images and leave-one-out."""
        held_out = self.held_out
        record = self._with_provenance(record, self.learned)
        learner = self.learner_with(record)
        images = self._images(held_out) if len(held_out) else None
        if images and learner.reader.needs_heldout:
            record = with_heldout_similarities(record, learner, images, held_out.labels, on_stage)
            learner = self.learner_with(record)
        check = Check.make(learner, self.name, images, held_out.labels, on_stage) if images else None
        estimate = check.accuracy if check and learner.reader.needs_heldout else loo_accuracy(learner)
        return learner, LearnResult(record, estimate, check)

    def _with_heldout(
        self, result: LearnResult, training: str, on_stage: OnStage | None
    ) -> tuple[Learner, LearnResult]:
        """Learn the held-out images too, after they were used to judge training."""
        record, all_files = result.record, self.scan.files
        if len(self.held_out):
            record = refit(self.base, record, self._images(all_files), all_files.labels, on_stage)
        record = self._with_provenance(record, all_files)
        record = dataclasses.replace(record, metadata=dataclasses.replace(record.metadata, unfinished=None))
        learner = self.learner_with(record)
        accuracy = result.accuracy if training == "kept" else loo_accuracy(learner)
        return learner, dataclasses.replace(result, record=record, accuracy=accuracy, training=training)

    def checkpoint_path(self, model: Path) -> Path:
        """Return the path of the training checkpoint, beside the model; it depends on files, settings and tasks."""
        learner, files = self.base, self.scan.files
        backbone = learner.backbone
        key = (self.requested_name, self.holdout, learner.settings, backbone.fingerprint)
        checksum = files_checksum((*key, backbone.precision, backbone.preprocessing), files, self.file_versions)
        for task in learner.memory.tasks:
            for _, tensor in task.tensors():
                checksum.update(tensor.contiguous().numpy().tobytes())
        return part_path(model, checksum.hexdigest())


def files_checksum(key: Any, files: Files, versions: dict[Path, tuple[int, int]] | None = None) -> Any:
    """Return a sha256 object over a key, and the paths, labels and versions of files."""
    checksum = hashlib.sha256(repr(key).encode())
    for path, label in zip(files.paths, files.labels, strict=True):
        version = versions[path] if versions else _file_version(path)
        checksum.update(repr((str(path.resolve()), label, *version)).encode())
    return checksum


def part_path(model: Path, checksum: str) -> Path:
    """Return the path of unfinished work beside a model; `forget` removes the file."""
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


def split_files(files: Files, holdout: float, seed: int) -> tuple[Files, Files]:
    """Split files into those to learn and those held out; equal labels and seeds give equal splits."""
    held_rows: set[int] = set()
    for name, rows in rows_by_label(files.labels).items():
        draw = torch.Generator().manual_seed(task_seed(seed, [name]))
        order = torch.randperm(len(rows), generator=draw).tolist()
        held_rows |= {rows[i] for i in order[: held_count(len(rows), holdout)]}
    return files.rows(i for i in range(len(files)) if i not in held_rows), files.rows(sorted(held_rows))


def _file_version(path: Path) -> tuple[int, int]:
    try:
        return image_version(path)
    except OSError as error:
        message = f"{path} has gone since its folder was read; start again ({error.strerror})"
        raise DataError(message, code="file-gone", path=path) from error
