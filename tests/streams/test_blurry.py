"""Images that visit other tasks: how many, which, and that nothing else changes."""

import json
from collections import Counter

import numpy as np
import pytest
from stream_toys import TOY, by_class, marks, toy

from expect import expect_error
from protosteer.errors import DataError
from protosteer.streams.base import Stream, StreamOptions, Task, build, training_view

NAMES = [f"class-{i}" for i in range(12)]
COUNTS = [40, 61, 1, 2, 25, 33, 40, 40, 17, 80, 5, 12]


def made(counts: int | list[int] = COUNTS, **options) -> Stream:
    return build(TOY, toy(NAMES, counts), StreamOptions(**{"tasks": 4, **options}))


def homes(stream: Stream) -> dict[str, dict[str, int]]:
    """How many training images of each class are in which task."""
    found: dict[str, dict[str, int]] = {}
    for task in stream:
        for label, count in Counter(task.train_labels).items():
            found.setdefault(label, {})[task.name] = count
    return found


@pytest.mark.parametrize("share", [0.1, 0.3, 0.95])
def test_a_share_of_every_class_is_in_other_tasks_and_every_image_is_used_once(share):
    plain, stream = made(), made(blurry=share)
    assert stream.blurry and not plain.blurry and stream.classes == plain.classes
    for name, rows in by_class(plain, "train").items():
        assert sorted(by_class(stream, "train")[name]) == rows
    for before, task in zip(plain, stream, strict=True):
        assert task.classes == before.classes and marks(task.test) == marks(before.test)
        assert marks(task.train) == sorted(marks(task.train))  # in file order, visitors among them
        assert set(task.visiting) == set(task.train_labels) - set(task.classes)
        for name in task.classes:
            images = COUNTS[NAMES.index(name)]
            leaving = min(round(share * images), images - 1)
            assert homes(stream)[name][task.name] == images - leaving > 0
        visitors = Counter(label for label in task.train_labels if label not in task.classes)
        assert task.visitors == visitors == stream.about["tasks"][stream.tasks.index(task)]["visiting"]
    assert json.loads(json.dumps(stream.about)) == stream.about and "visiting" not in plain.about["tasks"][0]


def test_which_images_leave_and_where_they_go_is_drawn_evenly():
    stream = made(800, blurry=0.5)
    places = homes(stream)
    for task in stream:
        for name in task.classes:
            assert places[name].pop(task.name) == 400
            assert len(places[name]) == 3  # about 133 each, in no fixed number
            assert all(90 < count < 180 for count in places[name].values())
    assert len({tuple(some.values()) for some in places.values()}) > 6
    order = {name: sorted(rows) for name, rows in by_class(made(800), "train").items()}
    for task in stream:
        stayed = [
            mark for mark, label in zip(marks(task.train), task.train_labels, strict=True) if label == task.classes[0]
        ]
        numbers = [order[task.classes[0]].index(mark) for mark in stayed]
        assert 340 < np.mean(numbers) < 460  # neither the first nor the last of the file


def test_disjoint_classes_stay_whole():
    stream = made(20, blurry=0.2, disjoint=0.5)
    whole = [name for name, tasks in homes(stream).items() if len(tasks) == 1]
    assert len(whole) == 6 and made(20, blurry=0.2, disjoint=0.04).classes == stream.classes
    others = [made(20, blurry=0.2, disjoint=0.5, class_order=f"seed:{seed}") for seed in (1, 2)]
    assert len({tuple(n for n, t in homes(s).items() if len(t) == 1) for s in (stream, *others)}) == 3


def test_the_seed_is_the_class_orders():
    def rows(**options):
        return [marks(task.train) for task in made(blurry=0.3, **options)]

    assert rows() == rows() and rows(class_order="seed:5") == rows(class_order="seed:5")
    same, other = (homes(made(blurry=0.3, class_order=order)) for order in ("natural", "seed:5"))
    assert same != other


def test_the_draw_of_a_class_depends_on_no_other():
    ours = by_class(made(blurry=0.3), "train")["class-1"]
    changed = [c if i == 1 else 30 for i, c in enumerate(COUNTS)]
    first, second = (made(counts, blurry=0.3) for counts in (COUNTS, changed))
    assert homes(first)["class-1"] == homes(second)["class-1"] and len(ours) == 61


def test_a_method_is_not_told_who_visits():
    task = made(blurry=0.3)[1]
    with training_view(task) as view:
        assert view.classes == [*task.classes, *task.visiting] and view.train_labels == task.train_labels
        assert not hasattr(view, "visiting")


def test_classes_that_have_come():
    stream = made(blurry=0.3)
    assert stream.classes_until(3) == set(NAMES)
    assert stream.classes_until(0) == set(stream[0].train_labels) > set(stream[0].classes)


def test_what_cannot_be():
    with expect_error("too-few-tasks", DataError):
        made(blurry=0.1, tasks=1)
    good = made()[0]
    with expect_error("foreign-labels", DataError, labels=["z"]):
        Task("1", ["a"], good.train, ["z"] * len(good.train), good.test, ["a"] * len(good.test), ["b"])
