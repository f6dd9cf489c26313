"""A picklable description of a learner, for other processes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from protosteer.learner import Learner
from protosteer.model.file import Model
from protosteer.runtime.device import choose_device


@dataclass(frozen=True)
class LearnerSpec:
    """A learner without the backbone's weights, which every process loads by name."""

    model: Model
    shared_prompt: Tensor | None
    device: str  # as for `choose_device`
    precision: str  # the same in every process, whatever its hardware

    @classmethod
    def of(cls, learner: Learner, device: str) -> LearnerSpec:
        """Describe a learner that is to run on a device."""
        return cls(learner.model, learner.shared_prompt, device, learner.backbone.precision)

    def learner(self) -> Learner:
        """Load the backbone and return the learner.

        Raises:
            ProtosteerError: The weights are missing, or are others.
        """
        weights = self.model.load_backbone(device=choose_device(self.device), precision=self.precision)
        backbone = self.model.backbone_for(weights)
        learner = Learner(backbone, self.model.settings, self.shared_prompt)
        learner.memory = self.model.memory
        return learner


def model_digest(learner: Learner) -> str:
    """Return a sha256 that is equal for learners with equal predictions, wherever their files are."""
    backbone = learner.backbone
    names = ("fingerprint", "preprocessing", "precision")
    about = {name: value for name, value in backbone.describe().items() if name in names}
    return hashlib.sha256(Model(Path(), about, learner.settings, learner.memory).pack()).hexdigest()
