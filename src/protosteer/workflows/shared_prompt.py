"""A shared prompt in a small file: it serves all classes that are learned with it and its backbone.

The prompt was trained before any of these classes came, so that it belongs to none of them: tasks that are
independent stay so, and merging models of the same shared prompt and forgetting in them stay exact.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import protosteer
from protosteer.backbones import Backbone
from protosteer.errors import LearnerError, ModelFileError, ProtosteerError, SettingsError
from protosteer.learner import Learner
from protosteer.model import schema
from protosteer.model.file import ADAPTED, Model, backbone_header
from protosteer.model.memory import Memory
from protosteer.model.validation import check_prompt
from protosteer.rules import RULES
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.settings import Settings
from protosteer.util.files import read_regular, real, write_atomically
from protosteer.util.tensor_file import pack_tensors, unpack_tensors
from protosteer.workflows.folder_scan import FolderScan
from protosteer.workflows.model_summary import describe_prompt

FORMAT = 1


@dataclass(frozen=True, eq=False)
class Adapted:
    """Contents of the file, without the backbone's weights."""

    path: Path
    backbone: dict[str, Any]
    settings: Settings
    classes: list[str]  # that the prompt was trained with
    images: int
    prompt: Tensor  # [S, L, D]

    @property
    def fingerprint(self) -> str:
        """A sha256 over the backbone's fingerprint and the prompt."""
        digest = hashlib.sha256(self.backbone["fingerprint"].encode())
        digest.update(self.prompt.contiguous().numpy().tobytes())
        return digest.hexdigest()

    @property
    def model(self) -> Model:
        """A model that knows nothing yet, which finds and checks the backbone."""
        return Model(self.path, self.backbone, self.settings, Memory())

    def prompt_for(self, backbone: Backbone) -> Tensor:
        """Return the prompt for `Learner(backbone, shared_prompt=...)`; raise if it belongs to another backbone."""
        self.model.backbone_for(backbone)
        return self.prompt

    def check_used(self, learner: Learner) -> None:
        """Raise if the learner's next task would not use this prompt."""
        self.prompt_for(learner.backbone)
        if not RULES[learner.settings.rule].uses_shared_prompt:
            raise SettingsError(
                f"{self.path} is a shared prompt, which rule = '{learner.settings.rule}' does not use; choose "
                "another preset, or leave it out",
                code="rule-without-shared-prompt",
            )
        if learner.shared_prompt is None or not torch.equal(learner.shared_prompt, self.prompt):
            raise LearnerError(
                f"the model has classes already that were learned without {self.path}; begin a new model with it, "
                "or leave it out",
                code="learned-without-shared-prompt",
            )

    def describe(self) -> dict[str, Any]:
        """Return what `protosteer inspect` shows, as plain data."""
        return {
            "path": str(self.path),
            "fingerprint": self.fingerprint,
            "backbone": {name: self.backbone[name] for name in ("name", "fingerprint", "image_size")},
            "prompt": describe_prompt(self.prompt),
            "classes": self.classes,
            "images": self.images,
        }

    def write(self, path: str | Path) -> None:
        """Write the file atomically."""
        header = {
            ADAPTED: FORMAT,
            "protosteer": protosteer.__version__,
            "backbone": self.backbone,
            "settings": self.settings.to_dict(),
            "classes": self.classes,
            "images": self.images,
            "fingerprint": self.fingerprint,
        }
        write_atomically(real(Path(path)), pack_tensors(header, {"prompt": self.prompt}))


def adapt(
    backbone: Backbone,
    scan: FolderScan,
    settings: Settings | None = None,
    on_stage: OnStage | None = None,
    checkpoint: CheckpointFile | None = None,
) -> Adapted:
    """Train one prompt with all classes of a scanned folder, as a first task trains its own."""
    learner = Learner(backbone, settings)
    classes = sorted(scan.counts)
    if not learner.settings.prompts:
        raise SettingsError(
            "prompts = False: a prompt is all that is trained here; leave the setting out", code="prompts-off"
        )
    if not learner.trains_prompt(classes):
        message = f"{scan.folder} has one class and nothing to tell it from; add other classes"
        raise LearnerError(message, code="one-class", path=scan.folder)
    images = scan.images(scan.files, backbone.preprocessing)
    record = learner.learn((images, scan.files.labels), "adapting", on_stage, checkpoint)
    assert record.prompt is not None
    about = Path("a shared prompt"), backbone_header(backbone), learner.settings
    return Adapted(*about, classes, len(images), record.prompt)


def is_adapted(path: Path) -> bool:
    """Return whether a file is an intact shared prompt."""
    try:
        return ADAPTED in unpack_tensors(read_regular(path), str(path))[0]
    except (OSError, ModelFileError):
        return False


def read(path: str | Path) -> Adapted:
    """Read and check the file of a shared prompt."""
    path = Path(path)
    try:
        header, tensors = unpack_tensors(read_regular(path), str(path))
    except OSError as error:
        message = f"there is no shared prompt {path} ({error.strerror}); check the path"
        raise ModelFileError(message, code="no-adapted-backbone", path=path) from error
    if header.get(ADAPTED) != FORMAT:
        message = f"{path} is not a shared prompt that this version knows; create one with protosteer adapt"
        raise ModelFileError(message, code="not-adapted-backbone", path=path)
    try:
        schema.check(header, schema.ADAPTED, "the header's")
        backbone, prompt, settings = (header["backbone"], tensors["prompt"], Settings.from_file(header["settings"]))
        check_prompt(prompt, backbone.get("dim"), backbone.get("depth"), "the prompt")
        adapted = Adapted(path, backbone, settings, header["classes"], header["images"], prompt)
        if adapted.fingerprint != header["fingerprint"]:
            raise TypeError("its fingerprint is another's")
        return adapted
    except (KeyError, TypeError, ProtosteerError) as error:
        message = f"{path} is not a valid shared prompt ({error}); use another copy"
        raise ModelFileError(message, code="invalid-model", path=path) from error
