"""The estimator: learn task after task, predict, forget, save, load."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import ImageSet, as_images, as_labelled
from protosteer.data.prefetch import prefetched
from protosteer.errors import DataError, LearnerError, ProtosteerWarning
from protosteer.method import health
from protosteer.method.forgetting import Forgotten, forget
from protosteer.method.inference import Index, Matches, Prediction, match, nearest_task
from protosteer.method.memory import ClassRecord, Memory, TaskRecord
from protosteer.method.merging import Part, combine
from protosteer.method.prototypes import Centroids, centroids
from protosteer.photos.rejection import left_out_similarity
from protosteer.running.progress import Progress, Stage
from protosteer.running.resume import Bookmark
from protosteer.settings import Settings

if TYPE_CHECKING:
    from protosteer.method.training import Trained
    from protosteer.modelfile import Model

# A class of few images gets one centroid per so many of them.
_IMAGES_PER_CENTROID = 5
# Images whose pixels and embeddings are in memory at once while predicting.
_CHUNK = 128


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
        name = name or self._next_name()
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

    def trains_prompt(self, classes: int) -> bool:
        """Whether a task of so many classes gets a prompt.

        One class that has nothing to be told from does not: training would only draw every image to one point.
        """
        alone = classes == 1 and (self.settings.independent or not self.memory.classes)
        return self.settings.prompts and not alone

    def _learn(
        self,
        name: str,
        classes: list[str],
        images: ImageSet,
        labels: Tensor,
        on_stage: Callable[[Stage], None] | None,
        bookmark: Bookmark | None,
    ) -> TaskRecord:
        from protosteer.method.training import (
            train_prompt,  # with all of kornia, for which prediction need not wait
        )

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
        if self.trains_prompt(len(classes)):
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
            )
            values = embed("values", trained.prompt)
            _warn(health.collapse(keys, values, labels))
        records = tuple(
            self._class_record(label, keys[labels == i], values[labels == i], settings.centroids, seed)
            for i, label in enumerate(classes)
        )
        prompt = trained.prompt if trained else None
        return TaskRecord(name, records, prompt, settings.independent, self._about(keys, values, trained))

    def add_class(self, name: str, images: Any) -> TaskRecord:
        """Learn one class from a handful of images, at once: prototypes alone, nothing is trained.

        The class becomes a task of its own, under a copy of the prompt of the task whose keys are nearest. There is
        one centroid per five images, since fewer make none that is better than their common mean.
        """
        if not name.strip():
            raise DataError("the class has no name; give one")
        task = self.memory.free_name(name)
        self.memory.check_new(task, [name])
        image_set = as_images(images, self.backbone.preprocessing)
        keys = self.backbone.embed_set(image_set, None, self.settings.embed_batch_size)
        nearest = self.memory.tasks[nearest_task(self.index, keys)] if len(self.memory) else None
        prompt = nearest.prompt if nearest else None
        values = keys
        if prompt is not None:
            values = self.backbone.embed_set(image_set, prompt, self.settings.embed_batch_size)
        count = min(self.settings.centroids, max(1, len(keys) // _IMAGES_PER_CENTROID))
        record = self._class_record(name, keys, values, count, task_seed(self.settings.seed, [name]))
        record = dataclasses.replace(record, held_out=left_out_similarity(values))
        about = {
            "settings": self.settings.to_dict(),
            "images": len(keys),
            "learned": datetime.date.today().isoformat(),
        }
        # What a copy of a prompt was trained with is what the prompt was trained with.
        independent = nearest is None or prompt is None or nearest.independent
        learned = TaskRecord(task, (record,), prompt, independent, about, few_shot=True)
        self.memory.add(learned)
        return learned

    def _class_record(self, name: str, keys: Tensor, values: Tensor, count: int, seed: int) -> ClassRecord:
        def cluster(embeddings: Tensor) -> Centroids:
            s = self.settings
            return centroids(embeddings, count, s.clustering, s.assign_labels, seed % 2**32)

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
        parts = list(self._matches(as_images(images, self.backbone.preprocessing), _CHUNK))
        return Prediction.build(self.index, Matches.join(parts), self.settings.temperature)

    def stream(self, images: Any, chunk: int = _CHUNK) -> Iterator[Prediction]:
        """The same, `chunk` images at a time, so that the first are known before the last are read."""
        for part in self._matches(as_images(images, self.backbone.preprocessing), chunk):
            yield Prediction.build(self.index, part, self.settings.temperature)

    def _matches(self, images: ImageSet, chunk: int) -> Iterator[Matches]:
        self._require_knowledge()
        chunks = torch.arange(len(images)).split(chunk)
        for pixels in prefetched(images, chunks, ahead=1, device=self.backbone.device):
            yield self._match(pixels)

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
        return forget(self.memory, name, task=task)

    def save(self, path: str | Path) -> None:
        """Write the model to one file, atomically."""
        from protosteer import modelfile

        self._require_knowledge()
        header = modelfile.backbone_header(self.backbone)
        modelfile.Model(Path(path), header, self.settings, self.memory).write(Path(path))

    @classmethod
    def load(cls, path: str | Path, backbone: Backbone | None = None) -> Learner:
        """Read a model file; without `backbone`, the one it was learned with is loaded by name."""
        from protosteer import modelfile

        return cls.of_model(modelfile.read(path), backbone)

    @classmethod
    def of_model(cls, model: Model, backbone: Backbone | None = None) -> Learner:
        """A learner that knows what a model file says."""
        learner = cls(model.backbone_for(backbone), model.settings)
        learner.memory = model.memory
        return learner

    def _require_knowledge(self) -> None:
        if not len(self.memory):
            raise LearnerError("nothing has been learned yet; call learn() first")

    def _next_name(self) -> str:
        numbers = itertools.count(len(self.memory) + 1)
        return next(name for name in map("task-{}".format, numbers) if name not in self.memory.task_names)

    def copy(self) -> Learner:
        """A learner that can change without this one: records are shared, the list of them is not."""
        other = Learner(self.backbone, self.settings)
        other.memory = Memory(self.memory.tasks)
        return other


def merge(
    *learners: Learner,
    renames: Mapping[str, str] | None = None,
    task_renames: Mapping[str, str] | None = None,
) -> Learner:
    """One learner with the tasks of all, in the order given. Same backbone; no class or task name twice.

    Renames, old name to new, apply to every learner but the first.
    """
    if not learners:
        raise LearnerError("merge needs at least one learner")
    first = learners[0]
    parts = [Part(one.backbone.describe(), one.settings, one.memory) for one in learners]
    merged = Learner(first.backbone, first.settings)
    merged.memory = combine(parts, renames, task_renames)
    return merged


def task_seed(seed: int, classes: Sequence[str]) -> int:
    """Randomness belongs to a task's own classes, not to its place in the order of tasks."""
    digest = hashlib.sha256(json.dumps([seed, sorted(classes)]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _warn(message: str | None) -> None:
    if message:
        warnings.warn(message, ProtosteerWarning, stacklevel=4)
