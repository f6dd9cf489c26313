"""protosteer: teach a frozen Vision Transformer new image classes, task after task, without old images."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Where each public name lives. They are imported when first used, so that `import protosteer` and
# `protosteer --help` do not wait for torch.
_HOMES = {
    "Backbone": "protosteer.backbones",
    "Learner": "protosteer.learner",
    "Prediction": "protosteer.prediction",
    "ProtosteerError": "protosteer.errors",
    "ProtosteerWarning": "protosteer.errors",
    "Settings": "protosteer.settings",
    "choose_backbone": "protosteer.workflows.backbone_selection",
    "merge": "protosteer.learner",
    "rejection": "protosteer.workflows.ood",  # the module
    "scan_folder": "protosteer.workflows.folder_scan",
    "learn_folder": "protosteer.workflows.learn_folder",
}

# Old names to new ones. Each warns and goes with the next release.
_RENAMED = {"survey": "scan_folder", "teach": "learn_folder"}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from protosteer.backbones import Backbone as Backbone
    from protosteer.errors import ProtosteerError as ProtosteerError
    from protosteer.errors import ProtosteerWarning as ProtosteerWarning
    from protosteer.learner import Learner as Learner
    from protosteer.learner import merge as merge
    from protosteer.prediction import Prediction as Prediction
    from protosteer.settings import Settings as Settings
    from protosteer.workflows import ood
    from protosteer.workflows.backbone_selection import choose_backbone as choose_backbone
    from protosteer.workflows.folder_scan import scan_folder as scan_folder
    from protosteer.workflows.learn_folder import learn_folder as learn_folder

    rejection = ood


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        message = f"protosteer.{name} is now protosteer.{_RENAMED[name]}; the old name goes with the next release"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name not in _HOMES:
        raise AttributeError(f"module 'protosteer' has no attribute '{name}'")
    home = importlib.import_module(_HOMES[name])
    return home if name == "rejection" else getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
