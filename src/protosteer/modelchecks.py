"""What readers of a model rely on: a file from someone else may be sealed and say anything.

Headers are checked against a schema, tensors against what docs/api.md says of them. All numbers that say how much
memory or time something takes have a bound. A `TypeError` says what is wrong.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from protosteer.backbones.backbone import MOST_PROMPT_TOKENS
from protosteer.data.transforms import MOST_CANVAS, Preprocessing
from protosteer.method.memory import ClassRecord, Memory
from protosteer.method.prototypes import Sketch
from protosteer.util.text import NAME_LENGTH, check_name

Check = Callable[[Any, str], None]  # of a value, and of how to call it

_LINE = 100  # characters
_DEEPEST = 2**10  # layers
_MANY = 2**40  # of images, bytes, parameters
_GREATEST = 2.0**20  # number in an embedding or a prompt
_UNIT = 1.01  # greatest number in a unit vector, with what rounding adds


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
        "depth": _whole(1, _DEEPEST),
        "weights": _text(4096),
        "source": _text(4096),
        "pool": _text(20),
        "parameters": _whole(1, _MANY),
        "precision": _text(20),
    },
)
_ABOUT = _record(
    {},
    {
        "settings": _settings,
        "learned": _text(40),
        "unfinished": _flag,
        **dict.fromkeys(("images", "image_bytes", "held_out", "trained_parameters"), _whole(0, _MANY)),
        **dict.fromkeys(("key_spread", "value_spread", "loss", "accuracy"), _number(-_MANY, _MANY)),
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
    {"few_shot": _flag, "domain": _whole(0, _MANY)},
)
_WHOLE_FILE = {"backbone": _BACKBONE, "settings": _settings}
_MODEL = _record({**_WHOLE_FILE, "tasks": _list(_TASK, 0)})
_ADAPTED = _record(
    {
        **_WHOLE_FILE,
        "classes": _classes,
        "images": _whole(1, _MANY),
        "fingerprint": _text(128),
    }
)


def check_model_header(header: Any) -> None:
    _MODEL(header, "the header's")
    Preprocessing.from_dict(header["backbone"]["preprocessing"])


def check_adapted_header(header: Any) -> None:
    _ADAPTED(header, "the header's")
    Preprocessing.from_dict(header["backbone"]["preprocessing"])


def check_memory(memory: Memory, dim: int | None, depth: int | None) -> None:
    """Every tensor of a memory whose backbone has that width and depth; early files do not tell them."""
    if dim is None and memory.records and memory.records[0].keys.ndim:
        dim = memory.records[0].keys.shape[-1]
    for task in memory.tasks:
        for prompt in (p for p in (task.prompt, task.domain) if p is not None):
            check_prompt(prompt, dim, depth, f"prompt of {task.name}")
        for record in task.classes:
            _check_class(record, dim)
            if (record.domain is None) != (task.domain is None):
                raise TypeError(
                    f"{record.name} lacks its points under the prompt for all classes, or the prompt"
                )


def check_prompt(prompt: Tensor, dim: int | None, depth: int | None, what: str) -> None:
    _check_tensor(prompt, 3, dim, what)
    layers, tokens, _ = prompt.shape
    if layers > (depth or _DEEPEST) or tokens > MOST_PROMPT_TOKENS:
        raise TypeError(f"{what} has {layers} layers of {tokens} tokens, the backbone {depth} layers")


def check_packed(parts: Mapping[str, Tensor], what: str) -> None:
    """A sketch as it stands in a file, before it is unpacked: eight bits come with their steps."""
    points, steps = parts["points"], parts.get("steps")
    if (points.dtype == torch.int8) != (steps is not None):
        raise TypeError(f"points of {what} have no steps, or steps and no use for them")
    if steps is not None:
        if steps.dtype != torch.float16 or steps.shape != points.shape[:1]:
            raise TypeError(f"steps of {what} have shape {list(steps.shape)}, {steps.dtype}")
        if not ((steps >= 0) & steps.isfinite()).all():
            raise TypeError(f"steps of {what} are negative or not finite")
    for tensor in (points, parts["deviations"]):
        if tensor.dtype not in (torch.int8, torch.float16, torch.float32):
            raise TypeError(f"points of {what} are {tensor.dtype}")


def _check_class(record: ClassRecord, dim: int | None) -> None:
    name, values, held_out = record.name, record.values, record.similarities
    _check_tensor(record.keys, 2, dim, f"keys of {name}")
    _check_tensor(values.means, 2, dim, f"centroids of {name}")
    _check_tensor(values.deviations, 2, dim, f"deviations of {name}", least=0.0)
    if len(values.means) != len(values.deviations):
        raise TypeError(f"centroids of {name} are not as many as their deviations")
    _check_counts(values.counts, len(values.means), f"centroids of {name}")
    for sketch in (s for s in (record.plain, record.domain) if s is not None):
        _check_sketch(sketch, name, dim)
    if record.domain and (record.plain is None or record.plain.single != record.domain.single):
        raise TypeError(f"{name} has points of different images in its two sketches")
    if held_out is None:
        return
    if held_out.ndim != 1 or not held_out.dtype.is_floating_point or not held_out.isfinite().all():
        raise TypeError(f"held-out similarities of {name} are not a list of numbers")


def _check_sketch(sketch: Sketch, name: str, dim: int | None) -> None:
    _check_tensor(sketch.points, 2, dim, f"points of {name}", -_UNIT, _UNIT)
    _check_tensor(sketch.deviations, 1, dim, f"deviations of {name}", 0.0, _UNIT)
    _check_counts(sketch.counts, len(sketch.points), f"points of {name}")
    if len(sketch.points) < sketch.single:
        raise TypeError(f"{name} has {len(sketch.points)} points for more images")


def _check_counts(counts: Tensor, number: int, what: str) -> None:
    if counts.dtype != torch.int64 or counts.shape != (number,):
        raise TypeError(f"{what} are not as many as their counts, or these are not whole numbers")
    if int(counts.min()) < 1 or int(counts.max()) > _MANY:
        raise TypeError(f"a count of {what} is below 1, or impossible")


def _check_tensor(
    tensor: Tensor, axes: int, dim: int | None, what: str, least: float = -_GREATEST, most: float = _GREATEST
) -> None:
    shaped = tensor.ndim == axes and dim in (None, tensor.shape[-1]) and tensor.numel() > 0
    if tensor.dtype != torch.float32 or not shaped:
        raise TypeError(f"{what} have shape {list(tensor.shape)}, {tensor.dtype}")
    if not ((tensor >= least) & (tensor <= most)).all():  # false of NaN too
        raise TypeError(f"{what} are not finite, or beyond {least:g} to {most:g}")
