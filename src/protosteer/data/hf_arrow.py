"""Read image sets that Hugging Face's `datasets` saved with `save_to_disk`: Arrow files, and JSON that lists them.

The path of an image is its Arrow file and, as if that were a folder, its row, such as
pets/data-00000-of-00002.arrow/17. So every function that takes image files takes such images too.

pyarrow suffices; `datasets` would install a dozen packages.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from protosteer.errors import DataError, ProtosteerError, SettingsError
from protosteer.util.files import open_regular, read_regular
from protosteer.util.text import listed, one_line

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_SUFFIX = ".arrow"
# Each cell stands by itself. In dictionaries, views and runs, many rows can share one large text.
_PLAIN = ("primitive", "string", "large_string", "null")
_MAX_MAPPED = 64  # Arrow files that stay mapped into memory


def pyarrow() -> Any:
    """Import pyarrow with its file systems and Parquet.

    Raises:
        SettingsError: With code `missing-extra`.
    """
    try:
        import pyarrow
        import pyarrow.fs
        import pyarrow.parquet
    except ImportError as error:
        message = f"Parquet and Arrow files need pyarrow ({error}); pip install 'protosteer[parquet]'"
        raise SettingsError(message, code="missing-extra", extra="parquet") from error
    return pyarrow


def is_set(folder: Path) -> bool:
    """Return True if a folder holds a saved image set, or several splits of one."""
    return all((folder / name).is_file() for name in (STATE, INFO)) or (folder / SPLITS).is_file()


def read_set(folder: Path) -> list[tuple[Path, Any]]:
    """List a set's images in order, each with the name of its label, or its raw value if it has no name.

    Raises:
        DataError: The set is damaged, empty, or has several splits.
    """
    rows: list[tuple[Path, Any]] = []
    for arrow in _arrow_files(folder):
        try:
            table, features = _open_table(arrow)
            images = list(_image_paths(arrow, table, _image_column(features)))
            labels = _labels(table, features)
        except ProtosteerError:
            raise
        except Exception as error:  # damaged files make pyarrow raise nearly anything
            message = f"{arrow} cannot be read as part of an image set ({one_line(str(error))}); save the set again"
            raise DataError(message, code="bad-image-set", path=arrow) from error
        rows += zip(images, labels, strict=True)
    if not rows:
        raise DataError(f"{folder} holds no images", code="no-images", path=folder)
    return rows


def _arrow_files(folder: Path) -> list[Path]:
    if (folder / SPLITS).is_file():
        splits = [entry.name for entry in sorted(folder.iterdir()) if (entry / STATE).is_file()]
        example = f", such as {folder / max(splits, key='train'.__eq__)}" if splits else ""
        message = f"{folder} has several splits ({listed(splits)}); give one of them{example}"
        raise DataError(message, code="several-splits", path=folder, splits=splits)
    try:
        names = [entry["filename"] for entry in json.loads(read_regular(folder / STATE))["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        message = f"{folder / STATE} lists no Arrow files ({one_line(str(error))})"
        raise DataError(message, code="bad-image-set", path=folder / STATE) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or Path(name).suffix != _SUFFIX:
            message = f"{folder / STATE} lists {name!r}, which is no Arrow file beside it"
            raise DataError(message, code="bad-image-set", path=folder / STATE)
    return [folder / name for name in names]


def _open_table(arrow: Path) -> tuple[Any, dict[str, Any]]:
    """Map an Arrow file into memory; return its table and the features of its columns."""
    with open_regular(arrow) as file:  # rejects what is not a regular file
        status = os.fstat(file.fileno())
    return _map_table(str(arrow), status.st_size, status.st_mtime_ns)


@functools.lru_cache(_MAX_MAPPED)
def _map_table(arrow: str, size: int, time: int) -> tuple[Any, dict[str, Any]]:
    """Map a file; `size` and `time` make sure that a changed file is mapped again."""
    pa = pyarrow()
    with pa.memory_map(arrow) as file:
        if any(_is_compressed(message) for message in pa.ipc.MessageReader.open_stream(file)):
            raise ValueError("its buffers are compressed, which `datasets` never does")
        file.seek(0)
        with pa.ipc.open_stream(file) as stream:
            table = stream.read_all()
    table.validate(full=True)  # else pyarrow would read beyond the end of a damaged file
    metadata = json.loads((table.schema.metadata or {})[b"huggingface"])
    return table, dict(metadata["info"]["features"])


def _is_compressed(message: Any) -> bool:
    """Return whether the buffers of a message are compressed, which could take any memory, by its metadata, a flatbuffer.

    A table begins with the distance back to its vtable, which has the position of each field, or 0 if it is absent.
    The header is field 2 of a message, the rows are field 1 of a dictionary, and their compression is field 3.
    """
    data = bytes(message.metadata)

    def field(table: int, number: int) -> int:
        vtable = table - struct.unpack_from("<i", data, table)[0]
        if 4 + 2 * number >= struct.unpack_from("<H", data, vtable)[0]:
            return 0
        position = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0]
        return table + position if position else 0

    def target(place: int) -> int:
        return int(place + struct.unpack_from("<I", data, place)[0])

    if message.type not in ("record batch", "dictionary"):
        return False
    rows = target(field(target(0), 2))
    if message.type == "dictionary":
        rows = target(field(rows, 1))
    return field(rows, 3) != 0


def _image_column(features: dict[str, Any]) -> str:
    columns = [name for name, feature in features.items() if _kind(feature) == "Image"]
    if len(columns) > 1 and "image" in columns:
        return "image"
    if len(columns) != 1:
        raise DataError(
            f"the image set has {len(columns)} columns of images, among {listed(list(features))}; save it with one, "
            "named image",
            code="image-column",
        )
    return columns[0]


def _kind(feature: Any) -> str | None:
    return feature.get("_type") if isinstance(feature, dict) else None


def _image_paths(arrow: Path, table: Any, column: str) -> Iterator[Path]:
    """Yield each row's path: of the row if it holds the image, else of the file that it names."""
    row = 0
    for chunk in table.column(column).chunks:
        parts = dict(zip((field.name for field in chunk.type), chunk.flatten(), strict=True))
        _require_type(parts["bytes"], "binary", "large_binary")
        names = _require_type(parts["path"], *_PLAIN).to_pylist()
        for embedded, name in zip(parts["bytes"].is_valid().to_pylist(), names, strict=True):
            if not embedded and not name:
                message = f"{arrow / str(row)} has no image; leave such rows out with Dataset.filter"
                raise DataError(message, code="row-without-image", path=arrow / str(row))
            yield arrow / str(row) if embedded else arrow.parent / name
            row += 1


def _require_type(column: Any, *kinds: str) -> Any:
    """Return a column whose type is one of `pyarrow.types.is_...`; raise a `ValueError` for others."""
    if not any(getattr(pyarrow().types, f"is_{kind}")(column.type) for kind in kinds):
        raise ValueError(f"a column is of type {column.type}, which `datasets` never writes here")
    return column


def _labels(table: Any, features: dict[str, Any]) -> list[Any]:
    """Return each row's label; None where there is none."""
    names = [name for name, feature in features.items() if _kind(feature) == "ClassLabel"]
    column = next((name for name in ("label", "labels", *names) if name in features), None)
    if column is None:
        return [None] * len(table)
    values = _require_type(table.column(column), *_PLAIN).to_pylist()
    classes: Sequence[str] | None = features[column].get("names") if column in names else None
    if classes is None:
        return list(values)
    return [classes[v] if isinstance(v, int) and 0 <= v < len(classes) else None for v in values]


def is_row(path: Path) -> bool:
    """Return True if a path denotes a row of an Arrow file."""
    return path.parent.suffix == _SUFFIX and path.name.isdecimal()


def row_bytes(path: Path) -> bytes:
    """Return the image file that a row holds; raise `OSError` if there is none."""
    return _of_row(path, lambda cell: cell.as_py())


def row_version(path: Path) -> tuple[int, int]:
    """Return the size of a row's image, and the modification time of its Arrow file in nanoseconds."""
    return _of_row(path, lambda cell: len(cell.as_buffer())), path.parent.stat().st_mtime_ns


def _of_row(path: Path, read: Callable[[Any], Any]) -> Any:
    try:
        table, features = _open_table(path.parent)
        return read(table.column(_image_column(features))[int(path.name)]["bytes"])
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EINVAL, f"no image in this row ({one_line(str(error))})", str(path)) from error
