"""The estimator, a backbone and what has been learned with it: learn, predict, forget, save, load."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.decode_cache import cache_decoded
from protosteer.data.image_files import image_bytes, image_exists
from protosteer.data.images import ImageSet, as_images, as_labelled
from protosteer.data.prefetch import prefetched
from protosteer.errors import DataError, LearnerError, ModelFileError
from protosteer.evidence.classifier import Fusion, fusion_of
from protosteer.model import file as model_file
from protosteer.model.index import Index
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord, correction_name
from protosteer.model.unlearning import Forgotten, forget, undo
from protosteer.paper.inference import Matches, match
from protosteer.paper.prompts import Embed, prompted_forward
from protosteer.prediction import Prediction
from protosteer.runtime.callbacks import training_callbacks
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.runtime.task_images import TaskImages
from protosteer.search.candidates import CandidateSearch
from protosteer.settings import Settings
from protosteer.tasks import learn_class, learn_task, trains_prompt
from protosteer.util.files import digest
from protosteer.util.text import check_name

# Images whose pixels and embeddings are in memory at once while predicting.
_CHUNK = 128
_WEIGHTS = (1, 2, 4, 8, 16, 32, 64)  # images that a correction may count as


class Learner:
    """A frozen backbone, settings, and a list of task records.

    Without settings it learns and predicts by the preset "best", which is `Settings()`. domain: a
    prompt that serves all classes from the first task on, see `adapt`; without one, the first task's own.
    """

    def __init__(self, backbone: Backbone, settings: Settings | None = None, domain: Tensor | None = None):
        self.backbone = backbone
        self.settings = settings or Settings()
        self.memory = Memory()
        self._domain = domain
        self._read: tuple[tuple[TaskRecord, ...], Index, Fusion | None] | None = None
        self._shortlist: tuple[Fusion, CandidateSearch | None] | None = None

    @property
    def classes(self) -> list[str]:
        return self.memory.classes

    @property
    def tasks(self) -> list[str]:
        return self.memory.task_names

    @property
    def index(self) -> Index:
        """All centroids as matrices."""
        return self._reading()[0]

    @property
    def fusion(self) -> Fusion | None:
        """What prediction by evidence needs; None where the paper's rule is the one, or nothing is known."""
        return self._reading()[1] if len(self.memory) else None

    def _reading(self) -> tuple[Index, Fusion | None]:
        """Built anew only when what is remembered has changed."""
        if self._read is None or self._read[0] is not self.memory.tasks:
            self._read = self._shortlist = None  # first: of very many classes both would not fit into memory
            index = Index.build(self.memory)
            self._read = self.memory.tasks, index, fusion_of(self.memory, self.settings, index)
        return self._read[1:]

    @property
    def shortlist(self) -> CandidateSearch | None:
        """What finds the candidates of an image; None where all classes are scored."""
        fusion = self.fusion
        if fusion is None:
            return None
        if self._shortlist is None or self._shortlist[0] is not fusion:
            self._shortlist = fusion, fusion.shortlist()
        return self._shortlist[1]

    @property
    def domain(self) -> Tensor | None:
        """The prompt for all classes, if there is one that the next task will be seen under."""
        if self.settings.rule == "paper":
            return None
        return self.memory.shared_prompt if len(self.memory) else self._domain

    def learn(
        self,
        data: Any,
        name: str | None = None,
        on_stage: OnStage | None = None,
        checkpoint: CheckpointFile | None = None,
        on_usable: Callable[[TaskRecord], None] | None = None,
    ) -> TaskRecord:
        """Learn the classes of a folder of class folders, of (images, labels), or of a torch Dataset.

        Classes that are known already grow by these images.
        Nothing changes until the task is learned completely: an error or Ctrl-C leaves the learner as it was.
        With a `checkpoint` the same call goes on where an earlier one was interrupted, and ends in the same
        bits. on_usable: is given the record as it is before its prompt is trained, which can be used already.
        """
        name = name or self._next_name()
        images, labels = as_labelled(data, self.backbone.preprocessing)
        classes = sorted(set(labels))
        if not classes:
            raise DataError("there are no images to learn from")
        check_name(name, "the task")
        for label in classes:
            check_name(label, "class")
        self.memory.check_new(name)
        number = {label: i for i, label in enumerate(classes)}
        numbers = torch.tensor([number[label] for label in labels])
        callbacks = training_callbacks(name, self._which(classes, len(labels)), on_stage, checkpoint)
        seen = TaskImages(cache_decoded(images), self.backbone, self.settings, name, on_stage)
        memory, settings = self.memory, self.settings
        record = learn_task(
            name, classes, seen, numbers, seen.encoder, memory, settings, callbacks, self.domain, on_usable
        )
        self.memory.add(record)
        return record

    def trains_prompt(self, classes: Sequence[str]) -> bool:
        """Whether a task of these classes would get a prompt."""
        return trains_prompt(self.settings, classes, self.memory, self.domain)

    def add_class(self, name: str, images: Any) -> TaskRecord:
        """Learn one class, or more of it, from a handful of images, at once: see `tasks.learn_class`."""
        record = self._few_shot(name, as_images(images, self.backbone.preprocessing))
        self.memory.add(record)
        return record

    def correct(self, image: Any, name: str, content: bytes | None = None) -> TaskRecord:
        """Learn one image as what it is, after a wrong answer; closed-form, at once, and `undo` takes it back.

        It counts as one image, or as no more than it must for the answer to change. A correction of the same image from before is replaced. content: of its file, which tells it from others,
        if the image is not given as a path.
        """
        self._require_knowledge()
        images = as_images(image, self.backbone.preprocessing)
        if len(images) != 1:
            raise DataError(f"{len(images)} images cannot be one correction; correct them one by one")
        file = Path(image) if isinstance(image, (str, os.PathLike)) and image_exists(Path(image)) else None
        number = digest(content or (image_bytes(file) if file else images.pixels([0]).numpy().tobytes()))
        task = correction_name(number)
        before = [old for old in self.memory.tasks if old.name != task]
        learner = self.copy()
        learner.memory = Memory(before)
        record = learner._few_shot(name, images)
        record = dataclasses.replace(
            record,
            name=task,
            classes=record.classes.with_rows("seen", [torch.tensor([number])]),
            metadata=dataclasses.replace(record.metadata, file=file.name if file else None),
            corrected_from=self.predict(images).labels[0],
        )
        for weight in _WEIGHTS:
            weighted = dataclasses.replace(record, classes=record.classes.with_image_weight(weight))
            learner.memory = Memory([*before, weighted])
            if learner.predict(images).labels == [name]:
                break
        self.memory = learner.memory
        return self.memory.tasks[-1]

    def undo(self, task: str | None = None) -> TaskRecord:
        """Take the last correction back, or the one of that name: as if it had never been made."""
        return undo(self.memory, task)

    def _few_shot(self, name: str, images: ImageSet) -> TaskRecord:
        check_name(name, "the class")
        record = learn_class(
            name, TaskImages(images, self.backbone, self.settings, name), self.memory, self.settings
        )
        about = dataclasses.replace(record.metadata, learned=datetime.date.today().isoformat())
        return dataclasses.replace(record, metadata=about)

    def predict(self, images: Any) -> Prediction:
        """Predict paths, a folder, PIL images, or a tensor of pixels."""
        parts = list(self._matches(as_images(images, self.backbone.preprocessing), _CHUNK))
        return self._answer(Matches.join(parts))

    def stream(self, images: Any, chunk: int = _CHUNK) -> Iterator[Prediction]:
        """The same, `chunk` images at a time, so that the first are known before the last are read."""
        for part in self._matches(as_images(images, self.backbone.preprocessing), chunk):
            yield self._answer(part)

    def _answer(self, matches: Matches) -> Prediction:
        """A number that is none would be taken for an answer, and be greater or less than nothing."""
        answer = Prediction.build(self.index, matches, self.temperature)
        for numbers in (answer.scores, answer.similarities, answer.probabilities, answer.energy):
            if not numbers.isfinite().all():
                raise ModelFileError(
                    "similarities to what was learned are not finite numbers; the model or the backbone's weights "
                    "are damaged: use another copy"
                )
        return answer

    @property
    def temperature(self) -> float:
        """By which scores are divided to become logits; evidence comes as logits."""
        return 1.0 if self.fusion else self.settings.temperature

    def match(self, embed: Embed, count: int, every: bool = True) -> Matches:
        """Decide on `count` images that `embed` knows by their rows, by the learner's rule.

        every: all classes are scored; else, where they are very many, the candidates of each image alone.
        """
        if self.fusion:
            return self.fusion.match(embed, count, shortlist=None if every else self.shortlist)
        return match(self.index.prototypes, embed, count, self.settings.neighbours)

    def _matches(self, images: ImageSet, chunk: int) -> Iterator[Matches]:
        self._require_knowledge()
        backbone, index = self.backbone, self.index
        batch = backbone.batch_size(self.settings.embed_batch_size)
        chunks = torch.arange(len(images)).split(chunk)
        for pixels in prefetched(images, chunks, ahead=1, device=backbone.device):
            tokens = backbone.trunk_pixels(pixels, index.shared_layers(backbone.depth), batch)
            embed = prompted_forward(backbone, index.prompts, tokens, batch)
            yield self.match(embed, len(pixels), every=False)

    def forget(self, name: str | None = None, *, task: str | None = None) -> Forgotten:
        """Remove a class, or a whole task with `task=`. The result says what that guarantees."""
        return forget(self.memory, name, task=task)

    @property
    def model(self) -> model_file.Model:
        """What a model file of this learner holds."""
        header = model_file.backbone_header(self.backbone)
        return model_file.Model(Path("a learner"), header, self.settings, self.memory)

    def save(self, path: str | Path) -> None:
        """Write the model to one file, atomically."""
        self._require_knowledge()
        self.model.write(path)

    @classmethod
    def load(cls, path: str | Path, backbone: Backbone | None = None) -> Learner:
        """Read a model file; without `backbone`, the one it was learned with is loaded by name."""
        return cls.of_model(model_file.read(path), backbone)

    @classmethod
    def of_model(cls, model: model_file.Model, backbone: Backbone | None = None) -> Learner:
        """A learner that knows what a model file says."""
        learner = cls(model.backbone_for(backbone), model.settings)
        learner.memory = model.memory
        return learner

    def copy(self) -> Learner:
        """A learner that can change without this one: records are shared, the list of them is not."""
        other = Learner(self.backbone, self.settings, self._domain)
        other.memory = Memory(self.memory.tasks)
        return other

    def _require_knowledge(self) -> None:
        if not len(self.memory):
            raise LearnerError("nothing has been learned yet; call learn() first")

    def _next_name(self) -> str:
        numbers = itertools.count(len(self.memory) + 1)
        return next(name for name in map("task-{}".format, numbers) if name not in self.memory.task_names)

    def _which(self, classes: Sequence[str], images: int) -> dict[str, Any]:
        """Tells the training of one task from that of another."""
        weights = self.backbone.fingerprint
        return {
            "settings": self.settings.to_dict(),
            "classes": classes,
            "images": images,
            "backbone": weights,
        }


def merge(
    *learners: Learner,
    renames: Mapping[str, str] | None = None,
    task_renames: Mapping[str, str] | None = None,
) -> Learner:
    """One learner with the tasks of all, in the order given. Same backbone; no task name twice; a class that
    several know is known from the images of all.

    Renames, old name to new, apply to every learner but the first.
    """
    if not learners:
        raise LearnerError("merge needs at least one learner")
    merged = model_file.merge([learner.model for learner in learners], renames, task_renames)
    return Learner.of_model(merged, learners[0].backbone)
