"""Datasets whose pixels tell which image of which split they are."""

import numpy as np
import torch

from protosteer.data.images import ArrayImages, ImageSet
from protosteer.data.labelled import Dataset, Labelled
from protosteer.data.transforms import Preprocessing
from protosteer.streams import Benchmark, Task

HALF = (0.5, 0.5, 0.5)
PREPROCESSING = Preprocessing(16, HALF, HALF)
TEST = 128  # first pixel's red of a test image; 0 in training


def numbered(split: int, count: int, size: int = 2) -> ArrayImages:
    """The first pixel is (split, row // 256, row % 256)."""
    pixels = torch.zeros(count, 3, size, size, dtype=torch.uint8)
    rows = torch.arange(count)
    pixels[:, 0, 0, 0] = split
    pixels[:, 1, 0, 0], pixels[:, 2, 0, 0] = (rows // 256).to(torch.uint8), (rows % 256).to(torch.uint8)
    return ArrayImages(pixels)


def marks(images: ImageSet) -> list[tuple[int, int]]:
    """(split, row) of each image."""
    pixels = images.pixels(range(len(images)))[:, :, 0, 0].tolist()
    return [(split, high * 256 + low) for split, high, low in pixels]


def toy(classes: list[str], train: int | list[int] = 6, test: int | list[int] = 4, size: int = 2) -> Dataset:
    """`train` and `test` images per class (one number for all, or one each), mixed up in the files."""

    def split(mark: int, counts: int | list[int]) -> Labelled:
        each = [counts] * len(classes) if isinstance(counts, int) else counts
        labels = np.random.RandomState(mark).permutation(np.repeat(np.arange(len(classes)), each))
        return Labelled(numbered(mark, len(labels), size), torch.from_numpy(labels))

    return Dataset("toy", classes, split(0, train), split(TEST, test), {"toy.bin": "md5:0"})


TOY = Benchmark("toy-stream", "Toy", tasks=5, crop=1.0)


def by_class(tasks: list[Task], part: str) -> dict[str, list[tuple[int, int]]]:
    """Marks of each class's images over all tasks, in the order in which the tasks have them."""
    found: dict[str, list[tuple[int, int]]] = {}
    for task in tasks:
        for mark, label in zip(marks(getattr(task, part)), getattr(task, f"{part}_labels"), strict=True):
            found.setdefault(label, []).append(mark)
    return found
