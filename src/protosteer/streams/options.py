"""Options of a stream: order of the classes, split into tasks, and number of images."""

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
_MINIMA = {"tasks": 1, "base": 0, "increment": 1, "train_per_class": 1, "test_per_class": 1, "shots": 1, "draw": 0}


@dataclass(frozen=True)
class StreamOptions:
    """What can be varied in any stream.

    Choose at most one way to split the classes: `tasks`, `increment` (with or without `base`), or `task_file`. None of
    them means as many tasks as the benchmark usually has. In files, blank lines and lines that start with # are skipped.

    Attributes:
        class_order: "natural", the dataset's own; "seed:N", `numpy.random.RandomState(N).permutation`, by which most of
            the literature shuffles (N is often 1993); or a file that names every class once, one per line.
        tasks: The number of tasks, as equal in size as possible, the larger ones first.
        base: The number of classes of the first task; 0: increments only.
        increment: The number of classes of each other task; the last may be smaller. B50-Inc10 is base 50, increment 10.
        task_file: A JSON list of lists of class names, the manifest of a run, or one task per line, names separated by
            commas. Other classes are omitted.
        train_per_class: At most the first N training images of each class, in file order.
        test_per_class: At most the first N test (or validation) images of each class, in file order.
        shots: At most the first N training images of each class after the first task (few-shot class-incremental
            learning).
        draw: A seed: the N images are drawn at random instead of the first ones. Neighbours in file order are often
            taken in a row and look alike.
        validation: This share of each class's training images is held out and replaces the test images, which are not
            read. The training cap is applied before.
        blurry: This share of each class's training images arrives in other tasks; see `blurry.py`.
        disjoint: This share of the classes is exempt from that.
    """

    class_order: str = NATURAL
    tasks: int | None = None
    base: int | None = None
    increment: int | None = None
    task_file: Path | None = None
    train_per_class: int | None = None
    test_per_class: int | None = None
    shots: int | None = None
    draw: int | None = None
    validation: float = 0.0
    blurry: float = 0.0
    disjoint: float = 0.0

    def __post_init__(self) -> None:
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < minimum):
                message = f"{name} is {value!r}; give a whole number, {minimum} or more"
                raise DataError(message, code="bad-option", name=name)
        for name, unit in _SHARES.items():
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < 1:
                message = f"{name} is {value!r}; give a share of the {unit} from 0 to below 1"
                raise DataError(message, code="bad-option", name=name)
        if self.disjoint and not self.blurry:
            message = f"disjoint = {self.disjoint} without blurry; give both, or neither"
            raise DataError(message, code="disjoint-without-blurry")
        if self.task_file is not None:
            object.__setattr__(self, "task_file", Path(self.task_file))
        self._check_ways()
        self._check_files()

    def _check_ways(self) -> None:
        if self.base is not None and self.increment is None:
            message = f"base = {self.base} without increment; give both, for instance base 50, increment 10"
            raise DataError(message, code="base-without-increment")
        ways = [name for name in ("tasks", "increment", "task_file") if getattr(self, name) is not None]
        if len(ways) > 1:
            message = f"{' and '.join(ways)} are given; choose one way to split the classes"
            raise DataError(message, code="several-splits", names=ways)
        if self.task_file is not None and self.class_order != NATURAL:
            message = f"class_order {self.class_order!r} with a task file, which has its own order; drop one of them"
            raise DataError(message, code="order-and-task-file")

    def _check_files(self) -> None:
        order = self.class_order
        if order.startswith(SEED):
            number = order.removeprefix(SEED)
            if not number.isdecimal() or int(number) >= 2**32:
                message = f"class order {order!r}: N in seed:N must be a whole number from 0 to 2^32 - 1"
                raise DataError(message, code="bad-class-order", order=order)
        elif order != NATURAL and not Path(order).is_file():
            message = f"class order {order!r} is neither {NATURAL!r} nor 'seed:N' nor a file; check it"
            raise DataError(message, code="bad-class-order", order=order)
        if self.task_file is not None and not self.task_file.is_file():
            message = f"task file {self.task_file} does not exist; check the path"
            raise DataError(message, code="no-task-file", path=self.task_file)

    @property
    def seed(self) -> int:
        """The seed of the class order, or 0."""
        return int(self.class_order.removeprefix(SEED)) if self.class_order.startswith(SEED) else 0

    @property
    def judged_on(self) -> str:
        """What predictions are tested on: "test" or "validation" images."""
        return "validation" if self.validation else "test"

    def to_dict(self) -> dict[str, Any]:
        """Return the options for a manifest; of a file its name only, because a stream lists its classes."""
        values = asdict(self)
        if self.class_order != NATURAL and not self.class_order.startswith(SEED):
            values["class_order"] = Path(self.class_order).name
        if self.task_file is not None:
            values["task_file"] = self.task_file.name
        if self.draw is None:  # came later; without it, older runs keep their names and are continued
            del values["draw"]
        return values


def group_classes(classes: Sequence[str], options: StreamOptions, default_tasks: int) -> list[list[str]]:
    """Split classes into tasks.

    Args:
        classes: All classes in the dataset's order.
        options: How to split.
        default_tasks: The number of tasks if the options name none, or one per class if there are fewer.

    Returns:
        The classes of each task.

    Raises:
        DataError: The options do not fit the classes.
    """
    if options.task_file is not None:
        return _read_tasks(options.task_file, classes)
    ordered_classes = order_classes(classes, options.class_order)
    if options.increment is not None:
        sizes = _increment_sizes(len(classes), options.base or 0, options.increment)
    else:
        sizes = _even_sizes(len(classes), options.tasks or min(default_tasks, len(classes)))
    ends = np.cumsum(sizes).tolist()
    return [ordered_classes[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def group_domains(classes: Sequence[str], options: StreamOptions) -> list[list[str]]:
    """Split classes named DOMAIN/CLASS into a task for each domain; `class_order` is the order of the domains.

    Raises:
        DataError: An option splits classes instead of domains (code "domain-option").
    """
    for name in ("tasks", "base", "increment", "task_file", "blurry"):
        if getattr(options, name):
            message = f"{name} splits classes, but the tasks of this stream are its domains; leave it out"
            raise DataError(message, code="domain-option", name=name)
    groups: dict[str, list[str]] = {}
    for label in classes:
        groups.setdefault(label.partition("/")[0], []).append(label)
    return [groups[domain] for domain in order_classes(list(groups), options.class_order)]


def order_classes(classes: Sequence[str], order: str) -> list[str]:
    """Order classes as `StreamOptions.class_order` says."""
    if order == NATURAL:
        return list(classes)
    if order.startswith(SEED):
        permutation = np.random.RandomState(int(order.removeprefix(SEED))).permutation(len(classes))
        return [classes[row] for row in permutation]
    path = Path(order)
    names = [line for _, line in text_lines(path)]
    _check_names(path, names, classes)
    missing_names = sorted(set(classes) - set(names))
    if missing_names:
        message = f"{path} omits {_quoted(missing_names)}; a class order names every class once"
        raise DataError(message, code="classes-missing", path=path, classes=missing_names)
    return names


def _even_sizes(classes: int, tasks: int) -> list[int]:
    if tasks > classes:
        message = f"{classes} classes cannot fill {tasks} tasks; ask for at most {classes}"
        raise DataError(message, code="too-few-classes")
    size, remainder = divmod(classes, tasks)
    return [size + 1] * remainder + [size] * (tasks - remainder)


def _increment_sizes(classes: int, base: int, increment: int) -> list[int]:
    if base > classes:
        message = f"base is {base}, but there are {classes} classes; ask for at most {classes}"
        raise DataError(message, code="too-few-classes")
    count, remainder = divmod(classes - base, increment)
    return [size for size in (base, *[increment] * count, remainder) if size]


# Files


def _read_tasks(path: Path, classes: Sequence[str]) -> list[list[str]]:
    lines = [line for _, line in text_lines(path)]
    if path.suffix.lower() == ".json" or lines[:1] and lines[0].startswith(("[", "{")):
        tasks = _parse_json_tasks(path, "\n".join(lines))
    else:
        tasks = [[name.strip() for name in line.split(",") if name.strip()] for line in lines]
    if not tasks or not all(tasks):
        message = f"{path} has no task, or a task without classes; every task needs at least one class"
        raise DataError(message, code="empty-task", path=path)
    _check_names(path, [name for task in tasks for name in task], classes)
    return tasks


def _parse_json_tasks(path: Path, text: str) -> list[list[str]]:
    try:
        tasks = json.loads(text)
        if isinstance(tasks, dict):  # the manifest of a run
            tasks = [task["classes"] for task in tasks["configuration"]["stream"]["tasks"]]
    except (KeyError, TypeError) as error:
        message = f"{path} is no manifest of a run: {error} is missing"
        raise DataError(message, code="invalid-json", path=path) from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not valid JSON: {error}; repair it", code="invalid-json", path=path) from error
    lists = isinstance(tasks, list) and all(isinstance(task, list) for task in tasks)
    if not lists or not all(isinstance(name, str) for task in tasks for name in task):
        message = f'{path} must be a JSON list of lists of class names, such as [["a", "b"], ["c"]]'
        raise DataError(message, code="invalid-json", path=path)
    return tasks


def _check_names(path: Path, names: list[str], classes: Sequence[str]) -> None:
    known_names = set(classes)
    unknown_names = [name for name in names if name not in known_names]
    if unknown_names:
        hint = suggestion(unknown_names[0], classes)
        message = f"{path} names {_quoted(unknown_names)}, unknown in the dataset; {hint}"
        raise DataError(message, code="unknown-classes", path=path, classes=unknown_names)
    repeated_names = sorted({name for name in names if names.count(name) > 1})
    if repeated_names:
        message = f"{path} names {_quoted(repeated_names)} more than once; a class belongs to one task"
        raise DataError(message, code="repeated-class", path=path, classes=repeated_names)


def _quoted(names: Sequence[str]) -> str:
    return listed([repr(name) for name in names], limit=5)
