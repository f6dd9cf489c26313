"""How the classes of a dataset are ordered and shared out over tasks, and how many images each may bring."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protosteer.data.image_files import text_lines
from protosteer.errors import DataError
from protosteer.util.text import listed, suggestion

NATURAL = "natural"
SEED = "seed:"
_SHARES = {"validation": "training images", "blurry": "training images", "disjoint": "classes"}
_AT_LEAST = {"tasks": 1, "base": 0, "increment": 1, "train_per_class": 1, "test_per_class": 1}


@dataclass(frozen=True)
class StreamOptions:
    """What may be varied in any stream. The classes are shared out in one of three ways, at most one of
    which is chosen: `tasks`, `increment` (with or without `base`), `task_file`; none means as many tasks as
    the benchmark usually has.

    class_order: "natural", the dataset's own; "seed:N", `numpy.random.RandomState(N).permutation`, by which
    most of the literature shuffles (N is often 1993); or a file that names every class once, one per line.
    tasks: as equal in size as possible, the larger ones first. base, increment: B50-Inc10 is a first task of
    50 classes, then tasks of 10, the last one smaller where they do not divide; base 0 is increments only.
    task_file: a JSON list of lists of class names, or one task per line, names separated by commas. Classes
    that it does not name are left out. In both kinds of file, blank lines and lines that start with # do not
    count (a JSON file has none).
    train_per_class, test_per_class: no more than the first N images of each class, in file order.
    validation: this share of each class's training images is held out and takes the place of the test
    images, which are then not looked at. The training cap comes first; the test cap holds for whatever a
    class is judged by.
    blurry, disjoint: that share of the training images of every class, but for a share of classes that stay
    disjoint, arrives in other tasks: see `blurring.py`.
    """

    class_order: str = NATURAL
    tasks: int | None = None
    base: int | None = None
    increment: int | None = None
    task_file: Path | None = None
    train_per_class: int | None = None
    test_per_class: int | None = None
    validation: float = 0.0
    blurry: float = 0.0
    disjoint: float = 0.0

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise DataError(f"{name} is {value!r}; give a whole number, {least} or more")
        for name, what in _SHARES.items():
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < 1:
                raise DataError(f"{name} is {value!r}; give a share of the {what} from 0 to below 1")
        if self.disjoint and not self.blurry:
            raise DataError(f"disjoint = {self.disjoint} without blurry; give both, or neither")
        if self.task_file is not None:
            object.__setattr__(self, "task_file", Path(self.task_file))
        self._check_ways()
        self._check_files()

    def _check_ways(self) -> None:
        if self.base is not None and self.increment is None:
            raise DataError(
                f"base = {self.base} without increment; give both, for instance base 50, increment 10"
            )
        ways = [name for name in ("tasks", "increment", "task_file") if getattr(self, name) is not None]
        if len(ways) > 1:
            raise DataError(f"{' and '.join(ways)} are given; choose one way to share out the classes")
        if self.task_file is not None and self.class_order != NATURAL:
            raise DataError(
                f"class_order {self.class_order!r} with a task file, which has an order of its own; drop one of them"
            )

    def _check_files(self) -> None:
        order = self.class_order
        if order.startswith(SEED):
            number = order.removeprefix(SEED)
            if not number.isdecimal() or int(number) >= 2**32:
                raise DataError(
                    f"class order {order!r}: N in seed:N must be a whole number from 0 to 2^32 - 1"
                )
        elif order != NATURAL and not Path(order).is_file():
            raise DataError(f"class order {order!r} is neither {NATURAL!r} nor 'seed:N' nor a file; check it")
        if self.task_file is not None and not self.task_file.is_file():
            raise DataError(f"task file {self.task_file} does not exist; check the path")

    @property
    def seed(self) -> int:
        """Of the class order, or 0 where that has none."""
        return int(self.class_order.removeprefix(SEED)) if self.class_order.startswith(SEED) else 0

    @property
    def judged_on(self) -> str:
        return "validation" if self.validation else "test"

    def to_dict(self) -> dict[str, Any]:
        """For manifests. Of a file the name alone is kept: a stream lists the classes that it read there."""
        values = asdict(self)
        if self.class_order != NATURAL and not self.class_order.startswith(SEED):
            values["class_order"] = Path(self.class_order).name
        if self.task_file is not None:
            values["task_file"] = self.task_file.name
        return values


def group_classes(classes: Sequence[str], options: StreamOptions, default_tasks: int) -> list[list[str]]:
    """The classes of each task. A dataset with fewer classes than `default_tasks` gets one task per class."""
    if options.task_file is not None:
        return _read_tasks(options.task_file, classes)
    ordered = order_classes(classes, options.class_order)
    if options.increment is not None:
        sizes = _by_increments(len(classes), options.base or 0, options.increment)
    else:
        sizes = _evenly(len(classes), options.tasks or min(default_tasks, len(classes)))
    ends = np.cumsum(sizes).tolist()
    return [ordered[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def order_classes(classes: Sequence[str], order: str) -> list[str]:
    if order == NATURAL:
        return list(classes)
    if order.startswith(SEED):
        permutation = np.random.RandomState(int(order.removeprefix(SEED))).permutation(len(classes))
        return [classes[row] for row in permutation]
    path = Path(order)
    named = [line for _, line in text_lines(path)]
    _check_names(path, named, classes)
    missing = sorted(set(classes) - set(named))
    if missing:
        raise DataError(f"{path} leaves out {_quoted(missing)}; a class order names every class once")
    return named


def _evenly(classes: int, tasks: int) -> list[int]:
    if tasks > classes:
        raise DataError(f"{classes} classes cannot fill {tasks} tasks; ask for at most {classes}")
    size, larger = divmod(classes, tasks)
    return [size + 1] * larger + [size] * (tasks - larger)


def _by_increments(classes: int, base: int, increment: int) -> list[int]:
    if base > classes:
        raise DataError(f"base is {base}, but there are {classes} classes; ask for at most {classes}")
    full, rest = divmod(classes - base, increment)
    return [size for size in (base, *[increment] * full, rest) if size]


# Files


def _read_tasks(path: Path, classes: Sequence[str]) -> list[list[str]]:
    lines = [line for _, line in text_lines(path)]
    if path.suffix.lower() == ".json" or lines[:1] and lines[0].startswith("["):
        tasks = _json_tasks(path, "\n".join(lines))
    else:
        tasks = [[name.strip() for name in line.split(",") if name.strip()] for line in lines]
    if not tasks or not all(tasks):
        raise DataError(f"{path} has no task, or a task without classes; every task needs at least one class")
    _check_names(path, [name for task in tasks for name in task], classes)
    return tasks


def _json_tasks(path: Path, text: str) -> list[list[str]]:
    try:
        tasks = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not valid JSON: {error}; mend it") from error
    lists = isinstance(tasks, list) and all(isinstance(task, list) for task in tasks)
    if not lists or not all(isinstance(name, str) for task in tasks for name in task):
        raise DataError(f'{path} must be a JSON list of lists of class names, such as [["a", "b"], ["c"]]')
    return tasks


def _check_names(path: Path, named: list[str], classes: Sequence[str]) -> None:
    known = set(classes)
    unknown = [name for name in named if name not in known]
    if unknown:
        near = suggestion(unknown[0], classes)
        raise DataError(f"{path} names {_quoted(unknown)}, unknown in the dataset; {near}")
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise DataError(f"{path} names {_quoted(twice)} more than once; a class belongs to one task")


def _quoted(names: Sequence[str]) -> str:
    return listed([repr(name) for name in names], most=5)
