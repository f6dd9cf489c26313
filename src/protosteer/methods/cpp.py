"""Contrastive Prototypical Prompt (Li et al., WACV 2024): a `Learner` with the paper's settings.

Each task trains a prompt by a contrastive loss, under a neck that is discarded. A class is stored as key prototypes
(embeddings without a prompt) and value prototypes (under its task's prompt). The nearest keys of an image name the
prompts to try, and the nearest value predicts the class. The method itself is in `protosteer/paper/`.

The paper's text and the authors' code differ. The presets `paper-text` and `authors` are either of them as far as
settings go, the default `paper` is between: the authors' noise on prototypes, the text's rows of the loss. No setting
follows the code in two points, where it differs from the text: it matches class means (`centroids=1`) with those
retrieved alone, and with mean pooling it averages the outputs of prompts too. docs/explanation/cpp.md lists every choice.
A class of at most `centroids` images is stored image by image, as a feature vector each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.learner import Learner
from protosteer.methods.base import Answer, Images, Method, Source, TrainingTask, register_method
from protosteer.model import file as model_file
from protosteer.model.memory import Memory
from protosteer.paper.prompts import Embed
from protosteer.settings import PAPER_PRESETS, Settings, preset


@register_method("cpp")
class CPP(Method):
    """A `Learner` behind the contract of methods."""

    source = Source(
        "Li et al.", "Steering prototypes with prompt-tuning for rehearsal-free continual learning", "WACV", 2024
    )
    trains = "a prompt per task, a neck that is thrown away"
    settings_class = Settings
    published: ClassVar[Mapping[str, Mapping[str, Any]]] = dict.fromkeys(
        ("split-cifar100", "imagenet-r", "five-datasets", "imagenet-subset"), {}
    )
    published_source = "the paper's appendix; preset authors is the authors' code"
    grid = {"learning_rate": (1e-3, 3e-4, 3e-3)}
    suffix = ".protosteer"
    supports_repeated_classes = True
    test_settings = {"epochs": 2, "batch_size": 8, "neck_hidden": 16, "augmentation": "crop", "centroids": 2}

    @classmethod
    def preset(cls, name: str | None) -> dict[str, Any]:
        """Return the settings of a reading of the paper, see docs/explanation/cpp.md; None: those of `paper`."""
        return preset(name) if name in PAPER_PRESETS else preset("paper") | super().preset(name)

    def __init__(self, backbone: Backbone, settings: Settings):
        super().__init__(backbone, settings)
        self.learner = Learner(backbone, settings)

    @property
    def classes(self) -> list[str]:
        """The names of all classes learned so far."""
        return self.learner.classes

    @property
    def memory(self) -> Memory:
        """The records of all tasks."""
        return self.learner.memory

    def learn(self, task: TrainingTask) -> None:
        """Learn the task as `Learner.learn` does."""
        self.learner.learn((task.train, task.train_labels), task.name, task.on_stage, task.checkpoint)

    def answer(self, images: Images) -> Answer:
        """Predict as `Learner.predict` does."""
        reader = self.learner.reader
        matches = reader.match(self.embedder(images), len(images))
        probabilities = (matches.scores / reader.temperature).softmax(dim=1)
        confidence, classes = probabilities.amax(dim=1), matches.scores.argmax(dim=1)
        candidates = matches.candidates if reader.retrieves_tasks else None
        return Answer(classes, candidates, matches.passes - 1, confidence, probabilities)

    def diagnose(self, images: Images, truth: Tensor, task: int, task_classes: Tensor) -> dict[str, float]:
        """Analyse errors as the learner's rule does: `Reader.diagnose`."""
        return self.learner.reader.diagnose(self.embedder(images), truth, task, task_classes)

    def embedder(self, images: Images) -> Embed:
        """Wrap `images.embed` as inference calls it, with the numbers of the index's prompts."""
        names, reader = [*self.learner.tasks, "for all classes"], self.learner.reader
        backbone, prompts = self.backbone.reading(reader.layers), reader.index.prompts

        def embed(rows: Tensor, numbers: Tensor | None) -> Tensor:
            if numbers is None:
                return images.embed(rows, None, reader.layers, backbone)
            embeddings = torch.empty(len(rows), backbone.width)
            for number in numbers.unique().tolist():  # cached by task
                mask, key = numbers == number, f"{reader.layers} {names[number]}"
                embeddings[mask] = images.embed(rows[mask], prompts[number], key, backbone)
            return embeddings

        return embed

    def state(self) -> bytes:
        """Return the contents of a model file."""
        return self.learner.model.pack()

    def restore(self, state: bytes) -> None:
        """Restore what `state` returned."""
        model = model_file.unpack(state, Path("the saved state"))
        model.backbone_for(self.backbone)
        self.learner.memory = model.memory

    def bytes_per_task(self) -> list[int]:
        """Return the bytes of each task's record."""
        return [task.bytes for task in self.memory.tasks]

    def paper_bytes(self) -> dict[str, float]:
        """Return the paper's two definitions of memory in float32, which differ.

        Table 5 counts a task's prompt alone: 12 x 768 numbers, 0.035 MB. The appendix counts 12.2 x 768 numbers per
        class: its share of the prompt (12 / 10), its key and value prototypes (5 + 5), and one variance.
        """
        prompts = [task.prompt for task in self.memory.tasks if task.prompt is not None]
        prompt = sum(p.numel() for p in prompts) * 4.0
        metrics = {"prompt_bytes_per_task": prompt / len(self.memory.tasks)}
        if self.settings.rule == "paper":
            index, classes = self.learner.reader.index.prototypes, len(self.classes)
            rows = len(index.keys) + len(index.values) + classes
            metrics["appendix_bytes_per_class"] = (prompt + rows * 4.0 * self.backbone.dim) / classes
        return metrics

    def trained_parameters(self) -> int:
        """Return the size of prompts and discarded necks."""
        return sum(task.metadata.trained_parameters or 0 for task in self.memory.tasks)
