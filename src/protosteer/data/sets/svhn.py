"""SVHN's cropped digits, `train_32x32.mat` and `test_32x32.mat`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from protosteer.data.datasets import Dataset
from protosteer.data.sets.base import NUMERALS, DatasetInfo, Reading, all_of, arrays, gone, md5_of, remote
from protosteer.errors import DataError

FILES = ("train_32x32.mat", "test_32x32.mat")


def svhn_files(folder: Path) -> list[Path] | None:
    return all_of(folder, *FILES)


def read_svhn(path: Path) -> tuple[Tensor, Tensor]:
    """Pixels uint8 [N, 3, 32, 32] in file order and digits [N]; in the file the digit 0 is called 10."""
    from scipy.io import loadmat

    if not path.is_file():
        raise DataError(f"{path} is missing; fetch it with: protosteer datasets get svhn")
    try:
        table = loadmat(path, variable_names=["X", "y"])
        pixels, labels = np.asarray(table["X"]), np.asarray(table["y"]).reshape(-1)
    except Exception as error:  # a damaged file makes scipy raise nearly anything
        raise DataError(f"{path} is not an SVHN file ({error}); fetch it again") from error
    if pixels.dtype != np.uint8 or pixels.shape != (32, 32, 3, len(labels)):
        raise DataError(
            f"{path}: X is {pixels.dtype} {list(pixels.shape)} for {len(labels)} labels, "
            "not uint8 [32, 32, 3, N]; fetch it again"
        )
    if len(labels) and not 1 <= labels.min() <= labels.max() <= 10:
        raise DataError(
            f"{path}: labels run from {labels.min()} to {labels.max()}, not 1 to 10; fetch it again"
        )
    images = np.ascontiguousarray(pixels.transpose(3, 2, 0, 1))
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64) % 10)


def _load(folder: Path, reading: Reading) -> Dataset:
    train, test = svhn_files(folder) or gone(folder)
    return arrays("svhn", NUMERALS, read_svhn(train), read_svhn(test))


_PAGES = ("http://ufldl.stanford.edu/housenumbers",)
_FILES = (
    remote(_PAGES, "train_32x32.mat", 182_040_794, "e26dedcc434d2e4c54c9b2d4a06d8373"),
    remote(_PAGES, "test_32x32.mat", 64_275_384, "eb5a983be6a315427106f1b164d9cef3"),
)
SVHN = DatasetInfo(
    name="svhn",
    title="SVHN, cropped digits",
    classes=10,
    licence="non-commercial",
    source="http://ufldl.stanford.edu/housenumbers/",
    find=svhn_files,
    load=_load,
    files=_FILES,
    md5=md5_of(_FILES),
)
