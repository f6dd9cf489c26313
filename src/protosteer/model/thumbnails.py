"""`MODEL.thumbs`: small pictures of some of the images that a model was taught, where the user chose to keep them.

A sealed file beside the model and no part of it: no answer depends on it, and it can be deleted at any time. Each
picture is known by its class and by the digest of the file that it was made of. It may stay as long as the model
has that digest in that class: what is forgotten or taken back loses its picture with the same change.
"""

from __future__ import annotations

import io
import stat
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
_MOST_BYTES = 2**15  # of one picture
_BEGIN = b"\xff\xd8\xff"  # of every JPEG file


class Thumb(NamedTuple):
    name: str  # of its class
    digest: int  # of the file that it was made of
    jpeg: bytes


def beside(model: str | Path) -> Path:
    """Where the thumbnails of a model file are."""
    path = real(Path(model))
    return path.with_name(path.name + ".thumbs")


def write(model: str | Path, thumbs: Iterable[Thumb]) -> None:
    """Those of the file that was there are gone, unless they are among these."""
    kept = sorted({(thumb.name, thumb.digest): thumb for thumb in thumbs}.values())
    names = sorted({thumb.name for thumb in kept})
    number = {name: i for i, name in enumerate(names)}
    tensors = {
        "classes": torch.tensor([number[thumb.name] for thumb in kept], dtype=torch.int32),
        "digests": torch.tensor([thumb.digest for thumb in kept], dtype=torch.int64),
        "sizes": torch.tensor([len(thumb.jpeg) for thumb in kept], dtype=torch.int32),
        "jpegs": torch.frombuffer(bytearray(b"".join(thumb.jpeg for thumb in kept)), dtype=torch.uint8),
    }
    place, file = beside(model), real(Path(model))
    if (
        file.is_file() and not place.exists()
    ):  # a file that is replaced keeps who may read it: whoever may the model
        place.touch(mode=stat.S_IMODE(file.stat().st_mode))
    write_atomically(place, pack_tensors({"thumbs": FORMAT, "classes": names}, tensors))


def read(model: str | Path, memory: Memory) -> list[Thumb]:
    """Of what is remembered; a file that cannot be used is told in a line, and as good as none."""
    path = beside(model)
    try:
        return _remembered(_checked(read_regular(path), path), memory)
    except FileNotFoundError:
        return []
    except (OSError, ModelFileError, KeyError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        warnings.warn(f"{path} is not used ({reason}); delete it", ProtosteerWarning, stacklevel=2)
        return []


def follow(model: str | Path, memory: Memory) -> None:
    """After a model was written: what it has forgotten has no thumbnail any more.

    A file that cannot be read is removed, since nobody knows what is in it.
    """
    path = beside(model)
    if not path.is_file():
        return
    try:
        thumbs = _checked(read_regular(path), path)
        kept = _remembered(thumbs, memory)
    except (ModelFileError, KeyError, TypeError, ValueError):
        kept = thumbs = []
    if not kept:
        path.unlink(missing_ok=True)
    elif len(kept) < len(thumbs):
        write(model, kept)


def _remembered(thumbs: Iterable[Thumb], memory: Memory) -> list[Thumb]:
    thumbs = list(thumbs)
    known = set(memory.table.find_digests(thumb.digest for thumb in thumbs))
    return [thumb for thumb in thumbs if (thumb.digest, thumb.name) in known]


def _checked(data: bytes, path: Path) -> list[Thumb]:
    header, tensors = unpack_tensors(data, path.name)
    names = header.get("classes")
    if header.get("thumbs") != FORMAT or not isinstance(names, list):
        raise TypeError("it has no thumbnails, or is of another version")
    if not all(isinstance(name, str) for name in names):
        raise TypeError("its classes have no names")
    kinds = {"classes": torch.int32, "digests": torch.int64, "sizes": torch.int32, "jpegs": torch.uint8}
    if any(tensors[name].dtype != kind or tensors[name].ndim != 1 for name, kind in kinds.items()):
        raise TypeError("its numbers are of another kind")
    classes, digests, sizes = (tensors[name].tolist() for name in ("classes", "digests", "sizes"))
    if any(not 0 <= number < len(names) for number in classes):
        raise TypeError("its pictures are of no class")
    if any(not 0 < size <= _MOST_BYTES for size in sizes) or sum(sizes) != len(tensors["jpegs"]):
        raise TypeError("its pictures have other sizes than it says")
    stream = io.BytesIO(tensors["jpegs"].numpy().tobytes())
    jpegs = [stream.read(size) for size in sizes]
    if not all(jpeg.startswith(_BEGIN) for jpeg in jpegs):
        raise TypeError("its pictures are no JPEG files")
    return [Thumb(names[n], digest, jpeg) for n, digest, jpeg in zip(classes, digests, jpegs, strict=True)]
