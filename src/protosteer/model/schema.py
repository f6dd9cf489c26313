"""Specify the header of a model file, with bounds, and check it. A `TypeError` says what is wrong.

A specification is data:

- `(least, most)`: a whole number, or any number where the bounds are floats.
- An int `n`: a text of at most n characters, which UTF-8 can encode.
- `bool`: a flag.
- `[item, least, most]`: a list of least to most values, each as `item` specifies.
- A dict: a record. A key that ends in "?" may be absent or null; keys of later versions are ignored.
- A function of a value and what to call it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

from protosteer.data.transforms import MAX_CANVAS, Preprocessing
from protosteer.util.text import NAME_LENGTH, check_name

MAX_DEPTH = 2**10  # layers
MAX_COUNT = 2**40  # of images, bytes, parameters
_MAX_ITEMS = 10**6
_MAX_PATH = 4096  # characters
_LINE = 100  # characters of the name or value of a setting


def check(value: Any, spec: Any, where: str) -> None:
    """Raise a `TypeError` unless a value is as specified; `where` is what to call it."""
    if isinstance(spec, dict):
        _require(type(value) is dict, value, where)
        for key, part in spec.items():
            name = key.removesuffix("?")
            if name == key or value.get(name) is not None:
                check(value.get(name), part, f"{where} {name}")
    elif isinstance(spec, list):
        item_spec, lower, upper = spec
        _require(type(value) is list and lower <= len(value) <= upper, value, where)
        for item in value:
            check(item, item_spec, where)
    elif isinstance(spec, tuple):
        lower, upper = spec
        kinds = (int, float) if isinstance(lower, float) else (int,)
        _require(type(value) in kinds and lower <= value <= upper, value, where)
    elif spec is bool:
        _require(type(value) is bool, value, where)
    elif isinstance(spec, int):
        _require(type(value) is str and len(value) <= spec and _encodable(value), value, where)
    else:
        spec(value, where)


def _require(condition: bool, value: Any, where: str) -> None:
    if not condition:
        raise TypeError(f"{where} is {reprlib.repr(value)}")


def _encodable(text: str, errors: str = "strict") -> bool:
    try:
        text.encode("utf-8", errors)
    except UnicodeEncodeError:
        return False
    return True


def _path(value: Any, where: str) -> None:
    """Check a file's name, which need not be UTF-8: other bytes are there as `os.fsdecode` has them."""
    _require(type(value) is str and len(value) <= _MAX_PATH and _encodable(value, "surrogateescape"), value, where)


def _name(value: Any, where: str, max_length: int = NAME_LENGTH) -> None:
    _require(type(value) is str and len(value) <= max_length, value, where)
    check_name(value, where, max_length)


def _task_name(value: Any, where: str) -> None:
    _name(value, where, NAME_LENGTH + 20)  # a name that was taken gets a number behind it


def _classes(value: Any, where: str) -> None:
    _require(type(value) is list and 1 <= len(value) <= _MAX_ITEMS, value, where)
    for name in value:
        _name(name, where)
    if len(set(value)) < len(value):
        raise TypeError(f"{where} has a name twice")


def _settings(value: Any, where: str) -> None:
    """Check for short names and plain values; `Settings` knows which there are."""
    _require(type(value) is dict, value, where)
    for key, setting in value.items():
        is_plain = not isinstance(setting, (dict, list)) and len(key) <= _LINE and len(str(setting)) <= _LINE
        _require(is_plain and _encodable(f"{key}{setting}"), setting, f"{where}, {reprlib.repr(key)}")


def _preprocessing(value: Any, where: str) -> None:
    check(value, _PREPROCESSING, where)
    Preprocessing.from_dict(value)


_COUNT, _FINITE = (0, MAX_COUNT), (-float(MAX_COUNT), float(MAX_COUNT))
_PREPROCESSING = {
    "image_size": (1, MAX_CANVAS),
    "mean": [(-1e3, 1e3), 3, 3],
    "std": [(1e-6, 1e3), 3, 3],
    "crop": (0.0, 1.0),
    "interpolation": 20,
}
_BACKBONE = {
    "name": _name,
    "fingerprint": 128,
    "image_size": (1, MAX_CANVAS),
    "heads": (1, 2**10),
    "preprocessing": _preprocessing,
    "dim?": (1, 2**16),
    "depth?": (1, MAX_DEPTH),
    "weights?": _path,
    "source?": _path,
    "pool?": 20,
    "parameters?": (1, MAX_COUNT),
    "precision?": 20,
}
_METADATA = {
    "settings?": _settings,
    "learned?": 40,
    "file?": _path,
    "unfinished?": bool,
    "precision?": 20,
    **dict.fromkeys(("images?", "image_bytes?", "held_out?", "trained_parameters?"), _COUNT),
    **dict.fromkeys(("key_spread?", "value_spread?", "loss?", "accuracy?"), _FINITE),
}
_TASK = {
    "name": _task_name,
    "classes": _classes,
    "prompt": bool,
    "independent": bool,
    "about": _METADATA,
    "few_shot?": bool,
    "domain?": _COUNT,
    "corrected?": _name,
    "confirmed?": bool,
    "compacted?": bool,
}


def _mapping(item_spec: Any) -> Callable[[Any, str], None]:
    """Specify short names, each with a value as specified."""

    def check_all(value: Any, where: str) -> None:
        _require(type(value) is dict, value, where)
        for key, item in value.items():
            check(key, NAME_LENGTH + 20, where)
            check(item, item_spec, where)

    return check_all


_SHA256 = 64
# Of files beside a model, which may come from an untrusted source, too.
LOG_ENTRY = {
    "date": 40,
    "command": _LINE,
    "added": _mapping(_COUNT),
    "removed": _mapping(_COUNT),
    "renamed": _mapping(NAME_LENGTH + 20),
    "classes": _COUNT,
}
SORT_STEP = {
    "from": _path,
    "version": [(0, 2**63), 2, 2],
    "folder": _path,
    "mode": 20,
    **dict.fromkeys(("to?", "xmp?"), _path),
}
CERTIFICATE = {
    "format": (1, 1),
    "sha256_after": _SHA256,
    "exact": bool,
    "forgotten": [lambda value, where: None, 0, _MAX_ITEMS],
    "removed": [{"class": NAME_LENGTH + 20, "sha256": _SHA256}, 0, _MAX_ITEMS],
    "left": [{"sha256": _SHA256}, 0, _MAX_ITEMS],
}
_FILE = {"backbone": _BACKBONE, "settings": _settings}
MODEL = {**_FILE, "tasks": [_TASK, 0, _MAX_ITEMS]}
ADAPTED = {**_FILE, "classes": _classes, "images": (1, MAX_COUNT), "fingerprint": 128}
