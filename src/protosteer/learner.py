"""The estimator, a backbone with a list of learned tasks: learn, predict, forget, save, load."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from protosteer import sharing
from protosteer.backbones import Backbone
from protosteer.corrections import ImageFile, confirm, correct
from protosteer.data.decode_cache import cache_decoded
from protosteer.data.images import ImageSet, as_images, as_labelled
from protosteer.data.prefetch import prefetched
from protosteer.errors import DataError, LearnerError
from protosteer.evidence.matches import ClassifierMatches
from protosteer.model import file as model_file
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.model.unlearning import Forgotten, forget, undo
from protosteer.paper.prompts import Embed, prompted_forward
from protosteer.prediction import Prediction
from protosteer.rules import RULES, Reader, reader_of
from protosteer.runtime.callbacks import training_callbacks
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage, call_both
from protosteer.runtime.progress_bar import LearnProgress
from protosteer.runtime.task_images import TaskImages
from protosteer.settings import Settings
from protosteer.tasks import learn_class, learn_task, trains_prompt
from protosteer.util.text import check_name, counted

# Images whose pixels and embeddings are in memory at once while predicting.
_CHUNK = 128


class Learner:
    """A frozen backbone, settings, and a list of task records.

    Same seed, machine, threads and precision give bit-identical results. A learner is not locked: change it from one
    thread at a time. Several learners may train in several threads.

    Examples:
        >>> import torch
        >>> import protosteer as ps
        >>> learner = ps.Learner(ps.Backbone.load("nano"), ps.Settings.preset("instant"))
        >>> light, dark = torch.full((3, 3, 32, 32), 250).byte(), torch.full((3, 3, 32, 32), 5).byte()
        >>> record = learner.learn((torch.cat([light, dark]), ["light"] * 3 + ["dark"] * 3), name="lamps")
        >>> learner.classes, learner.tasks
        (['dark', 'light'], ['lamps'])
        >>> learner.predict(dark[:1]).labels
        ['dark']
        >>> learner.forget("light").exact
        True
    """

    def __init__(
        self,
        backbone: Backbone,
        settings: Settings | None = None,
        shared_prompt: Tensor | None = None,
        *,
        domain: Tensor | None = None,
    ):
        """Create a learner without classes.

        Args:
            backbone: The frozen ViT.
            settings: How to learn and predict; `Settings()`, the preset "fast", by default.
            shared_prompt: A prompt that serves all classes from the first task on, see `adapt`. Without one, the
                prompt of the first task does.
            domain: The old name of `shared_prompt`.
        """
        if domain is not None:
            warnings.warn("Learner(domain=) is now Learner(shared_prompt=)", DeprecationWarning, stacklevel=2)
        self.backbone = backbone
        self.settings = settings or Settings()
        self.memory = Memory()
        self._shared_prompt = shared_prompt if domain is None else domain
        self._reader: tuple[tuple[TaskRecord, ...], Settings, Reader] | None = None

    def __repr__(self) -> str:
        images, tasks = sum(task.images for task in self.memory.tasks), counted(len(self.memory), "task")
        contents = f"{counted(len(self.classes), 'class')} in {tasks} from {counted(images, 'image')}"
        return f"<Learner: {self.backbone.name}, {contents if len(self.memory) else 'nothing learned yet'}>"

    @property
    def backbone(self) -> Backbone:
        """The backbone; if its precision is "auto", it computes in fp32 under settings that reproduce the paper."""
        return self._in_fp32 if self.settings.reproduces_paper else self._backbone

    @backbone.setter
    def backbone(self, backbone: Backbone) -> None:
        self._backbone, self._in_fp32 = backbone, backbone.with_auto_as_fp32()

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order in which they were learned first."""
        return self.memory.classes

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in the order in which they were learned."""
        return self.memory.task_names

    @property
    def reader(self) -> Reader:
        """The reader of the memory; it is rebuilt only when the memory or the settings have changed."""
        tasks, settings = self.memory.tasks, self.settings
        if self._reader is None or self._reader[0] is not tasks or self._reader[1] is not settings:
            self._reader = None  # freed first: with very many classes, two readers would not fit into memory
            self._reader = tasks, settings, reader_of(self.memory, settings)
        return self._reader[2]

    def use_reader(self, reader: Reader) -> None:
        """Predict by this reader until the memory changes; that of a correction need not be built again."""
        self._reader = self.memory.tasks, self.settings, reader

    @property
    def shared_prompt(self) -> Tensor | None:
        """The shared prompt [S, L, D] that the next task will be stored under, if there is one."""
        if not RULES[self.settings.rule].uses_shared_prompt:
            return None
        return self.memory.shared_prompt if len(self.memory) else self._shared_prompt

    @property
    def domain(self) -> Tensor | None:
        """The old name of `shared_prompt`."""
        warnings.warn("Learner.domain is now Learner.shared_prompt", DeprecationWarning, stacklevel=2)
        return self.shared_prompt

    def learn(
        self,
        data: Any,
        name: str | None = None,
        on_stage: OnStage | None = None,
        checkpoint: CheckpointFile | None = None,
        on_usable: Callable[[TaskRecord], None] | None = None,
        progress: bool | None = None,
    ) -> TaskRecord:
        """Learn one task: all of it or, if an error is raised, nothing. Its images are added to those of known classes.

        Args:
            data: A folder of class folders, (images, labels), or a torch Dataset of such pairs.
            name: The task's name; "task-N" by default.
            on_stage: Called with each stage of progress.
            checkpoint: With one, the same call resumes an interrupted training, bit-identically.
            on_usable: Called with the record before its prompt is trained; it can predict already.
            progress: Show bars on standard error; by default in a terminal or notebook, if there is no `on_stage`.

        Returns:
            The task's record, which is in `memory` now.

        Raises:
            DataError: There are no images, or a file cannot be read.
        """
        console = Console(stderr=True)
        if progress or (progress is None and on_stage is None and console.is_terminal):
            with LearnProgress(console) as bars:
                return self.learn(data, name, call_both(bars.on_stage, on_stage), checkpoint, on_usable, False)
        name = name or self._next_name()
        images, labels = as_labelled(data, self.backbone.preprocessing)
        classes = sorted(set(labels))
        if not classes:
            raise DataError("there are no images to learn from", code="no-images")
        check_name(name, "the task")
        for label in classes:
            check_name(label, "class")
        self.memory.check_new(name)
        positions = {label: i for i, label in enumerate(classes)}
        numbers = torch.tensor([positions[label] for label in labels])
        callbacks = training_callbacks(name, self._run_key(classes, len(labels)), on_stage, checkpoint)
        task_images = self.task_images(cache_decoded(images), name, on_stage)
        precision = self.backbone.precision
        record = learn_task(
            name, classes, task_images, numbers, task_images.encoder, self.memory, self.settings, callbacks,
            self.shared_prompt, on_usable and (lambda usable: on_usable(usable.computed_in(precision))),
        )  # fmt: skip
        self.memory.add(record := record.computed_in(precision))
        return record

    def trains_prompt(self, classes: Sequence[str]) -> bool:
        """Return whether a prompt would be trained for a task.

        Args:
            classes: The classes of the task.

        Returns:
            True if `learn` would train one.
        """
        return trains_prompt(self.settings, classes, self.memory, self.shared_prompt)

    def add_class(self, name: str, images: Any) -> TaskRecord:
        """Learn one class, or more of it, from a few images, without training, as a task of its own.

        Args:
            name: The class.
            images: What `predict` takes.

        Returns:
            The record of the task.
        """
        images = as_images(images, self.backbone.preprocessing)
        record = learn_class(name, self.task_images(images, name), self.memory, self.settings)
        self.memory.add(record := record.computed_in(self.backbone.precision))
        return record

    def task_images(self, images: ImageSet, task: str, on_stage: OnStage | None = None) -> TaskImages:
        """Wrap images as those of one task, embedded in the layers that the rule reads."""
        layers = RULES[self.settings.rule].layers(self.settings)
        return TaskImages(images, self.backbone, self.settings, task, on_stage, layers)

    def correct(self, image: Any, name: str, content: bytes | None = None) -> TaskRecord:
        """Learn one misclassified image, without training; `undo` reverts it.

        It counts as no more images than the label needs to change. An earlier correction of the same image is
        replaced.

        Args:
            image: A path, a PIL image or a tensor of pixels.
            name: Its true class.
            content: The bytes of its file, which identify it, if `image` is not a path.

        Returns:
            The correction's record, which is in `memory` now.

        Raises:
            LearnerError: Nothing was learned yet.
        """
        self._require_knowledge()
        return correct(self, image, name, None if content is None else ImageFile(content)).record

    def confirm(self, images: Any) -> list[TaskRecord]:
        """Learn images that were classified correctly, each as the class that is predicted for it; `undo` reverts it.

        They keep probabilities calibrated beside corrections, because misclassified images alone are harder than others.
        Corrected images are skipped: correct what is wrong in a folder, then confirm the folder.

        Args:
            images: Paths, a folder, PIL images, or a tensor of pixels.

        Returns:
            The records of those that were learned, which are in `memory` now.
        """
        self._require_knowledge()
        image_set = as_images(images, self.backbone.preprocessing)
        paths = getattr(image_set, "paths", None)
        return confirm(self, paths if paths is not None else list(image_set.pixels(range(len(image_set))).split(1)))

    def undo(self, task: str | None = None) -> TaskRecord:
        """Undo a correction or confirmation, as if it had never been made.

        Args:
            task: Name of its record; the latest if None.

        Returns:
            The record that was removed.

        Raises:
            LearnerError: There is no such correction.
        """
        return undo(self.memory, task)

    def predict(self, images: Any) -> Prediction:
        """Predict images.

        Args:
            images: A path, a folder, a list of paths, PIL images, or pixels [B, 3, h, w] as uint8 or floats in [0, 1].

        Returns:
            One row per image.

        Raises:
            LearnerError: Nothing was learned yet.
            DataError: An image cannot be read.
        """
        parts = list(self._matches(as_images(images, self.backbone.preprocessing), _CHUNK))
        return self._prediction(ClassifierMatches.join(parts))

    def stream(self, images: Any, chunk: int = _CHUNK) -> Iterator[Prediction]:
        """Predict images chunk by chunk, so that the first results come before the last images are read.

        Args:
            images: What `predict` takes.
            chunk: Images per prediction.

        Yields:
            A prediction per chunk, in order.

        Raises:
            LearnerError: Nothing was learned yet.
        """
        for part in self._matches(as_images(images, self.backbone.preprocessing), chunk):
            yield self._prediction(part)

    def predict_embedded(self, embed: Embed, count: int) -> Prediction:
        """Predict images, given as rows 0 to `count` - 1 of `embed`; see `Reader.match`."""
        return self._prediction(self.reader.match(embed, count, exhaustive=False))

    def match(self, embed: Embed, count: int, every: bool = True) -> ClassifierMatches:
        """Match images by the current reader; see `Reader.match`. `every` scores all classes."""
        return self.reader.match(embed, count, exhaustive=every)

    def _matches(self, images: ImageSet, chunk: int) -> Iterator[ClassifierMatches]:
        self._require_knowledge()
        reader = self.reader
        backbone = self.backbone.reading(reader.layers)
        batch = backbone.batch_size(self.settings.embed_batch_size)
        layers = min(reader.index.shared_layers(backbone.depth), backbone.max_trunk)
        chunks = torch.arange(len(images)).split(chunk)
        for pixels in prefetched(images, chunks, ahead=1, device=backbone.device):
            tokens = backbone.trunk_pixels(pixels, layers, batch)
            embed = prompted_forward(backbone, reader.index.prompts, tokens, layers, batch)
            yield reader.match(embed, len(pixels), exhaustive=False)

    def _prediction(self, matches: ClassifierMatches) -> Prediction:
        return Prediction.build(self.reader.index, matches, self.reader.temperature)

    def forget(self, name: str | None = None, *, task: str | None = None) -> Forgotten:
        """Remove a class, or a whole task.

        Args:
            name: The class.
            task: The task, with all its classes, instead.

        Returns:
            What was removed, whether that is `exact`, and the `guarantee` in words.

        Raises:
            LearnerError: There is no such class or task.
        """
        return forget(self.memory, name, task=task)

    @property
    def model(self) -> model_file.Model:
        """The model, as a file of this learner holds it."""
        header = model_file.backbone_header(self.backbone)
        return model_file.Model(Path("a learner"), header, self.settings, self.memory)

    def save(self, path: str | Path) -> None:
        """Write the model to one file, atomically.

        Args:
            path: The file, usually with the suffix `.protosteer`.

        Raises:
            LearnerError: Nothing was learned yet.
        """
        self._require_knowledge()
        self.model.write(path)

    @classmethod
    def load(cls, path: str | Path, backbone: Backbone | None = None) -> Learner:
        """Read a model file.

        Args:
            path: The file.
            backbone: The backbone it was learned with; loaded by its name if None.

        Returns:
            A learner that predicts as the one that was saved.

        Raises:
            ModelFileError: The file is damaged, of another format, or belongs to another backbone.
            WeightsError: The backbone's weights are not found.
        """
        return cls.of_model(model_file.read(path), backbone)

    def push_to_hub(
        self, repo: str, private: bool | None = None, licence: str | None = None, token: str | None = None
    ) -> str:
        """Upload the model with a model card to the Hugging Face Hub.

        Args:
            repo: "user/name"; it is created if it does not exist.
            private: Visibility of a new repository; the account's default if None.
            licence: The licence that the model card names.
            token: Access token of your account; by default the one you are logged in with.

        Returns:
            The address of the repository.

        Raises:
            LearnerError: Nothing was learned yet.
            ProtosteerError: The Hub cannot be reached, or rejects the upload.
        """
        self._require_knowledge()
        return sharing.push(self.model, self.reader, repo, private, licence, token)

    @classmethod
    def from_pretrained(
        cls, repo: str, revision: str | None = None, token: str | None = None, backbone: Backbone | None = None
    ) -> Learner:
        """Download a model from the Hugging Face Hub.

        Args:
            repo: "user/name".
            revision: A branch, tag or commit; the default branch if None.
            token: Access token of your account, for private repositories; by default the one you are logged in with.
            backbone: The model's backbone, if it is loaded already.

        Returns:
            The learner.

        Raises:
            ProtosteerError: The Hub has no such model, or cannot be reached.
            ModelFileError: The repository holds no model file.
        """
        return cls.of_model(sharing.pull(repo, revision, token), backbone)

    @classmethod
    def of_model(cls, model: model_file.Model, backbone: Backbone | None = None) -> Learner:
        """Create a learner from a model that was read from a file.

        Args:
            model: The model.
            backbone: Its backbone; loaded by name if None.

        Returns:
            The learner.

        Raises:
            ModelFileError: The backbone is another one than the model's.
        """
        learner = cls(model.backbone_for(backbone), model.settings)
        learner.memory = model.memory
        return learner

    def copy(self) -> Learner:
        """Return an independent copy of the learner; the two share records but not the list of them."""
        twin = Learner(self._backbone, self.settings, self._shared_prompt)
        twin.memory, twin._reader = self.memory.copy(), self._reader
        return twin

    def _require_knowledge(self) -> None:
        if not len(self.memory):
            raise LearnerError("the model has no classes yet; learn some first", code="nothing-learned")

    def _next_name(self) -> str:
        numbers = itertools.count(len(self.memory) + 1)
        return next(name for name in map("task-{}".format, numbers) if name not in self.memory.task_names)

    def _run_key(self, classes: Sequence[str], images: int) -> dict[str, Any]:
        """Return what identifies the training of one task."""
        backbone = {"backbone": self.backbone.fingerprint, "precision": self.backbone.precision}
        return {"settings": self.settings.to_dict(), "classes": classes, "images": images, **backbone}


def merge(
    *learners: Learner, renames: Mapping[str, str] | None = None, task_renames: Mapping[str, str] | None = None
) -> Learner:
    """Merge several learners with the same backbone into one: all their tasks, in the order given.

    A class that several have is predicted from the images of all.

    Args:
        *learners: Learners whose tasks have different names.
        renames: New names of classes by old names; they apply to every learner but the first.
        task_renames: The same for tasks.

    Returns:
        A new learner with the first one's backbone; the given learners do not change.

    Raises:
        LearnerError: There is nothing to merge, a task's name occurs twice, or backbones or settings of inference differ.

    Examples:
        >>> import torch
        >>> import protosteer as ps
        >>> backbone, learners = ps.Backbone.load("nano"), []
        >>> for name, grey in (("dark", 5), ("light", 250)):
        ...     learners.append(ps.Learner(backbone, ps.Settings.preset("instant")))
        ...     record = learners[-1].add_class(name, torch.full((2, 3, 32, 32), grey).byte())
        >>> ps.merge(*learners).classes
        ['dark', 'light']
    """
    if not learners:
        raise LearnerError("merge needs at least one learner", code="nothing-to-merge")
    model = model_file.merge([learner.model for learner in learners], renames, task_renames)
    return Learner.of_model(model, learners[0].backbone)
