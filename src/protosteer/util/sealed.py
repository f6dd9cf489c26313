"""Tensors and a JSON header in one safetensors file, with a checksum over both that finds altered files.

There is no pickle in it, so that a file from someone else cannot run anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from protosteer.errors import ModelFileError

_KEY = "protosteer"


def seal(header: dict[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """The contents of a file; equal headers and tensors give equal bytes."""
    # Cloned, since safetensors refuses a tensor that is there twice.
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    # One metadata entry only: safetensors writes several in no fixed order.
    sealed = json.dumps({"header": header, "sha256": _checksum(header, own)}, sort_keys=True)
    return save(own, metadata={_KEY: sealed})


def unseal(data: bytes, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of what `seal` gave; `name` is what messages call the file."""
    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    except (SafetensorError, ValueError) as error:
        raise ModelFileError(
            f"{name} is truncated or not a model file ({error}); use another copy"
        ) from error
    if _KEY not in metadata:
        raise ModelFileError(
            f"{name} is a safetensors file but not a protosteer model; teach one with learn()"
        )
    try:
        sealed = json.loads(metadata[_KEY])
        header: dict[str, Any] = sealed["header"]
        intact = isinstance(header, dict) and sealed["sha256"] == _checksum(header, tensors)
    except (json.JSONDecodeError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise ModelFileError(f"{name} was altered or damaged after it was written; use another copy")
    return header, tensors


def _checksum(header: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()
