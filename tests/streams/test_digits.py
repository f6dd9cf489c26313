"""Streams: the rules every stream keeps, and Split Digits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from protosteer.data.images import ArrayImages
from protosteer.errors import DataError
from protosteer.streams import Stream, Task, split_digits


def task(name: str, classes: list[str]) -> Task:
    images = ArrayImages(torch.zeros(len(classes), 3, 4, 4, dtype=torch.uint8))
    return Task(name, classes, images, list(classes), images, list(classes))


def rows(images: ArrayImages) -> set[bytes]:
    return {image.numpy().tobytes() for image in images.array}


def test_five_tasks_of_two_digits():
    stream = split_digits()
    assert len(stream) == 5 and stream.name == "split-digits"
    assert stream.classes == [str(i) for i in range(10)]
    assert [t.classes for t in stream] == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"], ["8", "9"]]
    assert stream[-1] is stream.tasks[4] and stream[1:3] == stream.tasks[1:3]
    assert len({t.name for t in stream}) == 5
    for t in stream:
        assert set(t.train_labels) == set(t.test_labels) == set(t.classes)


def test_halves_are_stratified_disjoint_and_complete():
    stream = split_digits()
    train = [label for t in stream for label in t.train_labels]
    test = [label for t in stream for label in t.test_labels]
    assert len(train) + len(test) == 1797 and abs(len(train) - len(test)) <= 1
    for digit in stream.classes:
        assert abs(train.count(digit) - test.count(digit)) <= 1
    for t in stream:
        assert not rows(t.train) & rows(t.test)


def test_the_split_is_fixed():
    first = split_digits()
    np.random.seed(7)
    torch.manual_seed(7)
    for a, b in zip(first, split_digits(), strict=True):
        assert torch.equal(a.train.array, b.train.array) and a.test_labels == b.test_labels


def test_pixels_are_grey_and_use_the_whole_range():
    pixels = torch.cat([part.array for t in split_digits() for part in (t.train, t.test)])
    assert pixels.dtype == torch.uint8 and pixels.shape == (1797, 3, 8, 8)
    assert torch.equal(pixels[:, 0], pixels[:, 1]) and torch.equal(pixels[:, 0], pixels[:, 2])
    assert pixels.min() == 0 and pixels.max() == 255


def test_images_go_with_their_labels():
    digits = load_digits()
    known = {
        (image * 255 / 16).round().astype(np.uint8).tobytes(): str(label)
        for image, label in zip(digits.images, digits.target, strict=True)
    }
    for t in split_digits():
        for images, labels in ((t.train, t.train_labels), (t.test, t.test_labels)):
            assert [known[image[0].numpy().tobytes()] for image in images.array] == labels


@pytest.mark.parametrize(("tasks", "size"), [(1, 10), (2, 5), (10, 1)])
def test_other_numbers_of_tasks(tasks, size):
    assert [len(t.classes) for t in split_digits(tasks)] == [size] * tasks


def test_tasks_that_do_not_divide_ten():
    with pytest.raises(DataError, match="3 tasks"):
        split_digits(3)


def test_a_class_belongs_to_one_task():
    with pytest.raises(DataError, match="'b'"):
        Stream("s", [task("1", ["a", "b"]), task("2", ["b", "c"])])
    assert Stream("s", [task("1", ["b"]), task("2", ["a"])]).classes == ["b", "a"]


def test_a_task_keeps_to_its_classes():
    good = task("1", ["a", "b"])
    with pytest.raises(DataError, match="test labels .*'z'"):
        Task("1", ["a", "b"], good.train, ["a", "b"], good.test, ["a", "z"])
    with pytest.raises(DataError, match="2 training images but 1 labels"):
        Task("1", ["a", "b"], good.train, ["a"], good.test, ["a", "b"])
