"""Pack tensors and a JSON header into one safetensors file with a checksum over both.

It contains no pickle, so that an untrusted file cannot run code.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from protosteer.errors import ModelFileError
from protosteer.util.text import one_line

_KEY = "protosteer"
_DIGITS = 20  # of a whole number: 64 bits and a sign


def pack_tensors(header: dict[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a file; equal headers and tensors give equal bytes."""
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # Only shared tensors are cloned, which safetensors rejects; others may be too large to copy.
    times = Counter(tensor.untyped_storage().data_ptr() for tensor in copies.values())
    copies = {n: t.clone() if times[t.untyped_storage().data_ptr()] > 1 else t for n, t in copies.items()}
    # One metadata entry only: safetensors writes several in no fixed order.
    metadata_json = json.dumps({"header": header, "sha256": _checksum(header, copies)}, sort_keys=True)
    return save(copies, metadata={_KEY: metadata_json})


def unpack_tensors(data: bytes, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read header and tensors that `pack_tensors` returned; raise `ModelFileError`, which calls the file `name`."""
    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = _parse(data[8 : 8 + length]).get("__metadata__") or {}
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        message = f"{name} is truncated or not a model file ({one_line(str(error))}); use another copy"
        raise ModelFileError(message, code="damaged-model", path=name) from error
    if _KEY not in metadata:
        message = f"{name} is a safetensors file but not a protosteer model; teach one with learn()"
        raise ModelFileError(message, code="not-a-model", path=name)
    try:
        entry = _parse(metadata[_KEY])
        header: dict[str, Any] = entry["header"]
        intact = isinstance(header, dict) and entry["sha256"] == _checksum(header, tensors)
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        message = f"{name} was altered or damaged after it was written; use another copy"
        raise ModelFileError(message, code="damaged-model", path=name)
    return header, tensors


def _parse(text: str | bytes) -> Any:
    """Parse JSON whose numbers are all finite and of bounded length."""
    return json.loads(text, parse_int=_parse_int, parse_float=_parse_float, parse_constant=_parse_float)


def _parse_int(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _parse_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("a number is not finite")
    return number


def _checksum(header: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
