"""Orders, sharing out, files of classes: against brute-force twins, and every complaint."""

import json
from pathlib import Path

import numpy as np
import pytest

from expect import expect_error
from protosteer.errors import DataError
from protosteer.streams.options import StreamOptions, group_classes, order_classes

ANIMALS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu"]


def names(count: int) -> list[str]:
    return [f"c{i}" for i in range(count)]


def sizes(count: int, default: int = 10, **options) -> list[int]:
    groups = group_classes(names(count), StreamOptions(**options), default)
    assert [label for group in groups for label in group] == names(count)
    return [len(group) for group in groups]


def dealt(count: int, tasks: int) -> list[int]:
    """Twin: deal the classes out like cards."""
    hands = [0] * tasks
    for card in range(count):
        hands[card % tasks] += 1
    return hands


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 50, 99, 100, 200])
def test_tasks_are_as_equal_as_possible(count):
    for tasks in range(1, count + 1):
        assert sizes(count, tasks=tasks) == dealt(count, tasks)


def test_the_default_number_of_tasks_gives_way_to_few_classes():
    assert sizes(10, default=5) == [2] * 5 and sizes(3, default=5) == [1] * 3


def counted(count: int, base: int, increment: int) -> list[int]:
    """Twin: fill tasks one class at a time."""
    made, room = [0], base or increment
    for _ in range(count):
        if made[-1] == room:
            made.append(0)
            room = increment
        made[-1] += 1
    return made


@pytest.mark.parametrize("base", [0, 1, 5, 10, 11])
@pytest.mark.parametrize("increment", [1, 2, 3, 7, 20])
def test_base_and_increment(base, increment):
    assert sizes(11, base=base, increment=increment) == counted(11, base, increment)


def test_base_and_increment_as_the_literature_names_them():
    assert sizes(100, base=50, increment=10) == [50] + [10] * 5  # B50-Inc10
    assert sizes(100, base=50, increment=5) == [50] + [5] * 10
    assert sizes(100, base=0, increment=10) == sizes(100, increment=10) == [10] * 10
    assert sizes(100, base=40, increment=25) == [40, 25, 25, 10]


def test_seeded_order_is_numpys_old_permutation():
    order = order_classes(names(100), "seed:1993")
    # The first ten classes of CIFAR-100 in the order that iCaRL made common.
    assert order[:10] == [f"c{i}" for i in (68, 56, 78, 8, 23, 84, 90, 65, 74, 76)]
    assert sorted(order) == sorted(names(100)) and order != order_classes(names(100), "seed:0")
    np.random.seed(5)
    assert order == order_classes(names(100), "seed:1993")


def written(folder: Path, text: str, name: str = "classes.txt") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_order_from_a_file(tmp_path):
    path = written(tmp_path, "\ufeff# mine\n\nfox\n  bee \r\ngnu\neel\n#cat\ndog\ncat\nant")
    assert order_classes(ANIMALS, str(path)) == ["fox", "bee", "gnu", "eel", "dog", "cat", "ant"]
    options = StreamOptions(class_order=str(path), tasks=2)
    assert group_classes(ANIMALS, options, 5) == [["fox", "bee", "gnu", "eel"], ["dog", "cat", "ant"]]
    assert options.to_dict()["class_order"] == "classes.txt"


@pytest.mark.parametrize(
    ("text", "code", "classes"),
    [
        ("ant\nbee\ncat\ndog\neel\nfox", "classes-missing", ["gnu"]),
        ("", "classes-missing", ANIMALS),
        ("ant\nbee\ncat\ndog\neel\nfox\ngnus", "unknown-classes", ["gnus"]),
        ("ant\n0\n1", "unknown-classes", ["0", "1"]),
        ("ant\nbee\ncat\ndog\neel\nfox\ngnu\nbee", "repeated-class", ["bee"]),
    ],
)
def test_orders_that_do_not_fit(tmp_path, text, code, classes):
    path = written(tmp_path, text)
    with expect_error(code, DataError, path=path, classes=classes):
        order_classes(ANIMALS, str(path))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tasks.json", '[["gnu"], ["ant", "fox", "cat"]]'),
        ("tasks", ' [\n["gnu"], ["ant", "fox", "cat"]]'),
        ("tasks.txt", "# first\ngnu\n\nant, fox ,cat,\n"),
    ],
)
def test_unequal_tasks_from_a_file(tmp_path, name, text):
    options = StreamOptions(task_file=written(tmp_path, text, name))
    assert group_classes(ANIMALS, options, 5) == [["gnu"], ["ant", "fox", "cat"]]
    assert options.to_dict()["task_file"] == name


def test_names_with_commas_need_json(tmp_path):
    path = written(tmp_path, '[["bird, small"], ["[d]og"]]')
    assert group_classes(["[d]og", "bird, small"], StreamOptions(task_file=path), 5) == [["bird, small"], ["[d]og"]]


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("t.txt", "ant,bee\ncat,ant", "repeated-class"),
        ("t.txt", "ant,ant", "repeated-class"),
        ("t.txt", "ant,bea", "unknown-classes"),
        ("t.txt", "# nothing\n", "empty-task"),
        ("t.txt", "ant\n,\nbee", "empty-task"),
        ("t.json", "[]", "empty-task"),
        ("t.json", '[["ant"], []]', "empty-task"),
        ("t.json", "[[", "invalid-json"),
        ("t.json", '["ant", "bee"]', "invalid-json"),
        ("t.json", '{"a": ["ant"]}', "invalid-json"),
        ("t.json", "[[0, 1]]", "invalid-json"),
    ],
)
def test_task_files_that_do_not_fit(tmp_path, name, text, code):
    path = written(tmp_path, text, name)
    with expect_error(code, DataError, path=path):
        group_classes(ANIMALS, StreamOptions(task_file=path), 5)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tasks", (0, 2.5, True)),
        ("base", (-1,)),
        ("increment", (0,)),
        ("train_per_class", (0,)),
        ("test_per_class", ("3",)),
        ("draw", (-1, 0.5)),
        ("validation", (1.0, -0.1, float("nan"), True, "0.1")),
        ("blurry", (1,)),
        ("disjoint", (1.0,)),
    ],
)
def test_option_values_out_of_bounds(name, values):
    for value in values:
        with expect_error("bad-option", DataError, name=name):
            StreamOptions(**{name: value})


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"base": 50}, "base-without-increment"),
        ({"base": 5, "tasks": 2}, "base-without-increment"),
        ({"disjoint": 0.5}, "disjoint-without-blurry"),
        ({"tasks": 2, "increment": 2}, "several-splits"),
        ({"tasks": 2, "task_file": "x"}, "several-splits"),
        ({"class_order": "seed:1", "task_file": "x"}, "order-and-task-file"),
        ({"task_file": "none.txt"}, "no-task-file"),
        *(({"class_order": f"seed:{n}"}, "bad-class-order") for n in ("", -1, 2**32)),
        ({"class_order": "natual"}, "bad-class-order"),
        ({"class_order": ""}, "bad-class-order"),
        ({"tasks": 8}, "too-few-classes"),
        ({"base": 8, "increment": 1}, "too-few-classes"),
    ],
)
def test_options_that_do_not_fit(options, code):
    with expect_error(code, DataError):
        group_classes(ANIMALS, StreamOptions(**options), 5)


def test_options_are_ready_for_json(tmp_path):
    path = written(tmp_path, "ant")
    for options in (StreamOptions(), StreamOptions("seed:2", base=2, increment=1), StreamOptions(task_file=path)):
        values = options.to_dict()
        assert json.loads(json.dumps(values)) == values
    assert StreamOptions("seed:2", validation=0.25).to_dict() == {
        "class_order": "seed:2",
        "tasks": None,
        "base": None,
        "increment": None,
        "task_file": None,
        "train_per_class": None,
        "test_per_class": None,
        "shots": None,
        "validation": 0.25,
        "blurry": 0.0,
        "disjoint": 0.0,
    }
    assert StreamOptions(draw=3).to_dict()["draw"] == 3
    assert StreamOptions(task_file=str(path)) == StreamOptions(task_file=path)
