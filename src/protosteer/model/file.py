"""The `.protosteer` file: a sealed file (util/tensor_file.py) whose header describes backbone, settings and tasks.

Writing goes to a temporary name that is synced and then renamed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import protosteer
from protosteer.backbones import Backbone, find_weights, full_name
from protosteer.errors import (
    FingerprintMismatchError,
    LearnerError,
    ModelFileError,
    ProtosteerError,
    WeightsError,
)
from protosteer.evidence.prototype_summary import ClassSummary
from protosteer.model import thumbnails
from protosteer.model.class_table import Slices, Stack
from protosteer.model.memory import Memory
from protosteer.model.merging import Renames, concatenate
from protosteer.model.records import ClassRecord, TaskMetadata, TaskRecord
from protosteer.model.schema import check_model_header
from protosteer.model.validation import check_memory, check_packed, check_sketch, check_stack
from protosteer.paper.prototypes import Centroids
from protosteer.settings import Settings
from protosteer.util.files import read_regular, real, write_atomically
from protosteer.util.tensor_file import pack_tensors, unpack_tensors
from protosteer.util.text import check_name

FORMAT = 3  # 1: without sketches; 2: class by class; both still read, and still written where classes are few
MANY = 1_000  # classes from which on they are kept together: a hundred thousand apart take minutes to read
EARLY_EXACT = 5  # single images of a class of many, in files from before prototypes had eight bits
ADAPTED = (
    "adapted"  # what a header has instead of "format" where the file is no model: workflows/shared_prompt.py
)


@dataclass(frozen=True)
class Model:
    """Contents of a model file; the backbone's weights are not among them."""

    path: Path
    backbone: dict[str, Any]
    settings: Settings
    memory: Memory

    def backbone_for(self, given: Backbone | None) -> Backbone:
        """The backbone that the model was learned with: `given`, or else loaded by its name."""
        about = self.backbone
        if given is None:
            try:
                given = self.load_backbone()
            except WeightsError as error:
                raise ModelFileError(
                    f"{self.path} needs backbone '{about['name']}', which cannot be loaded ({error}); "
                    "load it yourself and pass it as backbone="
                ) from error
        self._refuse_other(given)
        return given

    def _refuse_other(self, given: Backbone) -> None:
        about = self.backbone
        if given.fingerprint != about["fingerprint"]:
            raise ModelFileError(
                f"{self.path} was learned with backbone '{about['name']}' ({about['fingerprint'][:12]}), not with "
                f"'{given.name}' ({given.fingerprint[:12]}); predictions would be meaningless"
            )
        if given.preprocessing.to_dict() != about["preprocessing"]:
            raise ModelFileError(
                f"{self.path} was learned with preprocessing {about['preprocessing']}, the backbone given has "
                f"{given.preprocessing.to_dict()}; load the backbone with the same mean, std and crop"
            )
        try:
            check_memory(self.memory, given.dim, given.depth)
        except TypeError as error:
            raise ModelFileError(
                f"{self.path} does not fit its backbone ({error}); it was not written by protosteer"
            ) from error

    def write(self, path: str | Path) -> None:
        """Write the model so that `path` holds either the old file or the whole new one, never a part.

        A link stays one: it is the file behind it that changes, so that nothing forgotten is left there.
        """
        place = real(Path(path))
        write_atomically(place, self.pack())
        # Earlier versions kept digests of class names there; what is forgotten must not stay behind.
        place.with_name(f"{place.name}.index").unlink(missing_ok=True)
        thumbnails.follow(path, self.memory)

    def pack(self) -> bytes:
        """The contents of a model file; equal models give equal bytes."""
        memory, domains = self.memory, list[Tensor]()
        tasks = [_about_task(task, domains) for task in memory.tasks]
        stack = Stack.of(memory.tasks) if len(memory.classes) >= MANY else None
        if stack is not None:
            tensors = {f"classes.{name}": tensor for name, tensor in stack.tensors.items()}
            tensors |= {f"starts.{name}": tensor for name, tensor in stack.starts.items()}
            prompts = {f"tasks.{t}.prompt": task.prompt for t, task in enumerate(memory.tasks)}
            tensors |= {name: prompt for name, prompt in prompts.items() if prompt is not None}
            version = FORMAT
        else:
            own = ((f"tasks.{t}.", task.tensors()) for t, task in enumerate(memory.tasks))
            tensors = {prefix + name: tensor for prefix, parts in own for name, tensor in parts}
            version = 2 if any(record.plain for record in memory.records) else 1
        tensors |= {f"domains.{i}": prompt for i, prompt in enumerate(domains)}
        header = {
            "format": version,
            "protosteer": protosteer.__version__,
            "backbone": self.backbone,
            "settings": self.settings.to_dict(),
            "tasks": tasks,
        }
        return pack_tensors(header, tensors)

    def load_backbone(
        self, name: str | None = None, weights: Path | None = None, device: str | torch.device = "cpu"
    ) -> Backbone:
        """The model's backbone with its preprocessing, from where its weights were unless told otherwise.

        Weights that are not the model's are refused before anything is made of them in the size that it names.
        """
        about = self.backbone
        hint = about.get("weights") if name is None or full_name(name) == about["name"] else None
        same = about["preprocessing"]
        if weights is None and hint and os.path.isfile(hint):  # any text
            weights = Path(hint)
        try:
            return Backbone.load(
                name or about["name"],
                weights=weights,
                image_size=about["image_size"],
                mean=same["mean"],
                std=same["std"],
                crop=same["crop"],
                heads=about["heads"],
                device=device,
                fingerprint=about["fingerprint"],
            )
        except FingerprintMismatchError as error:
            raise ModelFileError(
                f"{self.path} was learned with backbone '{about['name']}' ({about['fingerprint'][:12]}), and "
                f"{error}; predictions would be meaningless"
            ) from error


def _about_task(task: TaskRecord, domains: list[Tensor]) -> dict[str, Any]:
    """What a header has of a task. domains: the prompts for all classes so far; a new one is added."""
    return {
        "name": task.name,
        "classes": task.class_names,
        "prompt": task.prompt is not None,
        "independent": task.independent,
        **({"few_shot": True} if task.few_shot else {}),
        **({} if task.shared_prompt is None else {"domain": _place(domains, task.shared_prompt)}),
        **({} if task.corrected_from is None else {"corrected": task.corrected_from}),
        "about": task.metadata.to_dict(),
    }


def _place(prompts: list[Tensor], prompt: Tensor) -> int:
    """Where an equal one stands in the list; at its end, if there is none."""
    for i, other in enumerate(prompts):
        if torch.equal(other, prompt):
            return i
    prompts.append(prompt)
    return len(prompts) - 1


def backbone_header(backbone: Backbone) -> dict[str, Any]:
    """All that a model file says of its backbone."""
    return {**backbone.describe(), "weights": _hint(backbone)}


def merge(
    models: Sequence[Model], renames: Renames | None = None, task_renames: Renames | None = None
) -> Model:
    """One model with the tasks of all, in the order given; no backbone is needed. See `method.merging`."""
    if not models:
        raise ModelFileError("merge needs at least one model")
    first = models[0]
    for kind, new in [("class", renames), ("task", task_renames)]:
        for old, name in (new or {}).items():
            check_name(name, f"what {kind} '{old}' is to be called,")
    for other in models[1:]:
        _check_alike(first, other)
    memory = concatenate([model.memory for model in models], renames, task_renames)
    return dataclasses.replace(first, memory=memory)


def _check_alike(first: Model, other: Model) -> None:
    mine, theirs = first.backbone, other.backbone
    if mine["fingerprint"] != theirs["fingerprint"]:
        raise LearnerError(
            f"learners have different backbones: {mine['name']} ({mine['fingerprint'][:12]}) "
            f"and {theirs['name']} ({theirs['fingerprint'][:12]}); only equal ones can be merged"
        )
    if mine["preprocessing"] != theirs["preprocessing"]:
        raise LearnerError(
            f"learners see images differently: preprocessing is {mine['preprocessing']} and "
            f"{theirs['preprocessing']}; teach one of them again with that of the other"
        )
    for setting in ("rule", "neighbours", "temperature"):
        here, there = getattr(first.settings, setting), getattr(other.settings, setting)
        if here != there:
            raise LearnerError(
                f"learners predict differently: {setting} is {here} and {there}; make them equal"
            )


def read(path: str | Path) -> Model:
    """Read and check a model file."""
    path = Path(path)
    try:
        data = read_regular(path)
    except OSError as error:
        if not os.path.exists(path):
            raise ModelFileError(f"there is no model file {path}; check the path") from error
        raise ModelFileError(f"{path} cannot be read ({error.strerror})") from error
    return unpack(data, path)


def unpack(data: bytes, path: Path) -> Model:
    """Check the contents of a model file; `path` is what messages call it."""
    header, tensors = unpack_tensors(data, str(path))
    if ADAPTED in header:
        raise ModelFileError(f"{path} is an adapted backbone, not a model; learn a model with it first")
    if header.get("format") not in (1, 2, FORMAT):
        raise ModelFileError(
            f"{path} has format {reprlib.repr(header.get('format'))}, this version reads up to {FORMAT}; use the "
            f"protosteer that wrote it, {reprlib.repr(header.get('protosteer'))}"
        )
    try:
        check_model_header(header)
        about = header["backbone"]
        read_classes = _together(header, tensors) if header["format"] == FORMAT else _apart(header, tensors)
        memory = Memory(
            map(functools.partial(_task, tensors), header["tasks"], itertools.count(), read_classes)
        )
        check_memory(memory, about.get("dim"), about.get("depth"))
        return Model(path, about, Settings.from_file(header["settings"]), memory)
    except (KeyError, TypeError, ProtosteerError) as error:
        raise ModelFileError(
            f"{path} has an inconsistent header ({error}); it was not written by protosteer"
        ) from error


def _task(
    tensors: dict[str, Tensor], header: dict[str, Any], t: int, classes: Sequence[ClassRecord]
) -> TaskRecord:
    prompt = tensors[f"tasks.{t}.prompt"] if header["prompt"] else None
    common = tensors[f"domains.{header['domain']}"] if "domain" in header else None
    about, few_shot = TaskMetadata.from_dict(header["about"]), header.get("few_shot", False)
    corrected = header.get("corrected")
    return TaskRecord(
        header["name"], classes, prompt, header["independent"], about, few_shot, common, corrected
    )


def _together(header: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[Sequence[ClassRecord]]:
    """The classes of each task, from a file that has all classes one after the other."""
    names = [name for task in header["tasks"] for name in task["classes"]]

    def under(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    classes, starts = under("classes."), under("starts.")
    if "seen" not in starts:  # the first files of format 3 have no digests of images
        classes["seen"] = torch.empty(0, dtype=torch.int64)
        starts["seen"] = torch.zeros(len(names) + 1, dtype=torch.int64)
    stack = Stack(names, classes, starts)
    check_stack(stack, header["backbone"].get("dim"))
    ends = itertools.accumulate(len(task["classes"]) for task in header["tasks"])
    first = 0
    for last in ends:
        yield Slices(stack, first, last)
        first = last


def _apart(header: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[Sequence[ClassRecord]]:
    """The same, from a file that has each class by itself."""

    def whole(name: str) -> Tensor:
        tensor = tensors[name]
        return tensor.float() if tensor.dtype == torch.float16 else tensor

    def sketch(prefix: str) -> ClassSummary | None:
        if f"{prefix}.points" not in tensors:
            return None
        names = ("points", "steps", "counts", "deviations")
        parts = {p: tensors[f"{prefix}.{p}"] for p in names if f"{prefix}.{p}" in tensors}
        check_packed(parts, prefix)
        return ClassSummary.unpacked(parts)

    def record(prefix: str, name: str) -> ClassRecord:
        values = Centroids(*(whole(f"{prefix}.values.{part}") for part in ("means", "deviations", "counts")))
        plain, domain = sketch(f"{prefix}.plain"), sketch(f"{prefix}.domain")
        if plain and domain and tensors[f"{prefix}.plain.points"].dtype == torch.float16:
            plain, domain = _early(plain, domain, name)
        keys = plain.points if plain else tensors[f"{prefix}.keys"]
        held_out, seen = (tensors.get(f"{prefix}.{part}") for part in ("held_out", "seen"))
        return ClassRecord(name, keys, values, held_out, plain, domain, seen)

    for t, task in enumerate(header["tasks"]):
        yield tuple(record(f"tasks.{t}.classes.{i}", name) for i, name in enumerate(task["classes"]))


def _early(plain: ClassSummary, shared: ClassSummary, name: str) -> Iterator[ClassSummary]:
    """Read the prototypes of class `name` from a file written before they had eight bits.

    Such files keep `EARLY_EXACT` images of a large class, the same in both spaces, and then groups. Where groups of one
    image follow in one space, they would be taken for images that the other space lacks: they move to the end.
    """
    check_sketch(plain, name, None)
    check_sketch(shared, name, None)
    differ = plain.num_exact != shared.num_exact
    for summary in (plain, shared):
        groups = summary.counts[EARLY_EXACT:].argsort(descending=True, stable=True) + EARLY_EXACT
        rows = torch.cat([torch.arange(len(summary.counts))[:EARLY_EXACT], groups])
        yield (
            ClassSummary(summary.points[rows], summary.counts[rows], summary.deviations)
            if differ
            else summary
        )


def _hint(backbone: Backbone) -> str | None:
    """Where to look for the weights again; a short name finds its own."""
    if backbone.source is None or find_weights(backbone.name) == backbone.source:
        return None
    return str(backbone.source.resolve())
