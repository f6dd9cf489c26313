"""Descriptions of methods for `protosteer methods`: source, what is stored and trained, settings."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from protosteer.backbones import Backbone
from protosteer.data.images import ArrayImages
from protosteer.errors import ProtosteerError
from protosteer.methods import Method, Source
from protosteer.methods.training_utils import TrainingSettings
from protosteer.settings import Values
from protosteer.streams.base import TrainingTask, training_view
from protosteer.util.text import counted

CLASSES, IMAGES = 10, 2  # classes of the task on which parameters are counted, and images of each
COMMON = (
    "As for every method of the common training loop, and whatever its source does: images are augmented as the setting "
    "`augmentation` says, gradients are clipped at `gradient_clip`, and a rate that falls along a cosine falls at every step."
)


@dataclass(frozen=True)
class MethodInfo:
    """A description of one method.

    Attributes:
        name: The name.
        source: The publication.
        rehearsal: Images of earlier tasks that are stored, in words.
        features: Feature vectors of single images that are stored, in words. Means of many images do not count.
        trains: What is trained, in words.
        supports_repeated_classes: Whether tasks may bring more images of known classes.
        about: The docstring of its module, and what is common to all that train alike.
        settings: The default settings.
        choices: The choices of settings that have some.
        published: Published settings by benchmark, as far as they differ from the defaults.
        published_source: Where they are published.
        grid: What tuning tries.
    """

    name: str
    source: Source
    rehearsal: str
    features: str
    trains: str
    supports_repeated_classes: bool
    about: str
    settings: Mapping[str, Any]
    choices: Mapping[str, Sequence[str]]
    published: Mapping[str, Mapping[str, Any]]
    published_source: str
    grid: Mapping[str, Sequence[Any]]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return asdict(self)


def describe(method: type[Method]) -> MethodInfo:
    """Describe a method."""
    settings, doc = default_settings(method), sys.modules[method.__module__].__doc__ or ""
    return MethodInfo(
        name=method.name,
        source=method.source,
        rehearsal=_rehearsal(method, settings),
        features=method.stored_features,
        trains=method.trains,
        supports_repeated_classes=method.supports_repeated_classes,
        about="\n\n".join(filter(None, [inspect.cleandoc(doc), COMMON * isinstance(settings, TrainingSettings)])),
        settings={name: value for name, value in settings.to_dict().items() if name != "seed"},
        choices={name: list(b["choices"]) for name, b in settings.bounds().items() if "choices" in b},
        published={stream: dict(values) for stream, values in method.published.items()},
        published_source=method.published_source,
        grid={name: list(values) for name, values in method.grid.items()},
    )


def default_settings(method: type[Method]) -> Values:
    """Return the settings of a run that sets none."""
    settings: Values = method.settings_from(method.preset(None))
    return settings


def _rehearsal(method: type[Method], settings: Values) -> str:
    size = getattr(settings, "buffer_size", None)
    if not method.uses_rehearsal:
        return "no"
    return "all images" if size is None else counted(size, "image")


def first_task_parameters(method: type[Method], backbone: Backbone) -> int | None:
    """Count the parameters that a method trains for a first task of ten classes.

    The count depends on shapes only, so one epoch on noise suffices. None: the method cannot learn such a task.
    """
    settings = default_settings(method)
    epochs = {name: min(value, 1) for name, value in settings.to_dict().items() if name.endswith("epochs")}
    names = [f"class {i}" for i in range(CLASSES)]
    labels = [name for name in names for _ in range(IMAGES)]
    size = backbone.image_size
    noise = torch.randint(256, (len(labels), 3, size, size), generator=torch.Generator().manual_seed(0))
    images = ArrayImages(noise.to(torch.uint8))
    made = method(backbone, settings.replace(**epochs))
    with warnings.catch_warnings(), training_view(TrainingTask("first", names, images, labels)) as task:
        warnings.simplefilter("ignore")  # about learning from noise
        try:
            made.learn(task)
        except ProtosteerError:
            return None
    return made.trained_parameters()
