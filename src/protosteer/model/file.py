"""The `.protosteer` file: checksummed tensors (util/tensor_file.py) under a header of backbone, settings and tasks.

docs/reference/model-file.md describes the format. A file is written under a temporary name, synced and then renamed.
"""

from __future__ import annotations

import dataclasses
import os
import reprlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import protosteer
from protosteer.backbones import Backbone, find_weights, full_name
from protosteer.backbones.precision import AUTO_PRECISION
from protosteer.errors import (
    FingerprintMismatchError,
    LearnerError,
    ModelFileError,
    ProtosteerError,
    ProtosteerWarning,
    WeightsError,
)
from protosteer.model import legacy, thumbnails
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.model.merging import Renames, concatenate
from protosteer.model.records import TaskMetadata, TaskRecord
from protosteer.model.schema import MODEL, check
from protosteer.model.validation import check_columns, check_fits, check_memory
from protosteer.settings import Settings
from protosteer.util.files import read_regular, real, write_atomically
from protosteer.util.tensor_file import pack_tensors, unpack_tensors
from protosteer.util.text import check_name

FORMAT = 5  # see `legacy` for earlier ones, which are still read
ADAPTED = "adapted"  # stands for "format" in the header of a shared prompt: workflows/shared_prompt.py


@dataclass(frozen=True)
class Model:
    """Contents of a model file, without the backbone's weights."""

    path: Path  # where it was read; what messages call it
    backbone: dict[str, Any]  # see `backbone_header`
    settings: Settings
    memory: Memory

    def backbone_for(self, backbone: Backbone | None) -> Backbone:
        """Return the backbone that the model was learned with: the one passed, or else loaded by its name."""
        header = self.backbone
        if backbone is None:
            try:
                backbone = self.load_backbone()
            except WeightsError as error:
                raise self._error(
                    "backbone-not-found",
                    f"needs backbone '{header['name']}', which cannot be loaded ({error}); load it yourself and pass "
                    "it as backbone=",
                ) from error
        self._check_backbone(backbone)
        return backbone

    def _check_backbone(self, backbone: Backbone) -> None:
        header = self.backbone
        if backbone.fingerprint != header["fingerprint"]:
            raise self._error(
                "other-backbone",
                f"was learned with backbone '{header['name']}' ({header['fingerprint'][:12]}), not with "
                f"'{backbone.name}' ({backbone.fingerprint[:12]}); a model keeps its backbone: pass that one, or none",
            )
        if backbone.preprocessing.to_dict() != header["preprocessing"]:
            raise self._error(
                "other-preprocessing",
                f"was learned with preprocessing {header['preprocessing']}, the backbone given has "
                f"{backbone.preprocessing.to_dict()}; load the backbone with the same mean, std and crop",
            )
        try:
            check_fits(self.memory, backbone.dim, backbone.depth)
        except TypeError as error:
            raise self._error("other-backbone", f"does not fit its backbone ({error}); use another copy") from error

    def write(self, path: str | Path) -> None:
        """Write the model, so that `path` holds either the old file or the whole new one.

        A link stays a link: the file behind it changes. To change a file that others may change too, use
        `transaction`.
        """
        place = real(Path(path))
        write_atomically(place, self.pack())
        # The model is written: a side file that cannot be updated is removed, which needs no space.
        with _expendable(thumbnails.beside(place)):
            thumbnails.follow(place, self.memory)
        index = place.with_name(f"{place.name}.index")  # of earlier versions, with digests of class names
        if index.exists():
            with _expendable(index):
                index.unlink()

    def pack(self) -> bytes:
        """Return the contents of a model file; equal models give equal bytes."""
        table, prompts = self.memory.table, list[Tensor]()
        tasks = [_task_header(task, prompts) for task in self.memory.tasks]
        tensors = {f"classes.{name}": column for name, column in table.packed().items()}
        tensors |= {f"starts.{group}": rows for group, rows in table.starts.items()}
        tensors |= {f"domains.{i}": prompt for i, prompt in enumerate(prompts)}
        task_prompts = {f"tasks.{t}.prompt": task.prompt for t, task in enumerate(self.memory.tasks)}
        tensors |= {name: prompt for name, prompt in task_prompts.items() if prompt is not None}
        header = {
            "format": FORMAT,
            "protosteer": protosteer.__version__,
            "backbone": self.backbone,
            "settings": self.settings.to_dict(),
            "tasks": tasks,
        }
        return pack_tensors(header, tensors)

    def load_backbone(
        self,
        name: str | None = None,
        weights: Path | None = None,
        device: str | torch.device = "cpu",
        precision: str = AUTO_PRECISION,
    ) -> Backbone:
        """Load the model's backbone with its preprocessing, by default by its name and from its former path.

        Other weights are rejected before a network is built in the sizes that the file names.
        """
        header = self.backbone
        hint = header.get("weights") if name is None or full_name(name) == header["name"] else None
        if weights is None and hint and os.path.isfile(hint):  # any text
            weights = Path(hint)
        try:
            options = {key: header[key] for key in ("image_size", "heads", "fingerprint")}
            options |= {key: header["preprocessing"][key] for key in ("mean", "std", "crop")}
            return Backbone.load(name or header["name"], weights=weights, device=device, precision=precision, **options)
        except FingerprintMismatchError as error:
            raise self._error(
                "other-backbone",
                f"was learned with backbone '{header['name']}' ({header['fingerprint'][:12]}), and {error}; a model keeps "
                "its backbone: pass its own weights, or none",
            ) from error

    def _error(self, code: str, words: str) -> ModelFileError:
        return ModelFileError(f"{self.path} {words}", code=code, path=self.path, name=self.backbone["name"])


@contextmanager
def _expendable(side: Path) -> Iterator[None]:
    """Remove a side file that cannot be brought up to date, and warn."""
    try:
        yield
    except OSError as error:
        outcome = "was removed"
        try:
            side.unlink(missing_ok=True)
        except OSError:
            outcome = "may hold what was forgotten: delete it"
        message = f"{side} cannot be written ({error.strerror or error}) and {outcome}; the model itself is written"
        warnings.warn(message, ProtosteerWarning, stacklevel=2)


def _task_header(task: TaskRecord, shared_prompts: list[Tensor]) -> dict[str, Any]:
    """Return the header entry of a task; append its shared prompt to `shared_prompts` if it is new."""
    return {
        "name": task.name,
        "classes": task.class_names,
        "prompt": task.prompt is not None,
        "independent": task.independent,
        **({"few_shot": True} if task.few_shot else {}),
        **({} if task.shared_prompt is None else {"domain": _number(shared_prompts, task.shared_prompt)}),
        **({} if task.corrected_from is None else {"corrected": task.corrected_from}),
        **{flag: True for flag in ("confirmed", "compacted") if getattr(task, flag)},
        "about": task.metadata.to_dict(),
    }


def _number(prompts: list[Tensor], prompt: Tensor) -> int:
    """Return the position of an equal prompt in the list; if there is none, append it."""
    if not any(torch.equal(candidate, prompt) for candidate in prompts):
        prompts.append(prompt)
    return next(i for i, candidate in enumerate(prompts) if torch.equal(candidate, prompt))


def backbone_header(backbone: Backbone) -> dict[str, Any]:
    """Return the header entry of a backbone."""
    return {**backbone.describe(), "weights": _hint(backbone)}


def merge(models: Sequence[Model], renames: Renames | None = None, task_renames: Renames | None = None) -> Model:
    """Return one model with the tasks of all, in the order given; see `merging.concatenate`."""
    if not models:
        raise ModelFileError("merge needs at least one model", code="nothing-to-merge")
    base = models[0]
    for kind, mapping in [("class", renames), ("task", task_renames)]:
        for old, name in (mapping or {}).items():
            check_name(name, f"the new name of {kind} '{old}'")
    for model in models[1:]:
        _check_alike(base, model)
    memory = concatenate([model.memory for model in models], renames, task_renames)
    return dataclasses.replace(base, memory=memory)


def _check_alike(base: Model, model: Model) -> None:
    mine, theirs = base.backbone, model.backbone
    if mine["fingerprint"] != theirs["fingerprint"]:
        raise LearnerError(
            f"models have different backbones: {mine['name']} ({mine['fingerprint'][:12]}) "
            f"and {theirs['name']} ({theirs['fingerprint'][:12]}); only equal ones can be merged",
            code="other-backbone",
        )
    if mine["preprocessing"] != theirs["preprocessing"]:
        raise LearnerError(
            f"models have different preprocessing: {mine['preprocessing']} and "
            f"{theirs['preprocessing']}; learn one of them again with the other's",
            code="other-preprocessing",
        )
    for setting in ("rule", "neighbours", "temperature", "feature_layers"):
        ours, theirs = getattr(base.settings, setting), getattr(model.settings, setting)
        if ours != theirs:
            message = f"models predict differently: {setting} is {ours} and {theirs}; make them equal"
            raise LearnerError(message, code="other-settings", name=setting)


def read(path: str | Path) -> Model:
    """Read and check a model file of any format; raise a `ModelFileError` if it cannot be used."""
    path = Path(path)
    try:
        data = read_regular(path)
    except OSError as error:
        if not os.path.exists(path):
            raise ModelFileError(
                f"there is no model file {path}; check the path", code="missing-model", path=path
            ) from error
        raise ModelFileError(f"{path} cannot be read ({error.strerror})", code="unreadable-model", path=path) from error
    return unpack(data, path)


def unpack(data: bytes, path: Path) -> Model:
    """Check and return the contents of a model file; `path` is what messages call it."""
    header, tensors = unpack_tensors(data, str(path))
    if ADAPTED in header:
        message = f"{path} is a shared prompt, not a model; begin a new model with it"
        raise ModelFileError(message, code="adapted-backbone", path=path)
    if header.get("format") not in (*legacy.FORMATS, FORMAT):
        message = (
            f"{path} has format {reprlib.repr(header.get('format'))}, this version reads up to {FORMAT}; use the "
            f"protosteer that wrote it, {reprlib.repr(header.get('protosteer'))}"
        )
        raise ModelFileError(message, code="unknown-format", path=path, format=header.get("format"))
    try:
        check(header, MODEL, "the header's")
        if header["format"] != FORMAT:
            tensors = legacy.upgrade(header, tensors)
        memory = Memory(_tasks(header, tensors))
        check_memory(memory, header["backbone"].get("dim"), header["backbone"].get("depth"))
        return Model(path, header["backbone"], Settings.from_file(header["settings"]), memory)
    except (KeyError, TypeError, ProtosteerError) as error:
        message = f"{path} is not a valid model ({error}); use another copy"
        raise ModelFileError(message, code="invalid-model", path=path) from error


def _tasks(header: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[TaskRecord]:
    names = [name for task in header["tasks"] for name in task["classes"]]

    def with_prefix(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    columns, starts = with_prefix("classes."), with_prefix("starts.")
    check_columns(names, columns, starts, header["backbone"].get("dim"))
    table, start = ClassTable.of_columns(names, columns, starts), 0
    for t, task in enumerate(header["tasks"]):
        stop = start + len(task["classes"])
        yield TaskRecord(
            name=task["name"],
            classes=table[start:stop],
            prompt=tensors[f"tasks.{t}.prompt"] if task["prompt"] else None,
            independent=task["independent"],
            metadata=TaskMetadata.from_dict(task["about"]),
            few_shot=task.get("few_shot") or False,
            shared_prompt=None if task.get("domain") is None else tensors[f"domains.{task['domain']}"],
            corrected_from=task.get("corrected"),
            confirmed=task.get("confirmed") or False,
            compacted=task.get("compacted") or False,
        )
        start = stop


def _hint(backbone: Backbone) -> str | None:
    """Return where to look for the weights again; None if the backbone's name finds them."""
    if backbone.source is None or find_weights(backbone.name) == backbone.source:
        return None
    return str(backbone.source.resolve())
