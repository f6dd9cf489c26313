"""protosteer: teach a frozen Vision Transformer new image classes, task after task, without old images."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Where each public name lives. They are imported when first used, so that `import protosteer` and
# `protosteer --help` do not wait for torch.
_HOMES = {
    "Backbone": "protosteer.backbones",
    "Learner": "protosteer.learner",
    "Prediction": "protosteer.method.prediction",
    "ProtosteerError": "protosteer.errors",
    "ProtosteerWarning": "protosteer.errors",
    "Settings": "protosteer.settings",
    "choose_backbone": "protosteer.photos.choosing",
    "merge": "protosteer.learner",
    "rejection": "protosteer.photos.rejection",  # a module
    "survey": "protosteer.photos.teaching",
    "teach": "protosteer.photos.teaching",
}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from protosteer.backbones import Backbone as Backbone
    from protosteer.errors import ProtosteerError as ProtosteerError
    from protosteer.errors import ProtosteerWarning as ProtosteerWarning
    from protosteer.learner import Learner as Learner
    from protosteer.learner import merge as merge
    from protosteer.method.prediction import Prediction as Prediction
    from protosteer.photos import rejection as rejection
    from protosteer.photos.choosing import choose_backbone as choose_backbone
    from protosteer.photos.teaching import survey as survey
    from protosteer.photos.teaching import teach as teach
    from protosteer.settings import Settings as Settings


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'protosteer' has no attribute '{name}'")
    home = importlib.import_module(_HOMES[name])
    return home if _HOMES[name].endswith(f".{name}") else getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
