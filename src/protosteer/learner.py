"""The estimator: learn task after task, predict, forget, save, load."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protosteer import health
from protosteer.backbones import Backbone
from protosteer.bookmark import Bookmark
from protosteer.data.images import ImageSet, as_images, as_labelled
from protosteer.data.prefetch import prefetched
from protosteer.errors import DataError, LearnerError, ProtosteerWarning
from protosteer.inference import Index, Matches, Prediction, match
from protosteer.memory import ClassRecord, Memory, TaskRecord
from protosteer.prototypes import Centroids, centroids
from protosteer.settings import Settings
from protosteer.training import Progress, Trained, train_prompt

# Images whose pixels and embeddings are in memory at once while predicting.
_CHUNK = 128


@dataclass(frozen=True)
class Stage:
    """A message for whoever shows progress: what is being done, and how far it is."""

    task: str
    doing: str  # "keys", "views" if they are cached, "training", "values"; an evaluation adds "testing"
    done: int
    total: int
    training: Progress | None = None


@dataclass(frozen=True)
class Forgotten:
    """What was removed, and what the removal is worth."""

    classes: list[str]
    task: str
    bytes: int
    exact: bool
    guarantee: str


class Learner:
    """A frozen backbone, settings, and a list of task records."""

    def __init__(self, backbone: Backbone, settings: Settings | None = None):
        self.backbone = backbone
        self.settings = settings or Settings()
        self.memory = Memory()
        self._indexed: tuple[tuple[TaskRecord, ...], Index] | None = None

    @property
    def classes(self) -> list[str]:
        return self.memory.classes

    @property
    def tasks(self) -> list[str]:
        return self.memory.task_names

    @property
    def index(self) -> Index:
        """All centroids as matrices; built anew only when what is remembered has changed."""
        if self._indexed is None or self._indexed[0] is not self.memory.tasks:
            self._indexed = self.memory.tasks, Index.build(self.memory)
        return self._indexed[1]

    def learn(
        self,
        data: Any,
        name: str | None = None,
        on_stage: Callable[[Stage], None] | None = None,
        bookmark: Bookmark | None = None,
    ) -> TaskRecord:
        """Learn the classes of a folder of class folders, of (images, labels), or of a torch Dataset.

        Nothing changes until the task is learned completely: an error or Ctrl-C leaves the learner as it was.
        With a `bookmark` the same call goes on where an earlier one was interrupted, and ends in the same bits.
        """
        name = name or self._free_name()
        images, labels = as_labelled(data, self.backbone.preprocessing)
        classes = sorted(set(labels))
        if not classes:
            raise DataError("there are no images to learn from")
        self.memory.check_new(name, classes)
        number = {label: i for i, label in enumerate(classes)}
        numbers = torch.tensor([number[label] for label in labels])
        record = self._learn(name, classes, images, numbers, on_stage, bookmark)
        self.memory.add(record)
        return record

    def _learn(
        self,
        name: str,
        classes: list[str],
        images: ImageSet,
        labels: Tensor,
        on_stage: Callable[[Stage], None] | None,
        bookmark: Bookmark | None,
    ) -> TaskRecord:
        settings = self.settings
        seed = task_seed(settings.seed, classes)

        def tell(doing: str, done: int, total: int, training: Progress | None = None) -> None:
            if on_stage:
                on_stage(Stage(name, doing, done, total, training))

        def embed(doing: str, prompt: Tensor | None) -> Tensor:
            def on_batch(done: int) -> None:
                tell(doing, done, len(images))

            return self.backbone.embed_set(images, prompt, settings.embed_batch_size, on_batch)

        keys = embed("keys", None)
        _warn(health.near_chance(keys, labels))
        trained: Trained | None = None
        values = keys
        if settings.prompts:
            trained = train_prompt(
                self.backbone,
                images,
                labels,
                settings,
                start=None if settings.independent or not self.memory.tasks else self.memory.tasks[-1].prompt,
                anchors=None if settings.independent else self.memory.anchors(settings.noise),
                seed=seed,
                on_step=lambda p: tell("training", p.step, p.steps, p),
                bookmark=bookmark,
                on_views=lambda done: tell("views", done, len(images)),
            )
            values = embed("values", trained.prompt)
            _warn(health.collapse(keys, values, labels))
        records = tuple(
            self._class_record(label, keys[labels == i], values[labels == i], seed)
            for i, label in enumerate(classes)
        )
        prompt = trained.prompt if trained else None
        return TaskRecord(name, records, prompt, settings.independent, self._about(keys, values, trained))

    def _class_record(self, name: str, keys: Tensor, values: Tensor, seed: int) -> ClassRecord:
        def cluster(embeddings: Tensor) -> Centroids:
            s = self.settings
            return centroids(embeddings, s.centroids, s.clustering, s.assign_labels, seed % 2**32)

        return ClassRecord(name, cluster(keys).means, cluster(values))

    def _about(self, keys: Tensor, values: Tensor, trained: Trained | None) -> dict[str, Any]:
        about: dict[str, Any] = {
            "settings": self.settings.to_dict(),
            "images": len(keys),
            "key_spread": round(health.spread(keys), 6),
            "value_spread": round(health.spread(values), 6),
        }
        if trained:
            last = trained.epochs[-1]
            about |= {
                "loss": last.loss,
                "accuracy": last.accuracy,
                "trained_parameters": trained.parameters,
            }
        return about

    def predict(self, images: Any) -> Prediction:
        """Predict paths, a folder, PIL images, or a tensor of pixels."""
        self._require_knowledge()
        image_set = as_images(images, self.backbone.preprocessing)
        chunks = torch.arange(len(image_set)).split(_CHUNK)
        fetched = prefetched(image_set, chunks, ahead=1, device=self.backbone.device)
        parts = [self._match(pixels) for pixels in fetched]
        return Prediction.build(self.index, Matches.join(parts), self.settings.temperature)

    def _match(self, pixels: Tensor) -> Matches:
        backbone = self.backbone
        batch = backbone.batch_size(self.settings.embed_batch_size)
        shared = self.memory.shared_layers(backbone.depth)
        tokens = backbone.trunk_pixels(pixels, shared, batch)

        def embed(rows: Tensor, tasks: Tensor | None) -> Tensor:
            embeddings = torch.empty(len(rows), backbone.dim)
            groups = [torch.arange(len(rows))] if tasks is None else self.memory.alike(tasks)
            for some in (places for group in groups for places in group.split(batch)):
                prompts = None if tasks is None else self.memory.prompts(tasks[some])
                with torch.no_grad():
                    embeddings[some] = backbone.rest(tokens[rows[some]], shared, prompts).float().cpu()
            return embeddings

        return match(self.index, embed, len(pixels), self.settings.neighbours)

    def forget(self, name: str | None = None, *, task: str | None = None) -> Forgotten:
        """Remove a class, or a whole task with `task=`. The result says what that guarantees."""
        if (name is None) == (task is None):
            raise LearnerError("say what to forget: a class, forget('cat'), or a task, forget(task='spring')")
        tasks = self.memory.tasks
        if task is not None:
            owner = self.memory.forget_task(task)
            classes = owner.class_names
        else:
            assert name is not None
            owner = self.memory.forget_class(name)
            classes = [name]
        removed = sum(t.bytes for t in tasks) - sum(t.bytes for t in self.memory.tasks)
        later = tasks[tasks.index(owner) + 1 :]
        influenced = any(t.prompt is not None and not t.independent for t in later)
        exact, guarantee = _guarantee(owner, classes, influenced)
        return Forgotten(classes, owner.name, removed, exact, guarantee)

    def save(self, path: str | Path) -> None:
        """Write the model to one file, atomically."""
        from protosteer import modelfile

        self._require_knowledge()
        modelfile.write(Path(path), self.backbone, self.settings, self.memory)

    @classmethod
    def load(cls, path: str | Path, backbone: Backbone | None = None) -> Learner:
        """Read a model file; without `backbone`, the one it was learned with is loaded by name."""
        from protosteer import modelfile

        model = modelfile.read(Path(path))
        learner = cls(model.backbone_for(backbone), model.settings)
        learner.memory = model.memory
        return learner

    def _require_knowledge(self) -> None:
        if not len(self.memory):
            raise LearnerError("nothing has been learned yet; call learn() first")

    def _free_name(self) -> str:
        number = len(self.memory) + 1
        while f"task-{number}" in self.memory.task_names:
            number += 1
        return f"task-{number}"


def merge(*learners: Learner) -> Learner:
    """One learner with the tasks of all, in the order given. Same backbone; no class or task name twice."""
    if not learners:
        raise LearnerError("merge needs at least one learner")
    first = learners[0]
    merged = Learner(first.backbone, first.settings)
    for other in learners:
        if other.backbone.fingerprint != first.backbone.fingerprint:
            raise LearnerError(
                f"learners have different backbones: {first.backbone.name} ({first.backbone.fingerprint[:12]}) "
                f"and {other.backbone.name} ({other.backbone.fingerprint[:12]}); only equal ones can be merged"
            )
        for setting in ("neighbours", "temperature"):
            mine, theirs = getattr(first.settings, setting), getattr(other.settings, setting)
            if mine != theirs:
                raise LearnerError(
                    f"learners predict differently: {setting} is {mine} and {theirs}; make them equal"
                )
        for task in other.memory.tasks:
            merged.memory.add(task)
    return merged


def task_seed(seed: int, classes: Sequence[str]) -> int:
    """Randomness belongs to a task's own classes, not to its place in the order of tasks."""
    digest = hashlib.sha256(json.dumps([seed, sorted(classes)]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _guarantee(owner: TaskRecord, classes: list[str], influenced: bool) -> tuple[bool, str]:
    whole = len(classes) == len(owner.classes)
    remains = []
    if not whole and owner.prompt is not None:
        remains.append(f"the prompt of task '{owner.name}' was trained with its images")
    if influenced:
        remains.append(
            "prompts of later tasks were trained against its prototypes and may start from its prompt"
        )
    if not remains:
        return True, "exact: no prompt that remains was trained with it, as if it had never been learned"
    return False, (
        "its prototypes are gone and it can no longer be predicted, but influence remains: "
        + " and ".join(remains)
        + "; to remove that too, learn those tasks again without it"
    )


def _warn(message: str | None) -> None:
    if message:
        warnings.warn(message, ProtosteerWarning, stacklevel=4)
