"""Image sets of Hugging Face's `datasets`, as its `save_to_disk` leaves them: Arrow files, and JSON that lists them.

Such an image has a path like any other: that of the Arrow file, and in it the row, as if the file was a folder:
pets/data-00000-of-00002.arrow/17. So it is named, hashed, shared out and learned as a file is.

pyarrow is enough to read them; `datasets` itself would bring a dozen packages along.
"""

from __future__ import annotations

import errno
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from protosteer.errors import DataError, ProtosteerError, SettingsError
from protosteer.util.files import open_regular, read_regular
from protosteer.util.text import listed, one_line

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_SUFFIX = ".arrow"
_OPEN = 64  # Arrow files of a set that stay mapped into memory


def pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.fs
        import pyarrow.parquet
    except ImportError as error:
        raise SettingsError(
            f"Parquet and Arrow files need pyarrow ({error}); pip install 'protosteer[parquet]'",
            code="missing-extra",
            extra="parquet",
        ) from error
    return pyarrow


def is_set(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (STATE, INFO)) or (folder / SPLITS).is_file()


def read_set(folder: Path) -> list[tuple[Path, Any]]:
    """The images in their order, each with the name of its label, or else what stands in its place."""
    found: list[tuple[Path, Any]] = []
    for arrow in _arrow_files(folder):
        try:
            table, features = _opened(arrow)
            images = list(_image_paths(arrow, table, _image_column(features)))
            labels = _labels(table, features)
        except ProtosteerError:
            raise
        except Exception as error:  # of a damaged file pyarrow makes nearly anything
            raise DataError(
                f"{arrow} cannot be read as part of an image set ({one_line(str(error))}); save the set again",
                code="bad-image-set",
                path=arrow,
            ) from error
        found += zip(images, labels, strict=True)
    if not found:
        raise DataError(f"{folder} holds no images", code="no-images", path=folder)
    return found


def _arrow_files(folder: Path) -> list[Path]:
    if (folder / SPLITS).is_file():
        splits = [entry.name for entry in sorted(folder.iterdir()) if (entry / STATE).is_file()]
        one = f", such as {folder / max(splits, key='train'.__eq__)}" if splits else ""
        raise DataError(
            f"{folder} has several splits ({listed(splits)}); give one of them{one}",
            code="several-splits",
            path=folder,
            splits=splits,
        )
    try:
        names = [entry["filename"] for entry in json.loads(read_regular(folder / STATE))["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(
            f"{folder / STATE} lists no Arrow files ({one_line(str(error))})",
            code="bad-image-set",
            path=folder / STATE,
        ) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or Path(name).suffix != _SUFFIX:
            raise DataError(
                f"{folder / STATE} lists {name!r}, which is no Arrow file beside it",
                code="bad-image-set",
                path=folder / STATE,
            )
    return [folder / name for name in names]


def _opened(arrow: Path) -> tuple[Any, dict[str, Any]]:
    """An Arrow file as a table whose pages are read when they are looked at, and what its columns mean."""
    with open_regular(arrow) as file:  # refuses what is no file
        status = os.fstat(file.fileno())
    return _mapped(str(arrow), status.st_size, status.st_mtime_ns)


@functools.lru_cache(_OPEN)
def _mapped(arrow: str, size: int, time: int) -> tuple[Any, dict[str, Any]]:
    """size, time: so that a file that was changed is opened again."""
    pa = pyarrow()
    with pa.memory_map(arrow) as file, pa.ipc.open_stream(file) as stream:
        table = stream.read_all()
    table.validate(full=True)  # or a damaged file would make pyarrow read what is not there
    about = json.loads((table.schema.metadata or {})[b"huggingface"])
    return table, dict(about["info"]["features"])


def _image_column(features: dict[str, Any]) -> str:
    found = [name for name, feature in features.items() if _kind(feature) == "Image"]
    if len(found) > 1 and "image" in found:
        return "image"
    if len(found) != 1:
        raise DataError(
            f"the image set has {len(found)} columns of images, among {listed(list(features))}; save it with one, "
            "named image",
            code="image-column",
        )
    return found[0]


def _kind(feature: Any) -> str | None:
    return feature.get("_type") if isinstance(feature, dict) else None


def _image_paths(arrow: Path, table: Any, column: str) -> Iterator[Path]:
    """An image lies in the Arrow file, or is a file that is named there."""
    row = 0
    for chunk in table.column(column).chunks:
        parts = dict(zip((field.name for field in chunk.type), chunk.flatten(), strict=True))
        outside = parts["path"].to_pylist()
        for inside, name in zip(parts["bytes"].is_valid().to_pylist(), outside, strict=True):
            if not inside and not name:
                raise DataError(
                    f"{arrow / str(row)} has no image; leave such rows out with Dataset.filter",
                    code="row-without-image",
                    path=arrow / str(row),
                )
            yield arrow / str(row) if inside else arrow.parent / name
            row += 1


def _labels(table: Any, features: dict[str, Any]) -> list[Any]:
    """None where there is no label."""
    names = [name for name, feature in features.items() if _kind(feature) == "ClassLabel"]
    column = next((name for name in ("label", "labels", *names) if name in features), None)
    if column is None:
        return [None] * len(table)
    values = table.column(column).to_pylist()
    called: Sequence[str] | None = features[column].get("names") if column in names else None
    if called is None:
        return list(values)
    return [called[v] if isinstance(v, int) and 0 <= v < len(called) else None for v in values]


# Images in Arrow files


def is_row(path: Path) -> bool:
    """Whether a path is meant as a row of an Arrow file."""
    return path.parent.suffix == _SUFFIX and path.name.isdecimal()


def row_bytes(path: Path) -> bytes:
    """The file that a row holds as it was put there; an `OSError` where there is none."""
    return _of_row(path, lambda cell: cell.as_py())


def row_version(path: Path) -> tuple[int, int]:
    """Its size, and the time when its Arrow file was written, in nanoseconds."""
    return _of_row(path, lambda cell: len(cell.as_buffer())), path.parent.stat().st_mtime_ns


def _of_row(path: Path, what: Callable[[Any], Any]) -> Any:
    try:
        table, features = _opened(path.parent)
        return what(table.column(_image_column(features))[int(path.name)]["bytes"])
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EINVAL, f"no image in this row ({one_line(str(error))})", str(path)) from error
