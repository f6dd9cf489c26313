"""Split Digits: the benchmark of the demo, whose figures depend on every image of it."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from expect import expect_error
from protosteer.data.images import ImageSet
from protosteer.errors import DataError
from protosteer.streams import split_digits


def pixels_of(images: ImageSet) -> torch.Tensor:
    return images.pixels(range(len(images)))


@pytest.mark.parametrize("tasks", [1, 2, 5, 10])
def test_the_same_images_labels_and_order_as_ever(tasks):
    """Twin: the split as it was when the demo's figures were first measured, image by image."""
    digits = load_digits()
    halves = train_test_split(np.arange(1797), test_size=0.5, stratify=digits.target, random_state=0)
    stream = split_digits(tasks)
    assert len(stream) == tasks and stream.name == "split-digits"
    for number, t in enumerate(stream):
        own = range(number * 10 // tasks, (number + 1) * 10 // tasks)
        assert t.name == f"task-{number + 1}" and t.classes == [str(digit) for digit in own]
        for half, images, labels in zip(halves, (t.train, t.test), (t.train_labels, t.test_labels), strict=True):
            kept = [row for row in sorted(half) if digits.target[row] in own]
            assert labels == [str(digits.target[row]) for row in kept]
            for image, row in zip(pixels_of(images), kept, strict=True):
                assert np.array_equal(image, np.round(np.stack([digits.images[row]] * 3) * 255 / 16))


def test_tasks_that_do_not_divide_ten():
    assert [len(t.classes) for t in split_digits(3)] == [4, 3, 3]
    with expect_error("too-few-classes", DataError):
        split_digits(11)
