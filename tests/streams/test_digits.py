"""Split Digits: the benchmark of the demo, whose figures depend on every image of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from stream_toys import PREPROCESSING

from protosteer.data.images import ImageSet
from protosteer.errors import DataError
from protosteer.streams import StreamOptions, open_stream, split_digits


def pixels_of(images: ImageSet) -> torch.Tensor:
    return images.pixels(range(len(images)))


def rows(images: ImageSet) -> set[bytes]:
    return {image.numpy().tobytes() for image in pixels_of(images)}


@pytest.mark.parametrize("tasks", [1, 2, 5, 10])
def test_the_same_images_labels_and_order_as_ever(tasks):
    """Twin: the split as it was when the demo's figures were first measured, image by image."""
    digits = load_digits()
    halves = train_test_split(np.arange(1797), test_size=0.5, stratify=digits.target, random_state=0)
    for number, t in enumerate(split_digits(tasks)):
        own = range(number * 10 // tasks, (number + 1) * 10 // tasks)
        assert t.name == f"task-{number + 1}" and t.classes == [str(digit) for digit in own]
        for half, images, labels in zip(
            halves, (t.train, t.test), (t.train_labels, t.test_labels), strict=True
        ):
            kept = [row for row in sorted(half) if digits.target[row] in own]
            assert labels == [str(digits.target[row]) for row in kept]
            for image, row in zip(pixels_of(images), kept, strict=True):
                assert np.array_equal(image, np.round(np.stack([digits.images[row]] * 3) * 255 / 16))


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
        assert torch.equal(pixels_of(a.train), pixels_of(b.train)) and a.test_labels == b.test_labels


def test_pixels_are_grey_and_use_the_whole_range():
    pixels = torch.cat([pixels_of(part) for t in split_digits() for part in (t.train, t.test)])
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
            assert [known[image[0].numpy().tobytes()] for image in pixels_of(images)] == labels


@pytest.mark.parametrize(("tasks", "size"), [(1, 10), (2, 5), (10, 1)])
def test_other_numbers_of_tasks(tasks, size):
    assert [len(t.classes) for t in split_digits(tasks)] == [size] * tasks


def test_tasks_that_do_not_divide_ten():
    assert [len(t.classes) for t in split_digits(3)] == [4, 3, 3]
    with pytest.raises(DataError, match="10 classes cannot fill 11 tasks"):
        split_digits(11)


def test_it_is_the_registered_stream():
    stream = open_stream("split-digits", StreamOptions(), PREPROCESSING)
    for a, b in zip(stream, split_digits(), strict=True):
        assert torch.equal(pixels_of(a.train), pixels_of(b.train)) and a.test_labels == b.test_labels
