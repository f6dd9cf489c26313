"""Whatever the user has - files, PIL images, arrays, a torch Dataset - seen as one indexable set of pixels.

Files, PIL images and Dataset items are decoded when asked for and cut to the preprocessing's canvas, so
that memory does not grow with the collection and every image has one size. Arrays stay as they are.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError

SUFFIXES = frozenset(
    [
        ".apng",
        ".avif",
        ".bmp",
        ".gif",
        ".jfif",
        ".jp2",
        ".jpe",
        ".jpeg",
        ".jpg",
        ".pbm",
        ".pgm",
        ".png",
        ".pnm",
        ".ppm",
        ".tga",
        ".tif",
        ".tiff",
        ".webp",
    ]
)
ACCEPTED = "a path, a list of paths, PIL images, an array [N, 3, H, W] or a torch Dataset"


class ImageSet(ABC):
    """Images of one size, fetched by row number."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def pixels(self, rows: Sequence[int]) -> Tensor:
        """uint8 [len(rows), 3, h, w]."""

    def name(self, row: int) -> str:
        """What to call the image when speaking to the user."""
        return f"image {row}"


class Chosen(ImageSet):
    """Some rows of another set, in the order given; nothing is copied."""

    def __init__(self, images: ImageSet, rows: Sequence[int]):
        self.images = images
        self.rows = [int(row) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def pixels(self, rows: Sequence[int]) -> Tensor:
        return self.images.pixels([self.rows[int(row)] for row in rows])

    def name(self, row: int) -> str:
        return self.images.name(self.rows[row])


class Joined(ImageSet):
    """Several sets one after the other; their images must have one size."""

    def __init__(self, parts: Sequence[ImageSet]):
        self.parts = list(parts)
        self.places = [(part, row) for part in range(len(self.parts)) for row in range(len(self.parts[part]))]

    def __len__(self) -> int:
        return len(self.places)

    def pixels(self, rows: Sequence[int]) -> Tensor:
        places = [self.places[int(row)] for row in rows]
        found: dict[int, Tensor] = {}
        for part in sorted({part for part, _ in places}):
            here = [i for i, (owner, _) in enumerate(places) if owner == part]
            found |= dict(zip(here, self.parts[part].pixels([places[i][1] for i in here]), strict=True))
        return torch.stack([found[i] for i in range(len(places))])

    def name(self, row: int) -> str:
        part, own = self.places[row]
        return self.parts[part].name(own)


class ArrayImages(ImageSet):
    """uint8 [N, 3, h, w], in memory."""

    def __init__(self, array: Tensor):
        if array.dtype != torch.uint8 or array.ndim != 4 or array.shape[1] != 3:
            raise DataError(f"ArrayImages wants uint8 [N, 3, h, w], not {array.dtype} {list(array.shape)}")
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def pixels(self, rows: Sequence[int]) -> Tensor:
        return self.array[torch.as_tensor(rows, dtype=torch.long)]


class LazyImages(ImageSet):
    """`count` images that `load` gives one by one, each a path, a PIL image or an array."""

    def __init__(self, count: int, load: Callable[[int], Any], preprocessing: Preprocessing):
        self.count = count
        self.load = load
        self.preprocessing = preprocessing

    def __len__(self) -> int:
        return self.count

    def pixels(self, rows: Sequence[int]) -> Tensor:
        return torch.stack([self._decode(int(row)) for row in rows])

    def _decode(self, row: int) -> Tensor:
        item = self.load(row)
        if isinstance(item, (str, os.PathLike)):
            return _decode_file(Path(item), self.preprocessing)
        if isinstance(item, Image.Image):
            return self.preprocessing.to_canvas(item)
        array = _to_uint8(_batched(item, self.name(row)), self.name(row))
        if len(array) != 1:
            raise DataError(f"{self.name(row)} has shape {list(item.shape)}; it must be one image")
        return self.preprocessing.to_canvas(Image.fromarray(array[0].permute(1, 2, 0).numpy()))


class FileImages(LazyImages):
    """Image files, decoded by several threads: Pillow lets go of Python's lock while it works."""

    def __init__(self, paths: Iterable[str | os.PathLike[str]], preprocessing: Preprocessing):
        self.paths = [Path(path) for path in paths]
        super().__init__(len(self.paths), self.paths.__getitem__, preprocessing)

    def pixels(self, rows: Sequence[int]) -> Tensor:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            return torch.stack(list(pool.map(self._decode, (int(row) for row in rows))))

    def name(self, row: int) -> str:
        return str(self.paths[row])


class ForgivingFiles(FileImages):
    """Image files of which some may be unreadable: those are seen as black, and `errors` says what is wrong."""

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


def as_images(data: Any, preprocessing: Preprocessing) -> ImageSet:
    """Images without labels; a single image becomes a set of one."""
    images = _as_images(data, preprocessing)
    if not len(images):
        raise DataError("there are no images: the collection is empty; give at least one image")
    return images


def as_labelled(data: Any, preprocessing: Preprocessing) -> tuple[ImageSet, list[str]]:
    """A folder of class folders, a pair (images, labels), or a torch Dataset of (image, label)."""
    if isinstance(data, (str, os.PathLike)):
        paths, labels = class_folders(Path(data))
        return FileImages(paths, preprocessing), labels
    if isinstance(data, tuple) and len(data) == 2:
        images, labels = as_images(data[0], preprocessing), _labels(data[1])
    elif _is_dataset(data):
        images, labels = as_images(data, preprocessing), _dataset_labels(data)
    else:
        raise DataError(
            f"{type(data).__name__} cannot be learned from; give a folder of class folders, "
            "a pair (images, labels) or a torch Dataset of (image, label)"
        )
    if len(images) != len(labels):
        raise DataError(f"{len(images)} images but {len(labels)} labels; give one label per image")
    return images, labels


def _as_images(data: Any, preprocessing: Preprocessing) -> ImageSet:
    if isinstance(data, ImageSet):
        return data
    if isinstance(data, (str, os.PathLike)):
        return FileImages(image_files(Path(data)), preprocessing)
    if isinstance(data, (Tensor, np.ndarray)):
        return ArrayImages(_to_uint8(_batched(data, "the array"), "the array"))
    if isinstance(data, Image.Image):
        data = [data]
    if isinstance(data, TensorDataset):
        return _as_images(data.tensors[0], preprocessing)
    if isinstance(data, (list, tuple)):
        return _from_list(data, preprocessing)
    if _is_dataset(data):
        return LazyImages(len(data), lambda row: _image_of(data[row]), preprocessing)
    raise DataError(f"{type(data).__name__} cannot be read as images; give {ACCEPTED}")


def _from_list(items: Sequence[Any], preprocessing: Preprocessing) -> ImageSet:
    if all(isinstance(item, (str, os.PathLike)) for item in items):
        missing = next((item for item in items if not Path(item).is_file()), None)
        if missing is not None:
            raise DataError(f"{missing} is not a file; check the path")
        return FileImages(items, preprocessing)
    if all(isinstance(item, (Tensor, np.ndarray)) for item in items) and len({i.shape for i in items}) == 1:
        parts = [_to_uint8(_batched(item, f"image {i}"), f"image {i}") for i, item in enumerate(items)]
        if all(len(part) == 1 for part in parts):
            return ArrayImages(torch.cat(parts))
    return LazyImages(len(items), items.__getitem__, preprocessing)


# Files and folders


def _decode_file(path: Path, preprocessing: Preprocessing) -> Tensor:
    try:
        with Image.open(path) as image:
            return preprocessing.to_canvas(image)
    except Image.DecompressionBombError as error:
        raise DataError(f"{path} has too many pixels to be read safely; make it smaller ({error})") from error
    except Exception as error:  # a damaged file makes decoders raise nearly anything
        raise DataError(f"{path} cannot be read as an image; replace or remove it ({error})") from error


def image_files(path: Path) -> list[Path]:
    """The file itself, or every image below a folder."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist; check the path")
    found = _images_below(path)
    if not found:
        raise DataError(f"{path} holds no image files; these suffixes are read: {' '.join(sorted(SUFFIXES))}")
    return found


def _images_below(folder: Path) -> list[Path]:
    """Image files in the folder and its sub-folders, nothing hidden, in an order that is always the same."""
    return sorted(
        path
        for path in folder.rglob("*")
        if _is_image(path) and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def class_folders(folder: Path, wanted: Sequence[str] | None = None) -> tuple[list[Path], list[str]]:
    """Paths and class names of a folder whose sub-folders are the classes, all or those wanted."""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {problem}; give a folder that has one sub-folder per class")
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    loose = next((entry for entry in entries if _is_image(entry)), None)
    if loose is not None:
        raise DataError(f"{loose} lies outside any class folder; move it into a folder named after its class")
    classes = [entry for entry in entries if entry.is_dir()]
    if not classes:
        raise DataError(f"{folder} has no class folders; make one per class and put its images there")
    if wanted is not None:
        missing = next((name for name in wanted if folder / name not in classes), None)
        if missing is not None:
            raise DataError(f"{folder} has no class folder {missing}; put its images there")
        classes = [folder / name for name in wanted]
    paths: list[Path] = []
    labels: list[str] = []
    for entry in classes:
        found = _images_below(entry)
        if not found:
            raise DataError(f"class folder {entry} holds no image files; add images or remove the folder")
        paths += found
        labels += [entry.name] * len(found)
    return paths, labels


# Arrays


def _batched(array: Any, name: str) -> Tensor:
    """An array in one of the usual layouts -> [N, 3, h, w]; one that could mean two things is refused."""
    if not isinstance(array, (Tensor, np.ndarray)):
        raise DataError(f"{name} is a {type(array).__name__}; give {ACCEPTED}")
    shape = list(array.shape)
    is_numpy = isinstance(array, np.ndarray)
    x = array.detach().cpu() if isinstance(array, Tensor) else torch.from_numpy(_native(array, name))
    if x.ndim == 2:
        x = x[None, None]
    elif x.ndim == 3 and is_numpy and shape[2] in (1, 3):
        x = x.permute(2, 0, 1)[None]
    elif x.ndim == 3 and is_numpy and shape[0] == 3:
        raise DataError(f"{name} {shape} may be 1 colour or 3 grey images; use [1, 3, H, W] or [3, 1, H, W]")
    elif x.ndim == 3 and is_numpy:
        x = x[:, None]
    elif x.ndim == 3 and shape[0] in (1, 3):
        x = x[None]
    elif x.ndim == 4 and shape[1] not in (1, 3) and shape[3] in (1, 3):
        x = x.permute(0, 3, 1, 2)
    if x.ndim != 4 or x.shape[1] not in (1, 3) or 0 in x.shape[2:]:
        raise DataError(f"{name} has shape {shape}; give [N, 3, H, W], or [N, 1, H, W] for grey images")
    return x.expand(-1, 3, -1, -1)


def _native(array: np.ndarray, name: str) -> np.ndarray:
    """A copy-free view where possible; torch takes neither negative strides nor foreign byte order."""
    if array.dtype.kind not in "uif":
        raise DataError(f"{name} has dtype {array.dtype}; give uint8, or floats in [0, 1]")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


def _to_uint8(x: Tensor, name: str) -> Tensor:
    if x.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise DataError(f"{name} has dtype {x.dtype}; give uint8, or floats in [0, 1]")
    if x.dtype == torch.uint8 or not x.numel():
        return x.to(torch.uint8).contiguous()
    low, high = x.min().item(), x.max().item()
    if x.is_floating_point():
        if not (low >= 0 and high <= 1):  # also true of NaN
            raise DataError(
                f"{name} has floats from {low:.4g} to {high:.4g}; give pixel values, uint8 or in [0, 1] "
                "(normalised tensors go to Backbone.embed)"
            )
        return (x * 255).round().to(torch.uint8).contiguous()
    if low < 0 or high > 255:
        raise DataError(f"{name} has {x.dtype} values from {low} to {high}; give uint8, or floats in [0, 1]")
    return x.to(torch.uint8).contiguous()


# Labels and Datasets


def _labels(values: Any) -> list[str]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise DataError(f"labels are a {type(values).__name__}; give a list with one label per image")
    listed = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else list(values)
    return [_label(value, row) for row, value in enumerate(listed)]


def _label(value: Any, row: int) -> str:
    """Whole numbers of any library and strings; anything else is more likely a mistake than a class."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, str) and value:
        return str(value)
    if isinstance(value, Integral):
        return str(int(value))
    raise DataError(f"label {row} is {value!r}; a label must be a whole number or a string that is not empty")


def _is_dataset(data: Any) -> bool:
    indexable = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return indexable and not isinstance(data, (list, tuple, dict, bytes))


def _image_of(item: Any) -> Any:
    return item[0] if isinstance(item, (list, tuple)) else item


def _dataset_labels(dataset: Any) -> list[str]:
    """Labels without decoding the images where the dataset lists them in `targets`."""
    if isinstance(dataset, Subset):
        everything = _dataset_labels(dataset.dataset)
        return [everything[int(row)] for row in dataset.indices]
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
        raise DataError(f"item {row} of the dataset is not a pair (image, label); every item must be one")
    return _label(item[1], row)
