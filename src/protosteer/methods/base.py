"""The contract between a method and its evaluation: all that a run knows of a method.

A new method is one file with one subclass of `Method` and one line in `methods/__init__.py`;
docs/add-a-method.md walks through one. `toolkit.py` has what several need, `checks.py` what every one must
pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.backbones.prompting import Prompt
from protosteer.errors import LearnerError, ModelFileError, SettingsError
from protosteer.methods.diagnosis import of_classes
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.settings import Values
from protosteer.streams.base import TaskData
from protosteer.util.tensor_file import pack_tensors, unpack_tensors

__all__ = ["Answer", "Images", "TaskData", "Method", "Source"]


class Images(Protocol):
    """Test images: as pixels, or through `Method.backbone`, where what is asked for twice is computed once.

    A method that trains its backbone need not care: embeddings of earlier weights are not given out.
    """

    def __len__(self) -> int: ...

    def pixels(self, rows: Tensor) -> Tensor:
        """uint8 [len(rows), 3, h, w]."""

    def embed(
        self,
        rows: Tensor,
        prompt: Prompt | None = None,
        key: str | None = None,
        backbone: Backbone | None = None,
    ) -> Tensor:
        """[len(rows), D] under a prompt: none, one [S, L, D] for all, or [len(rows), S, L, D], one each.

        backbone: another than the method's own. A prompt or a backbone that has a key is run once per image
        for the whole evaluation: a key means the same one for ever.
        """

    def tokens(self, rows: Tensor, prompt: Tensor | None = None) -> Tensor:
        """[len(rows), N, D]: all that the last layer gives out, the prompt's own outputs included."""


@dataclass(frozen=True)
class Answer:
    """What a method says of B images. What a method does not know it leaves out."""

    classes: Tensor  # int64 [B]: numbers in the method's list of classes
    candidates: Tensor | None = None  # bool [B, T]: the tasks retrieved, if the method retrieves any
    prompts: Tensor | None = None  # int64 [B]: forward passes beyond the first
    confidence: Tensor | None = None  # [B]: the probability that each is right, as the method sees it


@dataclass(frozen=True)
class Source:
    """Where a method was published first."""

    authors: str  # such as "Wang et al."
    title: str
    venue: str
    year: int


class Method(ABC):
    name: ClassVar[str]
    source: ClassVar[Source]
    trains: ClassVar[str] = "nothing"  # in a few words
    settings_class: ClassVar[type[Values]]  # among them `seed` and `embed_batch_size`
    suffix: ClassVar[str] = ".safetensors"  # of files that hold a state
    trains_backbone: ClassVar[bool] = False  # if so, `backbone` is a trainable copy of the one that was given
    buffer: ClassVar[bool] = False  # keeps images of earlier tasks: `buffer_size` of them, or all
    grows: ClassVar[bool] = False  # keeps something of every image, so that there is no end to it
    again: ClassVar[bool] = False  # a task may bring more images of classes that are known

    @classmethod
    def settings_from(cls, values: Mapping[str, Any]) -> Any:
        """Settings from names and values; names that mean nothing to the method are an error."""
        return cls.settings_class.from_dict(values)

    @classmethod
    def preset(cls, name: str | None) -> dict[str, Any]:
        """Settings that a preset stands for; None: the method's own choice."""
        if name not in (None, "paper"):
            raise SettingsError(f"method {cls.name} has no preset {name!r}; leave it out")
        return {}

    def __init__(self, backbone: Backbone, settings: Any):
        self.backbone = backbone
        self.settings = settings
        self.embed_batch_size: int = settings.embed_batch_size
        self.tasks: list[
            list[str]
        ] = []  # names of the classes that each brought; else `classes` is overridden

    @property
    def classes(self) -> list[str]:
        """Names of the classes learned so far, by their numbers."""
        return [name for task in self.tasks for name in task]

    @abstractmethod
    def learn(
        self, task: TaskData, on_stage: OnStage | None = None, checkpoint: CheckpointFile | None = None
    ) -> None:
        """Learn a task's training images; with a checkpoint, go on where an earlier call was interrupted."""

    def predict(self, images: Images) -> Tensor:
        """Class numbers, int64 [B]."""
        return self.answer(images).classes

    @abstractmethod
    def answer(self, images: Images) -> Answer:
        """Predictions against all classes learned so far, and how they came about."""

    def diagnose(self, images: Images, truth: Tensor, task: int, own: Tensor) -> dict[str, float]:
        """Why the answers to a task's images are right and wrong: see `diagnosis.py`.

        truth: their classes, int64 [B]; task: its number; own: all its classes.
        """
        return of_classes(self.predict(images), truth, own)

    def tensors(self) -> dict[str, Tensor]:
        """Everything learned so far, but `tasks`: what `state` keeps. Not needed by who overrides `state`."""
        return {}

    def put_back(self, tensors: dict[str, Tensor]) -> None:
        """What `tensors` gave; unless told otherwise, each is an attribute of its name."""
        if tensors.keys() != self.tensors().keys():
            raise ModelFileError(
                f"the saved state is of another version's method {self.name}; begin anew with overwrite=True"
            )
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def state(self) -> bytes:
        """Everything learned so far, as the contents of a file without pickle; equal states, equal bytes."""
        header = {"method": self.name, "settings": self.settings.to_dict(), "tasks": self.tasks}
        return pack_tensors(header, self.tensors())

    def restore(self, state: bytes) -> None:
        """Back to a state that `state` gave."""
        header, tensors = unpack_tensors(state, "the saved state")
        self.tasks = header["tasks"]
        self.put_back(tensors)

    @abstractmethod
    def bytes_per_task(self) -> list[int]:
        """What each task added to the state."""

    def trained_parameters(self) -> int:
        """How many numbers were trained, over all tasks."""
        return 0

    @classmethod
    def require_again(cls) -> None:
        """Refuse tasks in which classes come back, before anything is spent on them."""
        if not cls.again:
            raise SettingsError(
                f"method {cls.name} cannot learn more of a class that it knows, as blurry task boundaries ask for; "
                "choose another, or leave blurry out"
            )

    def require_knowledge(self) -> None:
        if not self.classes:
            raise LearnerError(f"method {self.name} has learned nothing yet; call learn() first")
