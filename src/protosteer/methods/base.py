"""The contract between a method and its evaluation: all that a run knows of a method.

A new method is one file with one subclass of `Method` and one line in `methods/__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.errors import SettingsError
from protosteer.evaluation.diagnosis import Diagnosis
from protosteer.running.progress import Stage
from protosteer.running.resume import Bookmark
from protosteer.streams.base import Task


class Images(Protocol):
    """Test images, which a method embeds through this object: what it asks for twice is computed once."""

    def __len__(self) -> int: ...

    def embed(self, rows: Tensor, key: str | None, prompt: Tensor | None) -> Tensor:
        """[len(rows), D]. `key` names the prompt for the whole run (None: no prompt); it must never change."""


class MethodSettings(Protocol):
    """Settings of a method: frozen, with a `seed`, from and to plain data."""

    @property
    def seed(self) -> int: ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Answer:
    """What a method says of B images. Methods that retrieve nothing leave the last two out."""

    classes: Tensor  # int64 [B]: numbers in the method's list of classes
    candidates: Tensor | None = None  # bool [B, T]: the tasks whose prompts were tried
    prompts: Tensor | None = None  # int64 [B]: forward passes beyond the first


class Method(ABC):
    name: ClassVar[str]
    suffix: ClassVar[str] = ".safetensors"  # of files that hold a state
    backbone: Backbone
    embed_batch_size: int = 64

    @staticmethod
    @abstractmethod
    def settings_from(values: Mapping[str, Any]) -> MethodSettings:
        """Settings from names and values; names that mean nothing to the method are an error."""

    @classmethod
    def preset(cls, name: str, depth: int) -> dict[str, Any]:
        """Settings that a preset stands for, on a backbone of `depth` layers; "paper" changes nothing."""
        if name != "paper":
            raise SettingsError(f"method {cls.name} has no preset {name!r}; leave it out")
        return {}

    @abstractmethod
    def __init__(self, backbone: Backbone, settings: Any): ...

    @property
    @abstractmethod
    def classes(self) -> list[str]:
        """Names of the classes learned so far, by their numbers."""

    @abstractmethod
    def learn(
        self,
        task: Task,
        on_stage: Callable[[Stage], None] | None = None,
        bookmark: Bookmark | None = None,
    ) -> None:
        """Learn a task's training images; with a bookmark, go on where an earlier call was interrupted."""

    def predict(self, images: Images) -> Tensor:
        """Class numbers, int64 [B]."""
        return self.answer(images).classes

    @abstractmethod
    def answer(self, images: Images) -> Answer:
        """Predictions against all classes learned so far, and how they came about."""

    @abstractmethod
    def state(self) -> bytes:
        """Everything learned so far, as the contents of a file without pickle; equal states, equal bytes."""

    @abstractmethod
    def restore(self, state: bytes) -> None:
        """Back to a state that `state` gave."""

    @abstractmethod
    def bytes_per_task(self) -> list[int]:
        """What each task added to the state."""

    def trained_parameters(self) -> int:
        """How many numbers were trained, over all tasks."""
        return 0

    def diagnose(self, tests: Sequence[tuple[Images, list[str]]]) -> Diagnosis | None:
        """Why the accuracy is what it is, for every task learned: its test images and their labels."""
        return None
