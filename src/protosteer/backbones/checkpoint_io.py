"""Read weights files to tensors under timm's names, and the metadata of the files.

Three formats are read: safetensors, PyTorch's `.pth` (unpickled with tensors and plain data only) and Google's
`.npz`. None of them can run code.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from protosteer.backbones.checkpoint_guards import check_metadata, check_pickle, check_tensors, check_zip
from protosteer.backbones.flax_weights import from_flax
from protosteer.errors import WeightsError
from protosteer.util.files import open_regular, read_regular
from protosteer.util.text import printable

METADATA_KEY = "protosteer"  # JSON in the header of our own safetensors files

_CONTAINERS = ("model", "state_dict", "teacher")
_WRAPPERS = re.compile(r"^(?:module\.|backbone\.)+")
# Parts that embeddings do not need: classifiers, projection heads, the mask token of pre-training.
_DROPPED = re.compile(r"^(?:head|head_dist|dino_head|ibot_head|pre_logits)[./]|^mask_token$")
_RENAMED = {"register_tokens": "reg_token"}

Content = tuple[dict[str, Any], dict[str, Any]]  # tensors under the file's names, and its metadata


@dataclass(frozen=True)
class Checkpoint:
    """Tensors under timm's names, and the file's metadata.

    `about` may hold heads, image_size, mean, std, crop, interpolation, pool, name and licence.
    """

    path: Path
    tensors: dict[str, Tensor]
    about: dict[str, Any]


def read_checkpoint(path: Path, config: Path | None = None) -> Checkpoint:
    """Read a weights file; a hub `config` gives metadata that the file lacks. Raises `WeightsError`."""
    if not path.is_file():
        raise WeightsError(f"no weights file at {path}; check the path", code="missing-file", path=path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        message = f"{path}: unknown kind of weights file; give one of {', '.join(_READERS)}"
        raise WeightsError(message, code="unknown-format", path=path)
    try:
        tensors, metadata = reader(path)
    except WeightsError:
        raise
    except Exception as error:  # safetensors, torch and numpy raise different ones
        message = (
            f"{path}: damaged, or it holds more than weights, which could run code when read; fetch it again, or "
            f"save its state dict as safetensors ({_brief(error)})"
        )
        raise WeightsError(message, code="damaged-weights", path=path) from error
    metadata = check_metadata(path, metadata)
    if config is not None and config.is_file():
        metadata = check_metadata(config, _read_config(config)) | metadata
    return Checkpoint(path, _rename_tensors(path, tensors), metadata)


def _rename_tensors(path: Path, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return fp32 copies under timm's names, without heads; copies do not change with a mapped file."""
    values_by_name = {_WRAPPERS.sub("", name): value for name, value in tensors.items()}
    weights = {_RENAMED.get(name, name): value for name, value in values_by_name.items() if not _DROPPED.match(name)}
    check_tensors(path, weights)
    return {name: value.detach().to(torch.float32, copy=True).contiguous() for name, value in weights.items()}


def _read_safetensors(path: Path) -> Content:
    with safe_open(path, framework="pt") as file:
        metadata = json.loads((file.metadata() or {}).get(METADATA_KEY, "{}"))
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118 (not a dict)


def _read_torch(path: Path) -> Content:
    """Read a PyTorch file; a Namespace is allowed, because some authors saved their arguments with the weights."""
    check_pickle(path)
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path, map_location="cpu", weights_only=True)
    for _ in range(2):  # DINO's training files hold the teacher next to the student, at the top level
        inner = next((key for key in _CONTAINERS if isinstance(content, dict) and key in content), None)
        content = content if inner is None else content[inner]
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        message = f"{path}: no state dict at its top level or under {', '.join(_CONTAINERS)}"
        raise WeightsError(message, code="damaged-weights", path=path)
    return content, {}


def _read_npz(path: Path) -> Content:
    check_zip(path)
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        entries = {name.removesuffix(".npy"): name for name in archive.namelist()}
        return from_flax({key: torch.from_numpy(_array(archive.read(name))) for key, name in entries.items()})


def _array(data: bytes) -> np.ndarray:
    """Read one array of an `.npz`; check its size first, because numpy allocates memory for any shape."""
    file = io.BytesIO(data)
    form = np.lib.format
    headers = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}
    shape, _, dtype = headers[form.read_magic(file)](file)
    if math.prod(shape) * dtype.itemsize > len(data):
        raise ValueError("an array has fewer numbers than its shape says")
    return form.read_array(io.BytesIO(data), allow_pickle=False)


_READERS = {".safetensors": _read_safetensors, ".pth": _read_torch, ".pt": _read_torch, ".npz": _read_npz}


def _read_config(path: Path) -> dict[str, Any]:
    """Read the hub's config.json of a timm model; another kind of config gives an empty dict."""
    try:
        content = json.loads(read_regular(path))
        training_config = content.get("pretrained_cfg", content)
        size = training_config.get("input_size")
        metadata = {
            "mean": training_config.get("mean"),
            "std": training_config.get("std"),
            "crop": training_config.get("crop_pct"),
            "interpolation": training_config.get("interpolation"),
            "image_size": size[-1] if size else None,
            "heads": content.get("model_args", {}).get("num_heads"),
            "pool": {"token": "token", "avg": "mean"}.get(content.get("global_pool")),
        }
    except (OSError, ValueError, AttributeError, TypeError, LookupError, RecursionError) as error:
        message = f"{path}: not a model's config ({_brief(error)}); repair or remove it"
        raise WeightsError(message, code="bad-weights-config", path=path) from error
    return {key: value for key, value in metadata.items() if value is not None}


def _brief(error: Exception) -> str:
    """Return the first sentence of an error; torch's messages have many lines."""
    return printable(re.split(r"\n|\. ", str(error).strip(), maxsplit=1)[0][:120]) or type(error).__name__
