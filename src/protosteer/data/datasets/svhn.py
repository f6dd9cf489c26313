"""SVHN's cropped digits, `train_32x32.mat` and `test_32x32.mat`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from protosteer.data.datasets.base import NUMERALS, DatasetInfo, all_of, arrays, damaged_file
from protosteer.data.downloads import Remote
from protosteer.util.files import open_regular

PAGES = ("http://ufldl.stanford.edu/housenumbers",)


def read_svhn(path: Path) -> tuple[Tensor, Tensor]:
    """Read pixels uint8 [N, 3, 32, 32] in file order and digits [N]; the file has 10 for the digit 0."""
    from scipy.io import loadmat

    try:
        with open_regular(path) as file:
            table = loadmat(file, variable_names=["X", "y"])
        pixels = np.asarray(table["X"], dtype=np.uint8).reshape(32, 32, 3, -1).transpose(3, 2, 0, 1)
        digits = np.asarray(table["y"], dtype=np.int64).reshape(-1) % 10
    except Exception as error:  # a damaged file makes scipy raise nearly anything
        raise damaged_file(path, f"is not an SVHN file ({error})") from error
    return torch.from_numpy(np.ascontiguousarray(pixels)), torch.from_numpy(digits)


SVHN = DatasetInfo(
    name="svhn",
    title="SVHN, cropped digits",
    classes=10,
    licence="non-commercial",
    source="http://ufldl.stanford.edu/housenumbers/",
    find=lambda folder: all_of(folder, "train_32x32.mat", "test_32x32.mat"),
    read=lambda files, reading: arrays(NUMERALS, *(read_svhn(path) for path in files)),
    files=(
        Remote("train_32x32.mat", 182_040_794, PAGES, "e26dedcc434d2e4c54c9b2d4a06d8373"),
        Remote("test_32x32.mat", 64_275_384, PAGES, "eb5a983be6a315427106f1b164d9cef3"),
    ),
)
