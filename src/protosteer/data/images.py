"""Present files, PIL images, arrays and torch Datasets as one indexable set of pixels.

Files, PIL images and Dataset items are decoded on demand and cropped to the preprocessing's canvas, so that
memory does not grow with the collection and every image has one size. Arrays stay as they are.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from protosteer.data.arrays import ACCEPTED, batched, to_uint8
from protosteer.data.image_files import image_exists, in_threads, opened
from protosteer.data.sources import image_paths, read_labelled
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError


class ImageSet(ABC):
    """Images of one size, fetched by row number."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def pixels(self, rows: Sequence[int]) -> Tensor:
        """Return uint8 [B, 3, h, w] for row numbers [B]."""

    def name(self, row: int) -> str:
        """Return the image's name for messages."""
        return f"image {row}"


class Chosen(ImageSet):
    """Rows of another set, in the order given; nothing is copied."""

    def __init__(self, images: ImageSet, rows: Sequence[int]):
        self.images = images
        self.rows = [int(row) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def pixels(self, rows: Sequence[int]) -> Tensor:
        """Return uint8 [B, 3, h, w] for row numbers [B]."""
        return self.images.pixels([self.rows[int(row)] for row in rows])

    def name(self, row: int) -> str:
        """Return the image's name for messages."""
        return self.images.name(self.rows[row])


class Joined(ImageSet):
    """Several sets one after the other, with images of one size."""

    def __init__(self, parts: Sequence[ImageSet]):
        self.parts = list(parts)
        self.index = [(part, row) for part in range(len(self.parts)) for row in range(len(self.parts[part]))]

    def __len__(self) -> int:
        return len(self.index)

    def pixels(self, rows: Sequence[int]) -> Tensor:
        """Return uint8 [B, 3, h, w] for row numbers [B], with one call of each part."""
        pairs = [self.index[int(row)] for row in rows]
        pixels: dict[int, Tensor] = {}
        for part in sorted({part for part, _ in pairs}):
            positions = [i for i, (owner, _) in enumerate(pairs) if owner == part]
            part_rows = [pairs[i][1] for i in positions]
            pixels |= dict(zip(positions, self.parts[part].pixels(part_rows), strict=True))
        return torch.stack([pixels[i] for i in range(len(pairs))])

    def name(self, row: int) -> str:
        """Return the image's name for messages."""
        part, part_row = self.index[row]
        return self.parts[part].name(part_row)


class ArrayImages(ImageSet):
    """Images uint8 [N, 3, h, w] in memory."""

    def __init__(self, array: Tensor):
        if array.dtype != torch.uint8 or array.ndim != 4 or array.shape[1] != 3:
            message = f"ArrayImages wants uint8 [N, 3, h, w], not {array.dtype} {list(array.shape)}"
            raise DataError(message, code="bad-array")
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def pixels(self, rows: Sequence[int]) -> Tensor:
        """Return uint8 [B, 3, h, w] for row numbers [B]."""
        return self.array[torch.as_tensor(rows, dtype=torch.long)]


class LazyImages(ImageSet):
    """`count` images that `load` returns by row number, each as a path, a PIL image or an array."""

    def __init__(self, count: int, load: Callable[[int], Any], preprocessing: Preprocessing):
        self.count = count
        self.load = load
        self.preprocessing = preprocessing

    def __len__(self) -> int:
        return self.count

    def pixels(self, rows: Sequence[int]) -> Tensor:
        """Decode row numbers [B] to uint8 [B, 3, h, w]."""
        return torch.stack([self._decode(int(row)) for row in rows])

    def _decode(self, row: int) -> Tensor:
        item = self.load(row)
        if isinstance(item, (str, os.PathLike)):
            with opened(Path(item)) as image:
                return self.preprocessing.to_canvas(image)
        if isinstance(item, Image.Image):
            return self.preprocessing.to_canvas(item)
        array = to_uint8(batched(item, self.name(row)), self.name(row))
        if len(array) != 1:
            raise DataError(f"{self.name(row)} has shape {list(item.shape)}; it must be one image", code="bad-array")
        return self.preprocessing.to_canvas(Image.fromarray(array[0].permute(1, 2, 0).numpy()))


class FileImages(LazyImages):
    """Image files, decoded by several threads."""

    def __init__(self, paths: Iterable[str | os.PathLike[str]], preprocessing: Preprocessing):
        self.paths = [Path(path) for path in paths]
        super().__init__(len(self.paths), self.paths.__getitem__, preprocessing)

    def pixels(self, rows: Sequence[int]) -> Tensor:
        """Decode row numbers [B] to uint8 [B, 3, h, w] in threads."""
        return torch.stack(list(in_threads(self._decode, [int(row) for row in rows])))

    def name(self, row: int) -> str:
        """Return the file's path."""
        return str(self.paths[row])


class ForgivingFiles(FileImages):
    """Image files, of which unreadable ones become black; `errors` has the reasons by row number."""

    def __init__(self, paths: Iterable[str | os.PathLike[str]], preprocessing: Preprocessing):
        super().__init__(paths, preprocessing)
        self.errors: dict[int, str] = {}

    def _decode(self, row: int) -> Tensor:
        try:
            return super()._decode(row)
        except DataError as error:
            self.errors[row] = str(error)
            side = self.preprocessing.canvas
            return torch.zeros(3, side, side, dtype=torch.uint8)

    def readable_rows(self) -> list[int]:
        """Return the rows of files that could be read; raise `DataError` if there are none."""
        rows = [i for i in range(len(self)) if i not in self.errors]
        if not rows:
            raise DataError(f"none of {len(self)} files could be read; the first: {self.errors[0]}", code="no-images")
        return rows

    def errors_by_path(self) -> dict[Path, str]:
        """Return what is wrong with each unreadable file."""
        return {self.paths[i]: error for i, error in sorted(self.errors.items())}


def as_images(data: Any, preprocessing: Preprocessing) -> ImageSet:
    """Read images without labels.

    Args:
        data: A path, a list of paths, PIL images or arrays, one image, an array [N, 3, H, W], or a torch Dataset.
        preprocessing: Defines the canvas to which images are cropped.

    Raises:
        DataError: There are no images, or `data` is of another type.
    """
    images = _as_images(data, preprocessing)
    if not len(images):
        raise DataError("there are no images: the collection is empty; give at least one image", code="no-images")
    return images


def as_labelled(data: Any, preprocessing: Preprocessing) -> tuple[ImageSet, list[str]]:
    """Read images and their labels.

    Args:
        data: A folder of class folders, a list file, a saved image set, a pair (images, labels), or a torch
            Dataset of (image, label).
        preprocessing: Defines the canvas to which images are cropped.

    Raises:
        DataError: `data` is of another type, or the numbers of images and labels differ.
    """
    if isinstance(data, (str, os.PathLike)):
        files = read_labelled(Path(data))
        return FileImages(files.paths, preprocessing), files.labels
    if isinstance(data, tuple) and len(data) == 2:
        images, labels = as_images(data[0], preprocessing), _labels(data[1])
    elif _is_dataset(data):
        images, labels = as_images(data, preprocessing), _dataset_labels(data)
    else:
        raise DataError(
            f"{type(data).__name__} cannot be learned from; give a folder of class folders, "
            "a pair (images, labels) or a torch Dataset of (image, label)",
            code="unsupported-data",
        )
    if len(images) != len(labels):
        raise DataError(f"{len(images)} images but {len(labels)} labels; give one label per image", code="label-count")
    return images, labels


def _as_images(data: Any, preprocessing: Preprocessing) -> ImageSet:
    if isinstance(data, ImageSet):
        return data
    if isinstance(data, (str, os.PathLike)):
        return FileImages(image_paths(Path(data)), preprocessing)
    if isinstance(data, (Tensor, np.ndarray)):
        return ArrayImages(to_uint8(batched(data, "the array"), "the array"))
    if isinstance(data, Image.Image):
        data = [data]
    if isinstance(data, TensorDataset):
        return _as_images(data.tensors[0], preprocessing)
    if isinstance(data, (list, tuple)):
        return _from_list(data, preprocessing)
    if _is_dataset(data):
        return LazyImages(len(data), lambda row: _image_of(data[row]), preprocessing)
    raise DataError(f"{type(data).__name__} cannot be read as images; give {ACCEPTED}", code="unsupported-data")


def _from_list(items: Sequence[Any], preprocessing: Preprocessing) -> ImageSet:
    if all(isinstance(item, (str, os.PathLike)) for item in items):
        absent_path = next((item for item in items if not image_exists(Path(item))), None)
        if absent_path is not None:
            raise DataError(f"{absent_path} is not a file; check the path", code="missing-file", path=absent_path)
        return FileImages(items, preprocessing)
    if all(isinstance(item, (Tensor, np.ndarray)) for item in items) and len({i.shape for i in items}) == 1:
        parts = [to_uint8(batched(item, f"image {i}"), f"image {i}") for i, item in enumerate(items)]
        if all(len(part) == 1 for part in parts):
            return ArrayImages(torch.cat(parts))
    return LazyImages(len(items), items.__getitem__, preprocessing)


def _labels(values: Any) -> list[str]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise DataError(f"labels are a {type(values).__name__}; give a list with one label per image", code="bad-label")
    items = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else list(values)
    return [_label(value, row) for row, value in enumerate(items)]


def _label(value: Any, row: int) -> str:
    """Return an integer or a string as a label; anything else is likely a mistake and raises."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, str) and value:
        return str(value)
    if isinstance(value, Integral):
        return str(int(value))
    message = f"label {row} is {value!r}; a label must be a whole number or a string that is not empty"
    raise DataError(message, code="bad-label", row=row)


def _is_dataset(data: Any) -> bool:
    indexable = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return indexable and not isinstance(data, (list, tuple, dict, bytes))


def _image_of(item: Any) -> Any:
    return item[0] if isinstance(item, (list, tuple)) else item


def _dataset_labels(dataset: Any) -> list[str]:
    """Return a Dataset's labels, without decoding images if it lists them in `targets`."""
    if isinstance(dataset, Subset):
        labels = _dataset_labels(dataset.dataset)
        return [labels[int(row)] for row in dataset.indices]
    targets = getattr(dataset, "targets", None)
    if targets is None or getattr(dataset, "target_transform", None) is not None:
        return [_item_label(dataset[row], row) for row in range(len(dataset))]
    labels = _labels(targets)
    names = getattr(dataset, "classes", None)
    if names is None:
        return labels
    return [str(names[int(label)]) if label.isdigit() else label for label in labels]


def _item_label(item: Any, row: int) -> str:
    if not isinstance(item, (list, tuple)) or len(item) < 2:
        message = f"item {row} of the dataset is not a pair (image, label); every item must be one"
        raise DataError(message, code="unsupported-data", row=row)
    return _label(item[1], row)
