"""What the header of a model file must say, and within which bounds. A `TypeError` tells what is wrong."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from protosteer.data.transforms import MOST_CANVAS, Preprocessing
from protosteer.util.text import NAME_LENGTH, check_name

Check = Callable[[Any, str], None]  # of a value, and of how to call it

DEEPEST = 2**10  # layers
MANY = 2**40  # of images, bytes, parameters
_LINE = 100  # characters


def _odd(where: str, value: Any) -> TypeError:
    return TypeError(f"{where} is {reprlib.repr(value)}")


def _whole(least: int, most: int) -> Check:
    return _number(least, most, (int,))


def _number(least: float, most: float, kinds: tuple[type, ...] = (int, float)) -> Check:
    def check(value: Any, where: str) -> None:
        if type(value) not in kinds or not least <= value <= most:
            raise _odd(where, value)

    return check


def _flag(value: Any, where: str) -> None:
    if type(value) is not bool:
        raise _odd(where, value)


def _text(most: int) -> Check:
    def check(value: Any, where: str) -> None:
        if type(value) is not str or len(value) > most:
            raise _odd(where, value)

    return check


def _name(most: int = NAME_LENGTH) -> Check:
    def check(value: Any, where: str) -> None:
        _text(most)(value, where)
        check_name(value, where, most)

    return check


def _list(each: Check, least: int, most: int = 10**6) -> Check:
    def check(value: Any, where: str) -> None:
        if type(value) is not list or not least <= len(value) <= most:
            raise _odd(where, value)
        for one in value:
            each(one, where)

    return check


def _classes(value: Any, where: str) -> None:
    _list(_name(), 1)(value, where)
    if len(set(value)) < len(value):
        raise TypeError(f"{where} has a name twice")


def _record(needed: Mapping[str, Check], known: Mapping[str, Check] | None = None) -> Check:
    """known: what may be null or absent. What is neither is of a later version, and nobody's business here."""

    def check(value: Any, where: str) -> None:
        if type(value) is not dict:
            raise _odd(where, value)
        for key, part in needed.items():
            part(value.get(key), f"{where} {key}")
        for key, part in (known or {}).items():
            if value.get(key) is not None:
                part(value[key], f"{where} {key}")

    return check


def _settings(value: Any, where: str) -> None:
    """Short names and plain values; `Settings` knows which."""
    if type(value) is not dict:
        raise _odd(where, value)
    for key, one in value.items():
        if isinstance(one, (dict, list)) or len(key) > _LINE or len(str(one)) > _LINE:
            raise _odd(f"{where}, {reprlib.repr(key)}", one)


_PREPROCESSING = _record(
    {
        "image_size": _whole(1, MOST_CANVAS),
        "mean": _list(_number(-1e3, 1e3), 3, 3),
        "std": _list(_number(1e-6, 1e3), 3, 3),
        "crop": _number(0, 1),
        "interpolation": _text(20),
    }
)
_BACKBONE = _record(
    {
        "name": _name(),
        "fingerprint": _text(128),
        "image_size": _whole(1, MOST_CANVAS),
        "heads": _whole(1, 2**10),
        "preprocessing": _PREPROCESSING,
    },
    {
        "dim": _whole(1, 2**16),
        "depth": _whole(1, DEEPEST),
        "weights": _text(4096),
        "source": _text(4096),
        "pool": _text(20),
        "parameters": _whole(1, MANY),
        "precision": _text(20),
    },
)
_ABOUT = _record(
    {},
    {
        "settings": _settings,
        "learned": _text(40),
        "file": _text(4096),
        "unfinished": _flag,
        **dict.fromkeys(("images", "image_bytes", "held_out", "trained_parameters"), _whole(0, MANY)),
        **dict.fromkeys(("key_spread", "value_spread", "loss", "accuracy"), _number(-MANY, MANY)),
    },
)
_TASK = _record(
    {
        "name": _name(NAME_LENGTH + 20),  # a number may stand behind a name that was taken
        "classes": _classes,
        "prompt": _flag,
        "independent": _flag,
        "about": _ABOUT,
    },
    {"few_shot": _flag, "domain": _whole(0, MANY), "corrected": _name()},
)
_WHOLE_FILE = {"backbone": _BACKBONE, "settings": _settings}
_MODEL = _record({**_WHOLE_FILE, "tasks": _list(_TASK, 0)})
_ADAPTED = _record(
    {
        **_WHOLE_FILE,
        "classes": _classes,
        "images": _whole(1, MANY),
        "fingerprint": _text(128),
    }
)


def check_model_header(header: Any) -> None:
    _MODEL(header, "the header's")
    Preprocessing.from_dict(header["backbone"]["preprocessing"])


def check_adapted_header(header: Any) -> None:
    _ADAPTED(header, "the header's")
    Preprocessing.from_dict(header["backbone"]["preprocessing"])
