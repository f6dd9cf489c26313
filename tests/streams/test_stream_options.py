"""Orders, sharing out, files of classes: against brute-force twins, and every complaint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

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
    assert sizes(10, default=5) == [2] * 5
    assert sizes(3, default=5) == [1] * 3


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
    ("text", "complaint"),
    [
        ("ant\nbee\ncat\ndog\neel\nfox", "leaves out 'gnu'; a class order names every class once"),
        ("", "leaves out 'ant', 'bee', 'cat', 'dog', 'eel' and 2 more"),
        ("ant\nbee\ncat\ndog\neel\nfox\ngnus", "names 'gnus', unknown in the dataset; did you mean 'gnu'?"),
        (
            "ant\n0\n1",
            "names '0', '1', unknown in the dataset; there are: ant, bee, cat, dog, eel, fox, gnu",
        ),
        ("ant\nbee\ncat\ndog\neel\nfox\ngnu\nbee", "names 'bee' more than once"),
    ],
)
def test_orders_that_do_not_fit(tmp_path, text, complaint):
    path = written(tmp_path, text)
    with pytest.raises(DataError) as error:
        order_classes(ANIMALS, str(path))
    assert str(error.value).startswith(f"{path} {complaint}") and "\n" not in str(error.value)


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
    assert group_classes(["[d]og", "bird, small"], StreamOptions(task_file=path), 5) == [
        ["bird, small"],
        ["[d]og"],
    ]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("t.txt", "ant,bee\ncat,ant", "names 'ant' more than once; a class belongs to one task"),
        ("t.txt", "ant,ant", "names 'ant' more than once"),
        ("t.txt", "ant,bea", "names 'bea', unknown in the dataset; did you mean 'bee'?"),
        ("t.txt", "# nothing\n", "has no task, or a task without classes"),
        ("t.txt", "ant\n,\nbee", "has no task, or a task without classes"),
        ("t.json", "[]", "has no task, or a task without classes"),
        ("t.json", '[["ant"], []]', "has no task, or a task without classes"),
        ("t.json", "[[", "is not valid JSON"),
        ("t.json", '["ant", "bee"]', "must be a JSON list of lists of class names"),
        ("t.json", '{"a": ["ant"]}', "must be a JSON list of lists of class names"),
        ("t.json", "[[0, 1]]", "must be a JSON list of lists of class names"),
    ],
)
def test_task_files_that_do_not_fit(tmp_path, name, text, complaint):
    path = written(tmp_path, text, name)
    with pytest.raises(DataError) as error:
        group_classes(ANIMALS, StreamOptions(task_file=path), 5)
    assert str(error.value).startswith(f"{path} {complaint}") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tasks": 0}, "tasks is 0; give a whole number, 1 or more"),
        ({"tasks": 2.5}, "tasks is 2.5; give a whole number, 1 or more"),
        ({"tasks": True}, "tasks is True; give a whole number"),
        ({"base": -1, "increment": 2}, "base is -1; give a whole number, 0 or more"),
        ({"base": 5, "increment": 0}, "increment is 0; give a whole number, 1 or more"),
        ({"base": 50}, "base = 50 without increment; give both"),
        ({"base": 5, "tasks": 2}, "base = 5 without increment; give both"),
        ({"train_per_class": 0}, "train_per_class is 0; give a whole number, 1 or more"),
        ({"test_per_class": "3"}, "test_per_class is '3'; give a whole number"),
        ({"validation": 1.0}, "validation is 1.0; give a share of the training images from 0 to below 1"),
        ({"validation": -0.1}, "validation is -0.1; give a share"),
        ({"validation": float("nan")}, "validation is nan; give a share"),
        ({"validation": True}, "validation is True; give a share"),
        ({"validation": "0.1"}, "validation is '0.1'; give a share"),
        ({"blurry": 1}, "blurry is 1; give a share of the training images from 0 to below 1"),
        ({"blurry": 0.1, "disjoint": 1.0}, "disjoint is 1.0; give a share of the classes from 0 to below 1"),
        ({"disjoint": 0.5}, "disjoint = 0.5 without blurry; give both, or neither"),
        ({"tasks": 2, "increment": 2}, "tasks and increment are given; choose one way"),
        ({"tasks": 2, "task_file": "x"}, "tasks and task_file are given; choose one way"),
        ({"class_order": "seed:1", "task_file": "x"}, "class_order 'seed:1' with a task file"),
        ({"task_file": "none.txt"}, "task file none.txt does not exist; check the path"),
        ({"class_order": "seed:"}, "class order 'seed:': N in seed:N must be a whole number"),
        ({"class_order": "seed:-1"}, "class order 'seed:-1': N in seed:N must be a whole number"),
        ({"class_order": "seed:4294967296"}, "class order 'seed:4294967296': N in seed:N"),
        ({"class_order": "natual"}, "class order 'natual' is neither 'natural' nor 'seed:N' nor a file"),
        ({"class_order": ""}, "class order '' is neither"),
    ],
)
def test_options_that_cannot_be(options, complaint):
    with pytest.raises(DataError) as error:
        StreamOptions(**options)
    assert str(error.value).startswith(complaint) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tasks": 8}, "7 classes cannot fill 8 tasks; ask for at most 7"),
        ({"base": 8, "increment": 1}, "base is 8, but there are 7 classes"),
    ],
)
def test_more_than_there_are_classes(options, complaint):
    with pytest.raises(DataError, match=complaint):
        group_classes(ANIMALS, StreamOptions(**options), 5)


def test_options_are_ready_for_json(tmp_path):
    path = written(tmp_path, "ant")
    for options in (
        StreamOptions(),
        StreamOptions("seed:2", base=2, increment=1),
        StreamOptions(task_file=path),
    ):
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
        "validation": 0.25,
        "blurry": 0.0,
        "disjoint": 0.0,
    }
    assert StreamOptions(task_file=str(path)) == StreamOptions(task_file=path)
