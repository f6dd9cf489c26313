"""The contract between a method and its evaluation.

A new method is one file in this package: a dataclass of settings and a subclass of `Method` under
`@register_method("name")`. docs/how-to/add-a-method.md walks through one, and `checks.py` has the checks that every method
must pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.backbones.prompting import Prompt
from protosteer.errors import LearnerError, ModelFileError, SettingsError
from protosteer.model.schema import check
from protosteer.rules.base import percent
from protosteer.settings import Values, setting
from protosteer.streams.base import TrainingTask
from protosteer.util.tensor_file import pack_tensors, unpack_tensors

__all__ = [
    "METHODS", "Answer", "Images", "Method", "MethodSettings", "Source", "TrainingTask", "register_method",
    "unregister_method",
]  # fmt: skip

MAX_ITEMS = 10**6  # tasks of a state, and classes of a task


class Images(Protocol):
    """Test images: as pixels, or embedded by `Method.backbone`.

    An embedding that is asked for twice is computed once. After a method has trained its backbone, embeddings of
    earlier weights are not used.
    """

    def __len__(self) -> int: ...

    def pixels(self, rows: Tensor) -> Tensor:
        """Return the images of these rows, uint8 [len(rows), 3, h, w]."""

    def embed(
        self, rows: Tensor, prompt: Prompt | None = None, key: str | None = None, backbone: Backbone | None = None
    ) -> Tensor:
        """Embed the images of these rows.

        Args:
            rows: Row numbers.
            prompt: None, one [S, L, D] for all images, or one each, [len(rows), S, L, D].
            key: A name for a prompt or backbone that never changes; its embeddings are computed once per run.
            backbone: A backbone other than the method's.

        Returns:
            Embeddings [len(rows), D].
        """

    def tokens(self, rows: Tensor, prompt: Tensor | None = None) -> Tensor:
        """Return all output tokens of the last layer, the prompt's included, [len(rows), N, D]."""


@dataclass(frozen=True)
class Answer:
    """Predictions for B images; None stands for what a method does not know.

    Attributes:
        classes: Class numbers, int64 [B]: positions in `Method.classes`.
        candidates: The tasks retrieved, bool [B, T].
        prompts: Forward passes after the first, int64 [B].
        confidence: The predicted probability that each answer is right, [B].
        scores: A score of every class, the larger the more likely, [B, K]; probabilities if there is a confidence.
    """

    classes: Tensor
    candidates: Tensor | None = None
    prompts: Tensor | None = None
    confidence: Tensor | None = None
    scores: Tensor | None = None


@dataclass(frozen=True)
class Source:
    """The publication that introduced a method."""

    authors: str  # such as "Wang et al."
    title: str
    venue: str
    year: int


@dataclass(frozen=True)
class MethodSettings(Values):
    """Settings that every method has; a method's own settings inherit from them."""

    embed_batch_size: int = setting(64, at_least=1, at_most=2**16)
    seed: int = setting(0, at_least=0)


class Method(ABC):
    """A class-incremental learner: it learns task after task and predicts among all classes so far.

    Args:
        backbone: The pre-trained backbone; a method never changes it.
        settings: An instance of `settings_class`.

    Attributes:
        backbone: The backbone that test images are embedded with: the given one, or a trainable copy of it.
        tasks: The names of the classes that each task introduced.
        generator: Draws everything random; `learn` seeds it by the task. torch's own is never used.
    """

    name: ClassVar[str]  # set by `register_method`
    source: ClassVar[Source]
    published_source: ClassVar[str] = ""  # where the settings in `published` come from
    trains: ClassVar[str] = "nothing"  # in a few words
    settings_class: ClassVar[type[Values]] = MethodSettings
    test_settings: ClassVar[Mapping[str, Any]] = {}  # under which it learns toy images within a second
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # values of settings that `protosteer tune` tries
    published: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # settings of the publication, by name of the stream
    older_settings: ClassVar[Mapping[str, Any]] = {}  # of runs of versions that had no such setting, if not the default
    # Attributes that hold everything learned: tensors, dictionaries of tensors, or objects with `state_dict` and
    # `load_state_dict`. Each has the growth of its bytes: "once" (with the first task), "per class", "per task" (one
    # module each, of a ModuleList), or the name of the attribute that has the class of each row.
    state_fields: ClassVar[Mapping[str, str]] = {}
    suffix: ClassVar[str] = ".safetensors"  # of state files
    trains_backbone: ClassVar[bool] = False  # then `backbone` is a trainable copy
    uses_rehearsal: ClassVar[bool] = False  # stores images of earlier tasks: `buffer_size` of them, or all
    stored_features: ClassVar[str] = "no"  # feature vectors of single images that are stored, in words
    state_grows: ClassVar[bool] = False  # stores something of every image, without limit
    supports_repeated_classes: ClassVar[bool] = False  # a task may bring more images of known classes

    @classmethod
    def settings_from(cls, values: Mapping[str, Any]) -> Any:
        """Create settings from names and values; unknown names are an error."""
        return cls.settings_class.from_dict(values)

    @classmethod
    def preset(cls, name: str | None) -> dict[str, Any]:
        """Return the settings that a preset stands for; None: the method's defaults."""
        if name not in (None, "paper"):
            message = f"method {cls.name} has no preset {name!r}; leave it out"
            raise SettingsError(message, code="unknown-preset", name=name)
        return {}

    def __init__(self, backbone: Backbone, settings: Any):
        self.backbone = backbone
        self.settings = settings
        self.embed_batch_size: int = settings.embed_batch_size
        self.tasks: list[list[str]] = []
        self.generator = torch.Generator()

    @property
    def classes(self) -> list[str]:
        """The names of all classes learned so far; a class number is a position in this list."""
        return [name for task in self.tasks for name in task]

    @abstractmethod
    def learn(self, task: TrainingTask) -> None:
        """Learn a task; with `task.checkpoint`, resume where an earlier call was interrupted."""

    def predict(self, images: Images) -> Tensor:
        """Return class numbers, int64 [B], of B test images, among all classes learned so far.

        Raises:
            LearnerError: Nothing was learned (code "nothing-learned").
        """
        self.require_knowledge()
        return self.answer(images).classes

    @abstractmethod
    def answer(self, images: Images) -> Answer:
        """Predict among all classes learned so far, and report how: tasks retrieved, passes, confidence."""

    def diagnose(self, images: Images, truth: Tensor, task: int, task_classes: Tensor) -> dict[str, float]:
        """Analyse the errors on one task's test images.

        Args:
            images: The task's B test images.
            truth: Their class numbers, int64 [B].
            task: The task's number.
            task_classes: The numbers of the task's classes.

        Returns:
            Metrics by name, in percent of the images unless their name says otherwise.
        """
        predictions = self.predict(images)
        is_wrong, in_task = predictions != truth, torch.isin(predictions, task_classes)
        return {
            "accuracy": percent(~is_wrong),
            "same_task": percent(is_wrong & in_task),  # predicted as another class of their task
            "other_task": percent(is_wrong & ~in_task),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything learned, except `tasks`, as tensors by name."""
        return {key: t for name in self.state_fields for key, t in self._field_tensors(name).items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; `tasks` is restored already.

        Raises:
            ModelFileError: The tensors are not this version's (code "other-state").
        """
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, entry = key.partition(".")
            parts.setdefault(name, {})[entry] = tensor
        try:
            for name in self.state_fields:
                self._load_field(name, parts.pop(name, {}))
        except (KeyError, RuntimeError) as error:
            raise self._state_error() from error
        if parts:
            raise self._state_error()

    def _field_tensors(self, name: str) -> dict[str, Tensor]:
        value = getattr(self, name)
        if isinstance(value, Tensor):
            return {name: value.detach()}
        entries = value if isinstance(value, dict) else value.state_dict()
        return {f"{name}.{key}": tensor.detach() for key, tensor in entries.items()}

    def _load_field(self, name: str, tensors: dict[str, Tensor]) -> None:
        value = getattr(self, name)
        if isinstance(value, Tensor):
            setattr(self, name, tensors[""])
        elif isinstance(value, dict):
            setattr(self, name, {key: tensor.to(self.backbone.device) for key, tensor in tensors.items()})
        else:
            value.load_state_dict(tensors)

    def _state_error(self) -> ModelFileError:
        message = f"the saved state is of another version's method {self.name}; start over with overwrite=True"
        return ModelFileError(message, code="other-state", method=self.name)

    def state(self) -> bytes:
        """Serialise everything learned, without pickle; equal states give equal bytes."""
        header = {"method": self.name, "settings": self.settings.to_dict(), "tasks": self.tasks}
        return pack_tensors(header, self.state_dict())

    def restore(self, state: bytes) -> None:
        """Restore what `state` returned; raises ModelFileError if it is damaged or of another version."""
        header, tensors = unpack_tensors(state, "the saved state")
        try:
            check(header, {"tasks": [[4096, 0, MAX_ITEMS], 1, MAX_ITEMS]}, "the state's")
            self.tasks = header["tasks"]
            self._check_tensors(tensors)
            self.load_state_dict(tensors)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise self._state_error() from error

    def _check_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless tensors have the types and shapes of a new method's, but for sizes that grow.

        A state may be another's: a run folder is shared, evaluated again, resumed.
        """
        reference = type(self)(self.backbone, self.settings)
        rows = {"per class": len(self.classes), "per task": len(self.tasks)}
        for name, growth in self.state_fields.items():
            if isinstance(value := getattr(reference, name), Tensor):
                tensor = tensors[name]
                shape = [size or stored_size for size, stored_size in zip(value.shape, tensor.shape, strict=True)]
                if value.ndim and not len(value) and growth in (*rows, *self.state_fields):
                    shape[0] = rows[growth] if growth in rows else len(tensors[growth])
                if tensor.dtype != value.dtype or [*tensor.shape] != shape or not tensor.isfinite().all():
                    raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}")
                if name == growth and not ((tensor >= 0) & (tensor < len(self.classes))).all():
                    raise ValueError(f"{name} has numbers of no class")

    def bytes_per_task(self) -> list[int]:
        """Return how many bytes each task added to the state, as `state_fields` declares."""
        counts = [len(task) for task in self.tasks]
        totals = [0] * len(counts)
        for name, growth in self.state_fields.items() if counts else ():
            for t, size in enumerate(self._field_bytes(name, growth, counts)):
                totals[t] += size
        return totals

    def _field_bytes(self, name: str, growth: str, counts: list[int]) -> list[int]:
        value = getattr(self, name)
        if growth == "per task" and isinstance(value, nn.ModuleList):
            return [sum(p.nbytes for p in module.parameters()) for module in value]
        total = sum(tensor.nbytes for tensor in self._field_tensors(name).values())
        if growth == "once":
            return [total]
        if growth == "per task":
            return [total // len(counts)] * len(counts)
        if growth == "per class":
            return [total // sum(counts) * count for count in counts]
        owners: Tensor = getattr(self, growth)
        rows = owners.bincount(minlength=sum(counts)).split(counts)
        return [total // len(owners) * int(part.sum()) for part in rows]

    def paper_bytes(self) -> dict[str, float]:
        """Return the memory as the method's paper defines it, by the metric's name; {} if that is `bytes_per_task`."""
        return {}

    def trained_parameters(self) -> int:
        """Return how many parameters were trained, over all tasks."""
        return 0

    @classmethod
    def require_repeated_classes(cls) -> None:
        """Raise SettingsError (code "no-repeated-classes") unless known classes may come again."""
        if not cls.supports_repeated_classes:
            message = (
                f"method {cls.name} cannot learn more images of a known class, which blurry task boundaries and domains "
                "need; choose another method or stream"
            )
            raise SettingsError(message, code="no-repeated-classes", method=cls.name)

    def require_knowledge(self) -> None:
        """Raise LearnerError (code "nothing-learned") unless something was learned; `predict` does."""
        if not self.classes:
            message = f"method {self.name} has learned nothing yet; learn a task first"
            raise LearnerError(message, code="nothing-learned")


METHODS: dict[str, type[Method]] = {}

M = TypeVar("M", bound=type[Method])


def register_method(name: str) -> Callable[[M], M]:
    """Register a method under a name: `@register_method("name")` above its class.

    Args:
        name: What `--method` takes.

    Returns:
        A decorator that returns the class unchanged but for its `name`.

    Raises:
        SettingsError: Another class has the name (code "duplicate-method").
    """

    def register(method: M) -> M:
        namesake = METHODS.get(name)
        identity = (method.__module__, method.__qualname__)  # a module or notebook cell may run twice
        if namesake is not None and (namesake.__module__, namesake.__qualname__) != identity:
            message = f"method '{name}' is registered already, by {namesake.__module__}; choose another name"
            raise SettingsError(message, code="duplicate-method", name=name)
        method.name = name
        METHODS[name] = method
        return method

    return register


def unregister_method(name: str) -> None:
    """Remove a method from the registry."""
    del METHODS[name]
