"""A learner on its way to another process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from protosteer.learner import Learner
from protosteer.model.file import Model
from protosteer.runtime.device import choose_device


@dataclass(frozen=True)
class Carried:
    """All but the backbone's weights, which are looked for where it arrives."""

    model: Model
    domain: Tensor | None
    device: str  # as `choose_device` takes it

    @classmethod
    def of(cls, learner: Learner, device: str) -> Carried:
        return cls(learner.model, learner.domain, device)

    def learner(self) -> Learner:
        """Complains in one line if the weights are not there, or not the same."""
        backbone = self.model.backbone_for(self.model.load_backbone(device=choose_device(self.device)))
        learner = Learner(backbone, self.model.settings, self.domain)
        learner.memory = self.model.memory
        return learner


def model_digest(learner: Learner) -> str:
    """The same for learners that predict the same, wherever their files and weights lie."""
    backbone = learner.backbone
    about = {"fingerprint": backbone.fingerprint, "preprocessing": backbone.preprocessing.to_dict()}
    return hashlib.sha256(Model(Path(), about, learner.settings, learner.memory).pack()).hexdigest()
