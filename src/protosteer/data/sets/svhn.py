"""SVHN's cropped digits, `train_32x32.mat` and `test_32x32.mat`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from protosteer.errors import DataError

FILES = ("train_32x32.mat", "test_32x32.mat")


def svhn_files(folder: Path) -> list[Path] | None:
    paths = [folder / name for name in FILES]
    return paths if all(path.is_file() for path in paths) else None


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
