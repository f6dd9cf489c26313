"""Contrastive Prototypical Prompt, the method of this library, as evaluation sees it: a `Learner` and no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protosteer import modelfile
from protosteer.backbones import Backbone
from protosteer.evaluation.diagnosis import Diagnosis, diagnose
from protosteer.learner import Learner
from protosteer.method.inference import Embed, Matches, match
from protosteer.method.memory import Memory
from protosteer.methods.base import Answer, Images, Method
from protosteer.running.progress import Stage
from protosteer.running.resume import Bookmark
from protosteer.settings import Settings, preset
from protosteer.streams.base import Task


class CPP(Method):
    name = "cpp"
    suffix = ".protosteer"

    @staticmethod
    def settings_from(values: Mapping[str, Any]) -> Settings:
        return Settings.from_dict(dict(values))

    @classmethod
    def preset(cls, name: str, depth: int) -> dict[str, Any]:
        return preset(name, depth)

    def __init__(self, backbone: Backbone, settings: Settings):
        self.learner = Learner(backbone, settings)
        self.backbone = backbone
        self.embed_batch_size = settings.embed_batch_size

    @property
    def classes(self) -> list[str]:
        return self.learner.classes

    def learn(
        self,
        task: Task,
        on_stage: Callable[[Stage], None] | None = None,
        bookmark: Bookmark | None = None,
    ) -> None:
        self.learner.learn((task.train, task.train_labels), task.name, on_stage, bookmark)

    def answer(self, images: Images) -> Answer:
        matches = match_images(self.learner, images)
        prompts = (matches.candidates & self.learner.index.prompted).sum(dim=1)
        return Answer(matches.scores.argmax(dim=1), matches.candidates, prompts)

    def state(self) -> bytes:
        learner = self.learner
        return modelfile.pack(modelfile.backbone_header(learner.backbone), learner.settings, learner.memory)

    def restore(self, state: bytes) -> None:
        model = modelfile.unpack(state, Path("the saved state"))
        model.backbone_for(self.learner.backbone)
        self.learner.memory = model.memory

    def bytes_per_task(self) -> list[int]:
        return [task.bytes for task in self.learner.memory.tasks]

    def trained_parameters(self) -> int:
        return sum(int(task.about.get("trained_parameters", 0)) for task in self.learner.memory.tasks)

    def diagnose(self, tests: Sequence[tuple[Images, list[str]]]) -> Diagnosis:
        memory = self.learner.memory
        views = [(embedder(memory, images), labels) for images, labels in tests]
        return diagnose(memory, views, self.learner.settings.neighbours)


def match_images(learner: Learner, images: Images) -> Matches:
    return match(learner.index, embedder(learner.memory, images), len(images), learner.settings.neighbours)


def embedder(memory: Memory, images: Images) -> Embed:
    """`images.embed` as inference calls it, by the numbers of the memory's tasks."""

    def embed(rows: Tensor, tasks: Tensor | None) -> Tensor:
        if tasks is None:
            return images.embed(rows, None, None)
        embeddings = torch.empty(len(rows), memory.tasks[0].classes[0].keys.shape[1])
        for number in tasks.unique().tolist():  # a cache knows embeddings by task
            some, task = tasks == number, memory.tasks[number]
            embeddings[some] = images.embed(rows[some], task.name, task.prompt)
        return embeddings

    return embed
