"""The rules that every stream keeps, on small datasets whose images can be told apart."""

import json

import numpy as np
import pytest
import torch
from stream_toys import TEST, TOY, by_class, marks, toy

from expect import expect_error
from protosteer.data.images import ArrayImages, Chosen
from protosteer.data.labelled import Dataset, Labelled
from protosteer.errors import DataError
from protosteer.streams.base import Stream, StreamOptions, Task, build, draw_mask, training_view

ANIMALS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu"]
COUNTS = [3, 9, 1, 4, 2, 6, 5]
SPLITS = ("train", "test")


def made(dataset: Dataset, **options) -> Stream:
    return build(TOY, dataset, StreamOptions(**options))


def rows_of(part: Labelled, number: int) -> list[int]:
    return [row for row, label in enumerate(part.labels.tolist()) if label == number]


def task(name: str, classes: list[str]) -> Task:
    images = ArrayImages(torch.zeros(len(classes), 3, 4, 4, dtype=torch.uint8))
    return Task(name, classes, images, list(classes), images, list(classes))


def test_a_stream_is_a_sequence():
    stream = Stream("s", [task("1", ["b"]), task("2", ["a"]), task("3", ["c"])])
    assert stream.classes == ["b", "a", "c"] and len(stream) == 3 and stream.about == {}
    assert stream[-1] is stream.tasks[2] and stream[1:] == stream.tasks[1:]


def test_a_class_belongs_to_one_task():
    with expect_error("repeated-class", DataError, classes=["b"]):
        Stream("s", [task("1", ["a", "b"]), task("2", ["b", "c"])])


def test_a_task_keeps_to_its_classes():
    good = task("1", ["a", "b"])
    with expect_error("foreign-labels", DataError, labels=["z"]):
        Task("1", ["a", "b"], good.train, ["a", "b"], good.test, ["a", "z"])
    with expect_error("label-count-mismatch", DataError, task="1"):
        Task("1", ["a", "b"], good.train, ["a"], good.test, ["a", "b"])


@pytest.mark.parametrize(
    "options",
    [
        {"tasks": 1},
        {"tasks": 3},
        {"tasks": 7, "class_order": "seed:4"},
        {"base": 3, "increment": 3, "class_order": "seed:9"},
    ],
)
def test_every_class_in_one_task_and_every_image_used_once(options):
    dataset = toy(ANIMALS, COUNTS, COUNTS[::-1])
    stream = made(dataset, **options)
    assert sorted(stream.classes) == ANIMALS
    assert [t.name for t in stream] == [f"task-{i + 1}" for i in range(len(stream))]
    for split, first in zip(SPLITS, (0, TEST), strict=True):
        found = by_class(stream, split)
        part = getattr(dataset, split)
        expected = {label: [(first, row) for row in rows_of(part, k)] for k, label in enumerate(ANIMALS)}
        assert found == expected  # each class: all its rows, in file order, of the right split
        for t in stream:
            rows = [row for _, row in marks(getattr(t, split))]
            assert rows == sorted(rows)  # a task's classes are mixed as they are in the file
            assert set(getattr(t, f"{split}_labels")) == set(t.classes)


def test_any_order_gives_each_class_the_same_images():
    dataset = toy(ANIMALS, [2 * count for count in COUNTS], 3)
    options = {"tasks": 3, "train_per_class": 4, "validation": 0.3}
    natural = made(dataset, **options)
    for seed in range(5):
        shuffled = made(dataset, class_order=f"seed:{seed}", **options)
        assert shuffled.classes == [ANIMALS[i] for i in np.random.RandomState(seed).permutation(7)]
        for split in SPLITS:
            assert by_class(shuffled, split) == by_class(natural, split)


def test_a_task_file_may_leave_classes_out(tmp_path):
    path = tmp_path / "tasks.txt"
    path.write_text("gnu\nant,fox,cat\n")
    stream = made(toy(ANIMALS, COUNTS, [2, 0, 1, 1, 0, 1, 1]), task_file=path)  # 'bee' and 'eel' lack images
    assert [t.classes for t in stream] == [["gnu"], ["ant", "fox", "cat"]]
    assert [len(t.train) for t in stream] == [5, 3 + 6 + 1] and set(by_class(stream, "test")) == {
        "gnu",
        "ant",
        "fox",
        "cat",
    }


def test_caps_take_the_first_of_each_class_in_file_order():
    dataset = toy(ANIMALS, COUNTS, COUNTS[::-1])
    stream = made(dataset, tasks=2, train_per_class=4, test_per_class=2)
    for split, first, cap in (("train", 0, 4), ("test", TEST, 2)):
        found = by_class(stream, split)
        for k, label in enumerate(ANIMALS):
            assert found[label] == [(first, row) for row in rows_of(getattr(dataset, split), k)[:cap]]


def test_drawn_images_are_a_seeded_sample_in_file_order():
    dataset = toy(ANIMALS, 20, 12)
    options = {"tasks": 2, "train_per_class": 6, "test_per_class": 5, "shots": 3}
    stream = made(dataset, **options, draw=4)
    learned, judged = by_class(stream, "train"), by_class(stream, "test")
    later = stream[1].classes
    for k, label in enumerate(ANIMALS):
        rows = rows_of(dataset.train, k)
        six = np.sort(np.random.RandomState(4).permutation(20)[:6])
        some = six[np.sort(np.random.RandomState(4).permutation(6)[:3])] if label in later else six
        assert learned[label] == [(0, rows[i]) for i in some]
        assert len(judged[label]) == 5 and judged[label] == sorted(judged[label])
    assert judged == by_class(made(dataset, **options, draw=4), "test")
    assert judged != by_class(made(dataset, **options, draw=5), "test")
    assert by_class(made(dataset, draw=4), "train") == by_class(made(dataset), "train")  # all of them, without a cap


def test_images_are_views():
    dataset = toy(ANIMALS)
    for t in made(dataset, tasks=2):
        assert isinstance(t.train, Chosen) and t.train.images is dataset.train.images
        assert isinstance(t.test, Chosen) and t.test.images is dataset.test.images


@pytest.mark.parametrize("share", [0.001, 0.1, 0.25, 0.5, 0.99])
def test_validation_is_held_out_of_training_class_by_class(share):
    dataset = toy(ANIMALS, [20, 2, 3, 4, 10, 16, 5], 3)
    stream = made(dataset, tasks=3, validation=share)
    learned, judged = by_class(stream, "train"), by_class(stream, "test")
    for k, label in enumerate(ANIMALS):
        everything = rows_of(dataset.train, k)
        assert sorted(learned[label] + judged[label]) == [(0, row) for row in everything]  # no test image at all
        expected = min(max(round(share * len(everything)), 1), len(everything) - 1)
        assert len(judged[label]) == expected
    assert stream.about["judged_on"] == "validation" and made(dataset).about["judged_on"] == "test"
    for t in stream:
        assert marks(t.test) == sorted(marks(t.test)) and marks(t.train) == sorted(marks(t.train))


def test_validation_never_decodes_a_test_image():
    dataset = toy(ANIMALS)

    def locked(rows):
        raise AssertionError("a test image was looked at")

    dataset.test.images.pixels = locked
    for t in made(dataset, tasks=2, validation=0.2):
        assert len(t.test.pixels(range(len(t.test)))) == len(t.test_labels) > 0


def test_validation_comes_after_the_training_cap_and_before_the_test_cap():
    dataset = toy(ANIMALS, 20, 3)
    stream = made(dataset, train_per_class=10, test_per_class=3, validation=0.4)
    for k, label in enumerate(ANIMALS):
        first = [(0, row) for row in rows_of(dataset.train, k)[:10]]
        learned, judged = by_class(stream, "train")[label], by_class(stream, "test")[label]
        assert len(learned) == 6 and len(judged) == 3 and set(learned) | set(judged) < set(first)


def test_validation_is_the_same_for_ever_and_not_just_the_first_images():
    assert np.flatnonzero(draw_mask(10, 0.3)).tolist() == sorted(np.random.RandomState(0).permutation(10)[:3])
    np.random.seed(8)
    first = by_class(made(toy(ANIMALS, 20), validation=0.2), "test")
    assert first == by_class(made(toy(ANIMALS, 20), validation=0.2), "test")
    assert draw_mask(0, 0.5).tolist() == [] and draw_mask(1, 0.5).tolist() == [False]


@pytest.mark.parametrize(
    ("train", "test", "options", "name", "part"),
    [
        ([1, 1, 0], 2, {}, "cat", "training"),
        (2, [1, 0, 1], {}, "bee", "test"),
        ([1, 2, 2], 2, {"validation": 0.1}, "ant", "validation"),
        ([2, 2, 0], 2, {"validation": 0.1}, "cat", "training"),
        (3, 2, {"validation": 0.1, "train_per_class": 1}, "ant", "validation"),
    ],
)
def test_classes_without_images(train, test, options, name, part):
    with expect_error("class-without-images", DataError, name=name, part=part):
        made(toy(["ant", "bee", "cat"], train, test), **options)


def test_validation_does_without_test_images():
    assert len(made(toy(["ant", "bee"], 4, 0), validation=0.5)[0].test) == 2


def test_about_tells_where_the_tasks_come_from():
    stream = made(toy(ANIMALS, COUNTS), tasks=2, class_order="seed:4")
    about = stream.about
    assert json.loads(json.dumps(about)) == about
    assert about["name"] == stream.name == "toy-stream" and about["checksums"] == {"toy.bin": "md5:0"}
    assert about["options"] == StreamOptions("seed:4", tasks=2).to_dict()
    assert about["class_order"] == stream.classes and about["judged_on"] == "test"
    assert about["tasks"] == [
        {"name": t.name, "classes": t.classes, "train_images": len(t.train), "test_images": len(t.test)} for t in stream
    ]
    assert sum(row["train_images"] for row in about["tasks"]) == sum(COUNTS)


def test_images_of_a_task_that_is_over_cannot_be_read():
    images = ArrayImages(torch.zeros(2, 3, 4, 4, dtype=torch.uint8))
    task = Task("first", ["a"], images, ["a", "a"], images, ["a", "a"])
    with training_view(task) as view:
        assert view.train.pixels([1]).shape == (1, 3, 4, 4) and not hasattr(view, "test")
        copy = Chosen(view.train, [0])
    for gone in (view.train, copy):
        with expect_error("task-is-over", DataError, task="first"):
            gone.pixels([0])
