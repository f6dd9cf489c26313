"""`MODEL.index`: how the classes of a model are parted into lists, so that a search need not part them anew.

A sealed file of numbers, beside the model, as anybody may have written it. What it says can at most make a search
miss; so it is checked for shape alone, and what cannot be used is left aside with one line.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from protosteer.errors import ModelFileError, ProtosteerWarning
from protosteer.search.ivf import Partition
from protosteer.util.files import real, write_atomically
from protosteer.util.reading import read_regular
from protosteer.util.tensor_file import pack_tensors, unpack_tensors

FORMAT = 1


def beside(model: str | Path) -> Path:
    """Where the index of a model file is."""
    path = real(Path(model))
    return path.with_name(path.name + ".index")


def write(model: str | Path, partition: Partition, backbone: str) -> None:
    """backbone: the fingerprint of the one whose embeddings were parted."""
    tensors = {
        "digests": partition.digests,
        "lists": partition.lists.int(),
        "centroids": partition.centroids,
    }
    header = {"index": FORMAT, "backbone": backbone, "changed": partition.changed}
    write_atomically(beside(model), pack_tensors(header, tensors))


def read(model: str | Path, backbone: str | None = None) -> Partition | None:
    """None where there is none, or none that can be used; then a line says so. backbone: None for any."""
    path = beside(model)
    try:
        return _checked(read_regular(path), path, backbone)
    except FileNotFoundError:
        return None
    except (OSError, ModelFileError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        warnings.warn(f"{path} is not used ({reason}); it will be made anew", ProtosteerWarning, stacklevel=3)
        return None


def follow(model: str | Path, names: Sequence[str]) -> None:
    """After a model was written: its index forgets the classes that the model forgot.

    One that cannot be read is removed, since nobody knows what is in it.
    """
    path = beside(model)
    if not path.is_file():
        return
    try:
        data = read_regular(path)
        partition = _checked(data, path, None)
        kept = partition.without_others(names)
        if not len(kept.digests):
            path.unlink()
        elif len(kept.digests) < len(partition.digests):
            write(model, kept, unpack_tensors(data, str(path))[0]["backbone"])
    except (ModelFileError, KeyError, TypeError, AttributeError):
        path.unlink(missing_ok=True)


def _checked(data: bytes, path: Path, backbone: str | None) -> Partition:
    header, tensors = unpack_tensors(data, path.name)
    if header.get("index") != FORMAT:
        raise TypeError("it is no index, or of another version")
    if backbone not in (None, header["backbone"]):
        raise TypeError("it is of another backbone")
    digests, lists, centroids = (tensors[name] for name in ("digests", "lists", "centroids"))
    _require(digests, torch.int64, 1)
    _require(lists, torch.int32, 1)
    _require(centroids, torch.float32, 2)
    if len(lists) != len(digests) or not bool(((lists >= 0) & (lists < len(centroids))).all()):
        raise TypeError("its lists are not those of its classes")
    if not bool((centroids.abs() <= 1.01).all()):  # false of NaN too
        raise TypeError("its centroids are no unit vectors")
    changed = header["changed"]
    if type(changed) is not int or changed < 0:
        raise TypeError("it does not tell how old it is")
    return Partition(digests, lists.long(), centroids, changed)


def _require(tensor: Tensor, kind: torch.dtype, axes: int) -> None:
    if tensor.dtype != kind or tensor.ndim != axes or not tensor.numel():
        raise TypeError(f"it has numbers of shape {list(tensor.shape)}, {tensor.dtype}")
