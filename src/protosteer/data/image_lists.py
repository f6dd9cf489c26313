"""Lists of images: CSV, Parquet or lines of JSON with a column path, and to learn from, a column label."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from protosteer.data.class_folders import Files
from protosteer.data.hf_arrow import pyarrow
from protosteer.data.image_files import image_exists
from protosteer.errors import DataError, ProtosteerError
from protosteer.util.files import read_regular
from protosteer.util.text import listed, one_line

SUFFIXES = (".parquet", ".csv", ".jsonl")
_MOST_NAMED = 3

# Where a row stands, for people, and its cells in the columns that were asked for.
Rows = Iterator[tuple[str, list[Any]]]


def is_list(path: Path) -> bool:
    """Whether a file is no image but a list of them."""
    return path.suffix.lower() in SUFFIXES and path.is_file()


def read_paths(path: Path) -> list[Path]:
    """The images of a list. That they exist is not asked: whoever reads them will tell."""
    return _located(path, [_name(path, place, name) for place, (name,) in _rows(path, ["path"])])


def read_table(path: Path) -> Files:
    """The images of a list and their labels, in the order in which a folder of class folders would have them."""
    places, names, labels = [], [], []
    for place, (name, label) in _rows(path, ["path", "label"]):
        places.append(place)
        names.append(_name(path, place, name))
        labels.append(_label(path, place, label))
    files = Files(_located(path, names), labels)
    _refuse_twice(path, places, files)
    pairs = zip(places, files.paths, strict=True)
    missing = [f"{place}: {file}" for place, file in pairs if not image_exists(file)]
    if missing:
        raise DataError(
            f"{path} names files that are not there ({listed(missing, _MOST_NAMED)}); paths are relative to the "
            "folder of the list, or else to the one you are in",
            code="missing-file",
            path=path,
        )
    return files.rows(sorted(range(len(files)), key=lambda i: (files.labels[i], files.paths[i])))


def _located(path: Path, names: Sequence[str]) -> list[Path]:
    """Relative names belong to the folder of the list, or, if none of its files is there, to the current one."""
    if not names:
        raise DataError(f"{path} lists no images", code="no-images", path=path)
    folders = (path.parent, Path())
    base = next((f for f in folders if any(image_exists(f / name) for name in names)), path.parent)
    return [base / name for name in names]


def _refuse_twice(path: Path, places: Sequence[str], files: Files) -> None:
    first: dict[Path, int] = {}
    twice = [i for i, file in enumerate(files.paths) if first.setdefault(file, i) != i]
    if twice:
        again = [f"{places[first[files.paths[i]]]} and {places[i]}: {files.paths[i]}" for i in twice]
        raise DataError(
            f"{path} has images more than once ({listed(again, _MOST_NAMED)}); leave one row of each",
            code="repeated-image",
            path=path,
        )


def _name(path: Path, place: str, cell: Any) -> str:
    if isinstance(cell, str) and cell.strip() and "\0" not in cell:
        return cell
    raise DataError(
        f"{path}, {place}: column path has no file's name; fill it in, or remove the row",
        code="bad-list",
        path=path,
    )


def label_of(cell: Any) -> str | None:
    """Words and whole numbers; anything else is more likely a mistake than a class."""
    if isinstance(cell, str) and cell.strip():
        return cell
    return str(cell) if isinstance(cell, int) and not isinstance(cell, bool) else None


def _label(path: Path, place: str, cell: Any) -> str:
    label = label_of(cell)
    if label is not None:
        return label
    told = "is not there" if cell is None or cell == "" else f"is {cell!r}"
    raise DataError(
        f"{path}, {place}: the label {told}; give a word or a whole number, or remove the row",
        code="bad-label",
        path=path,
    )


def _rows(path: Path, columns: Sequence[str]) -> Rows:
    read = {".parquet": _parquet_rows, ".csv": _csv_rows, ".jsonl": _json_rows}[path.suffix.lower()]
    try:
        yield from read(path, columns)
    except ProtosteerError:
        raise
    except Exception as error:  # of a damaged file pyarrow makes nearly anything
        raise DataError(
            f"{path} cannot be read as a list of images ({one_line(str(error))})", code="bad-list", path=path
        ) from error


def _require(path: Path, there: Sequence[str], columns: Sequence[str]) -> None:
    missing = next((name for name in columns if name not in there), None)
    if missing is not None:
        raise DataError(
            f"{path} is not a list of images{' and labels' * (len(columns) > 1)}: it has no column {missing}; there "
            f"are: {listed(list(there))}",
            code="missing-column",
            name=missing,
        )


def _parquet_rows(path: Path, columns: Sequence[str]) -> Rows:
    file = pyarrow().parquet.ParquetFile(io.BytesIO(read_regular(path)))
    _require(path, file.schema_arrow.names, columns)
    row = 0
    for batch in file.iter_batches(columns=list(columns)):
        for cells in zip(*(batch.column(name).to_pylist() for name in columns), strict=True):
            row += 1
            yield f"row {row}", list(cells)


def _csv_rows(path: Path, columns: Sequence[str]) -> Rows:
    table = csv.DictReader(io.StringIO(read_regular(path).decode("utf-8-sig"), newline=""))
    _require(path, table.fieldnames or (), columns)
    for row in table:
        yield f"line {table.line_num}", [row[name] for name in columns]


def _json_rows(path: Path, columns: Sequence[str]) -> Rows:
    for number, line in enumerate(read_regular(path).decode("utf-8-sig").split("\n"), 1):
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}, line {number}: this is no JSON object; write one per line",
                    code="bad-list",
                    path=path,
                )
            _require(path, list(row), columns)
            yield f"line {number}", [row[name] for name in columns]
