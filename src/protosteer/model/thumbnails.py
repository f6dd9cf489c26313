"""`MODEL.thumbs`: thumbnails of some of the images that a model was learned from, if the user keeps them.

A checksummed file beside the model: no prediction depends on it, and you may delete it at any time. Each thumbnail has
its class and the digest of the file it was made of. It stays as long as the model has that digest in that class: a
class that is forgotten, or a correction that is undone, loses its thumbnails with the same change.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from protosteer.errors import ModelFileError, ProtosteerWarning
from protosteer.model.memory import Memory
from protosteer.util.files import read_regular, real, write_atomically
from protosteer.util.tensor_file import pack_tensors, unpack_tensors

FORMAT = 1
_MAX_BYTES = 2**15  # of one thumbnail
_JPEG_START = b"\xff\xd8\xff"


class Thumb(NamedTuple):
    """One thumbnail."""

    name: str  # of its class
    digest: int  # of the file that it was made of
    jpeg: bytes


def beside(model: str | Path) -> Path:
    """Return where the thumbnails of a model file are."""
    path = real(Path(model))
    return path.with_name(path.name + ".thumbs")


def write(model: str | Path, thumbs: Iterable[Thumb]) -> None:
    """Replace the thumbnails of a model by these."""
    entries = sorted({(thumb.name, thumb.digest): thumb for thumb in thumbs}.values())
    names = sorted({thumb.name for thumb in entries})
    number = {name: i for i, name in enumerate(names)}
    tensors = {
        "classes": torch.tensor([number[thumb.name] for thumb in entries], dtype=torch.int32),
        "digests": torch.tensor([thumb.digest for thumb in entries], dtype=torch.int64),
        "sizes": torch.tensor([len(thumb.jpeg) for thumb in entries], dtype=torch.int32),
        "jpegs": torch.frombuffer(bytearray(b"".join(thumb.jpeg for thumb in entries)), dtype=torch.uint8),
    }
    data = pack_tensors({"thumbs": FORMAT, "classes": names}, tensors)
    write_atomically(beside(model), data, like=real(Path(model)))


def read(model: str | Path, memory: Memory) -> list[Thumb]:
    """Return the thumbnails of images that the model still knows; if the file is unusable, warn and return none."""
    path = beside(model)
    try:
        return _select_known(_parse(read_regular(path), path), memory)
    except FileNotFoundError:
        return []
    except (OSError, ModelFileError, KeyError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        warnings.warn(f"{path} is not used ({reason}); delete it", ProtosteerWarning, stacklevel=2)
        return []


def follow(model: str | Path, memory: Memory) -> None:
    """Remove the thumbnails of images that a model no longer knows, after it was written.

    A file that cannot be parsed is removed, since it may hold anything.
    """
    path = beside(model)
    if not path.is_file():
        return
    try:
        thumbs = _parse(read_regular(path), path)
        remaining_thumbs = _select_known(thumbs, memory)
    except (ModelFileError, KeyError, TypeError, ValueError):
        remaining_thumbs = thumbs = []
    if not remaining_thumbs:
        path.unlink(missing_ok=True)
    elif len(remaining_thumbs) < len(thumbs):
        write(model, remaining_thumbs)


def _select_known(thumbs: Iterable[Thumb], memory: Memory) -> list[Thumb]:
    thumbs = list(thumbs)
    pairs = set(memory.table.find_digests(thumb.digest for thumb in thumbs))
    return [thumb for thumb in thumbs if (thumb.digest, thumb.name) in pairs]


def _parse(data: bytes, path: Path) -> list[Thumb]:
    header, tensors = unpack_tensors(data, path.name)
    names = header.get("classes")
    if header.get("thumbs") != FORMAT or not isinstance(names, list):
        raise TypeError("it has no thumbnails, or another version")
    if not all(isinstance(name, str) for name in names):
        raise TypeError("its classes have no names")
    kinds = {"classes": torch.int32, "digests": torch.int64, "sizes": torch.int32, "jpegs": torch.uint8}
    if any(tensors[name].dtype != kind or tensors[name].ndim != 1 for name, kind in kinds.items()):
        raise TypeError("its columns have other types")
    classes, digests, sizes = (tensors[name].tolist() for name in ("classes", "digests", "sizes"))
    if any(not 0 <= number < len(names) for number in classes):
        raise TypeError("a thumbnail has no class")
    if any(not 0 < size <= _MAX_BYTES for size in sizes) or sum(sizes) != len(tensors["jpegs"]):
        raise TypeError("thumbnails have other sizes than it says")
    stream = io.BytesIO(tensors["jpegs"].numpy().tobytes())
    jpegs = [stream.read(size) for size in sizes]
    if not all(jpeg.startswith(_JPEG_START) for jpeg in jpegs):
        raise TypeError("a thumbnail is not a JPEG file")
    return [Thumb(names[n], digest, jpeg) for n, digest, jpeg in zip(classes, digests, jpegs, strict=True)]
