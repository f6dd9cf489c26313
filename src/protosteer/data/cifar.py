"""CIFAR-100 in its official Python format, read without executing anything that a pickle may ask for."""

from __future__ import annotations

import codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protosteer.errors import DataError

# All that an array needs to be rebuilt; any other name in a pickle is refused.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    ("numpy._core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,  # how Python 3 writes bytes for Python 2
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no CIFAR file needs; do not trust it"
            )
        return _ALLOWED[module, name]


def read_cifar100(folder: str | Path, split: str) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Pixels uint8 [N, 3, 32, 32] in file order, fine labels [N], and the names of the 100 classes.

    folder: holds the files `train`, `test` and `meta` (the unpacked `cifar-100-python`). split: which file.
    """
    table = _unpickle(Path(folder) / split)
    names = _unpickle(Path(folder) / "meta")["fine_label_names"]
    pixels = torch.from_numpy(np.array(table["data"]).reshape(-1, 3, 32, 32))
    return pixels, torch.tensor(table["fine_labels"]), list(names)


def _unpickle(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return dict(_ArraysOnly(file, encoding="latin1").load())
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; unpack cifar-100-python.tar.gz there") from error
    except (pickle.UnpicklingError, EOFError, ValueError) as error:
        raise DataError(f"{path} is not a CIFAR-100 file: {error}") from error
