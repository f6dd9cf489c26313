"""The `.protosteer` file: one safetensors file whose header describes backbone, settings and tasks.

There is no pickle in it, so that a file from someone else cannot run anything. A checksum over header and
tensors finds altered files; writing goes to a temporary name that is synced and then renamed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

import protosteer
from protosteer.backbones import Backbone, find_weights
from protosteer.errors import ModelFileError, ProtosteerError, WeightsError
from protosteer.files import write_atomically
from protosteer.memory import ClassRecord, Memory, TaskRecord
from protosteer.prototypes import Centroids
from protosteer.settings import Settings

FORMAT = 1
_KEY = "protosteer"


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
                given = self._load_backbone()
            except WeightsError as error:
                raise ModelFileError(
                    f"{self.path} needs backbone '{about['name']}', which cannot be loaded ({error}); "
                    "load it yourself and pass it as backbone="
                ) from error
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
        return given

    def _load_backbone(self) -> Backbone:
        """By name, from where the weights were when the model was written if they still are there."""
        about, hint = self.backbone, self.backbone.get("weights")
        same = about["preprocessing"]
        return Backbone.load(
            about["name"],
            weights=hint if hint and Path(hint).is_file() else None,
            image_size=about["image_size"],
            mean=same["mean"],
            std=same["std"],
            crop=same["crop"],
            heads=about["heads"],
        )


def write(path: Path, backbone: Backbone, settings: Settings, memory: Memory) -> None:
    """Write the model so that `path` holds either the old file or the whole new one, never a part."""
    write_atomically(path, pack(backbone, settings, memory))


def pack(backbone: Backbone, settings: Settings, memory: Memory) -> bytes:
    """The contents of a model file; equal models give equal bytes."""
    tensors: dict[str, Tensor] = {}
    tasks = []
    for t, task in enumerate(memory.tasks):
        tensors |= {f"tasks.{t}.{name}": tensor.contiguous() for name, tensor in task.tensors()}
        tasks.append(
            {
                "name": task.name,
                "classes": task.class_names,
                "prompt": task.prompt is not None,
                "independent": task.independent,
                "about": task.about,
            }
        )
    header = {
        "format": FORMAT,
        "protosteer": protosteer.__version__,
        "backbone": {**backbone.describe(), "weights": _hint(backbone)},
        "settings": settings.to_dict(),
        "tasks": tasks,
    }
    # One metadata entry only: safetensors writes several in no fixed order, and equal models give equal files.
    sealed = json.dumps({"header": header, "sha256": _checksum(header, tensors)}, sort_keys=True)
    return save(tensors, metadata={_KEY: sealed})


def read(path: Path) -> Model:
    """Read and check a model file."""
    if not path.is_file():
        raise ModelFileError(f"there is no model file {path}; check the path")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror})") from error
    return unpack(data, path)


def unpack(data: bytes, path: Path) -> Model:
    """Check the contents of a model file; `path` is what messages call it."""
    header, tensors = _parts(data, path)
    try:
        memory = Memory(_task(t, task, tensors) for t, task in enumerate(header["tasks"]))
        return Model(path, header["backbone"], Settings.from_dict(header["settings"]), memory)
    except (KeyError, TypeError, ProtosteerError) as error:
        raise ModelFileError(
            f"{path} has an inconsistent header ({error}); it was not written by protosteer"
        ) from error


def _parts(data: bytes, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    except (SafetensorError, ValueError) as error:
        raise ModelFileError(
            f"{path} is truncated or not a model file ({error}); use another copy"
        ) from error
    if _KEY not in metadata:
        raise ModelFileError(
            f"{path} is a safetensors file but not a protosteer model; teach one with learn()"
        )
    try:
        sealed = json.loads(metadata[_KEY])
        header: dict[str, Any] = sealed["header"]
        intact = sealed["sha256"] == _checksum(header, tensors)
    except (json.JSONDecodeError, KeyError, TypeError):
        intact = False
    if not intact:
        raise ModelFileError(f"{path} was altered or damaged after it was written; use another copy")
    if header.get("format") != FORMAT:
        raise ModelFileError(
            f"{path} has format {header.get('format')}, this version reads {FORMAT}; use protosteer "
            f"{header.get('protosteer')}"
        )
    return header, tensors


def _task(t: int, header: dict[str, Any], tensors: dict[str, Tensor]) -> TaskRecord:
    def centroids(prefix: str) -> Centroids:
        return Centroids(*(tensors[f"{prefix}.{part}"] for part in ("means", "deviations", "counts")))

    classes = []
    for i, name in enumerate(header["classes"]):
        prefix = f"tasks.{t}.classes.{i}"
        classes.append(ClassRecord(name, tensors[f"{prefix}.keys"], centroids(f"{prefix}.values")))
    prompt = tensors[f"tasks.{t}.prompt"] if header["prompt"] else None
    return TaskRecord(header["name"], tuple(classes), prompt, header["independent"], header["about"])


def _checksum(header: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def _hint(backbone: Backbone) -> str | None:
    """Where to look for the weights again; a short name finds its own."""
    if backbone.source is None or find_weights(backbone.name) == backbone.source:
        return None
    return str(backbone.source.resolve())
