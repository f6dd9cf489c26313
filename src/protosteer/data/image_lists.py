"""Read lists of images: CSV, Parquet or JSON lines with a column `path`, and to learn from, a column `label`."""

from __future__ import annotations

import csv
import io
import json
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from protosteer.data.class_folders import Files
from protosteer.data.hf_arrow import pyarrow
from protosteer.data.image_files import image_exists
from protosteer.data.parquet_guard import check_pages, max_rows, max_size
from protosteer.errors import DataError, ProtosteerError
from protosteer.util.files import read_regular
from protosteer.util.text import listed, one_line

SUFFIXES = (".parquet", ".csv", ".jsonl")
_MAX_NAMED = 3  # rows that a message names
_MAX_PATH = 4096  # characters, as Linux allows

# Position of a row for messages, and its cells in the requested columns.
Rows = Iterator[tuple[str, list[Any]]]


def is_list(path: Path) -> bool:
    """Return True if a file is a list of images."""
    return path.suffix.lower() in SUFFIXES and path.is_file()


def read_paths(path: Path) -> list[Path]:
    """Return the paths of a list's images, which need not exist.

    Raises:
        DataError: The list is empty, damaged, or lacks a column or a path.
    """
    return _locate(path, [_name(path, position, name) for position, (name,) in _rows(path, ["path"])])


def read_table(path: Path) -> Files:
    """Read images and labels of a list, sorted as a folder of class folders would be.

    Raises:
        DataError: As `read_paths`; also if a label is bad, an image is missing or listed twice.
    """
    positions, names, labels = [], [], []
    for position, (name, label) in _rows(path, ["path", "label"]):
        positions.append(position)
        names.append(_name(path, position, name))
        labels.append(_label(path, position, label))
    files = Files(_locate(path, names), labels)
    _reject_repeated(path, positions, files)
    pairs = zip(positions, files.paths, strict=True)
    absent_files = [f"{position}: {file}" for position, file in pairs if not image_exists(file)]
    if absent_files:
        message = (
            f"{path} names files that are not there ({listed(absent_files, _MAX_NAMED)}); paths are relative to the "
            "folder of the list, or else to the one you are in"
        )
        raise DataError(message, code="missing-file", path=path)
    return files.rows(sorted(range(len(files)), key=lambda i: (files.labels[i], files.paths[i])))


def _locate(path: Path, names: Sequence[str]) -> list[Path]:
    """Resolve names relative to the list's folder or, if no file is there, to the current one."""
    if not names:
        raise DataError(f"{path} lists no images", code="no-images", path=path)
    folders = (path.parent, Path())
    base = next((f for f in folders if any(image_exists(f / name) for name in names)), path.parent)
    return [base / name for name in names]


def _reject_repeated(path: Path, positions: Sequence[str], files: Files) -> None:
    rows_by_path: dict[Path, int] = {}
    repeated = [i for i, file in enumerate(files.paths) if rows_by_path.setdefault(file, i) != i]
    if repeated:
        rows = [f"{positions[rows_by_path[files.paths[i]]]} and {positions[i]}: {files.paths[i]}" for i in repeated]
        message = f"{path} has images more than once ({listed(rows, _MAX_NAMED)}); leave one row of each"
        raise DataError(message, code="repeated-image", path=path)


def _name(path: Path, position: str, cell: Any) -> str:
    if isinstance(cell, str) and cell.strip() and "\0" not in cell and len(cell) <= _MAX_PATH:
        return cell
    message = f"{path}, {position}: column path has no file's name; fill it in, or remove the row"
    raise DataError(message, code="bad-list", path=path)


def label_of(cell: Any) -> str | None:
    """Return a cell as a label: words and whole numbers; None for anything else, which is likely a mistake."""
    if isinstance(cell, str) and cell.strip():
        return cell
    return str(cell) if isinstance(cell, int) and not isinstance(cell, bool) else None


def _label(path: Path, position: str, cell: Any) -> str:
    label = label_of(cell)
    if label is not None:
        return label
    fault = "is missing" if cell is None or cell == "" else f"is {reprlib.repr(cell)}"
    message = f"{path}, {position}: the label {fault}; give a word or a whole number, or remove the row"
    raise DataError(message, code="bad-label", path=path)


def _rows(path: Path, columns: Sequence[str]) -> Rows:
    read_rows = {".parquet": _parquet_rows, ".csv": _csv_rows, ".jsonl": _json_rows}[path.suffix.lower()]
    try:
        yield from read_rows(path, columns)
    except ProtosteerError:
        raise
    except Exception as error:  # damaged files make pyarrow raise nearly anything
        raise DataError(
            f"{path} cannot be read as a list of images ({one_line(str(error))})", code="bad-list", path=path
        ) from error


def _require(path: Path, names: Sequence[str], columns: Sequence[str]) -> None:
    absent_name = next((name for name in columns if name not in names), None)
    if absent_name is not None:
        message = (
            f"{path} is not a list of images{' and labels' * (len(columns) > 1)}: it has no column {absent_name}; there "
            f"are: {listed(list(names))}"
        )
        raise DataError(message, code="missing-column", name=absent_name)


def _parquet_rows(path: Path, columns: Sequence[str]) -> Rows:
    data, pa = read_regular(path), pyarrow()
    file = pa.parquet.ParquetFile(io.BytesIO(data))
    _require(path, file.schema_arrow.names, columns)
    leaves = [file.schema.column(i).path for i in range(len(file.schema))]
    check_pages(data, [i for i, name in enumerate(leaves) if name.split(".")[0] in columns])
    # Dictionaries stay dictionaries: a text that many rows have is in memory once.
    leaf_columns = [name for name in columns if name in leaves]
    file = pa.parquet.ParquetFile(io.BytesIO(data), read_dictionary=leaf_columns)
    row = characters = 0
    for batch in file.iter_batches(columns=list(columns)):
        for cells in zip(*(_cells(batch.column(name), pa) for name in columns), strict=True):
            row += 1
            characters += len(str(cells[0]))
            if row > max_rows(len(data)) or characters > max_size(len(data)):
                message = f"{path} has far more rows than a file of {len(data):,} bytes can need; save it again as CSV"
                raise DataError(message, code="bad-list", path=path)
            yield f"row {row}", list(cells)


def _cells(column: Any, pa: Any) -> list[Any]:
    if not pa.types.is_dictionary(column.type):
        return list(column.to_pylist())
    values = column.dictionary.to_pylist()
    return [None if i is None else values[i] for i in column.indices.to_pylist()]


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
                message = f"{path}, line {number}: this is no JSON object; write one per line"
                raise DataError(message, code="bad-list", path=path)
            _require(path, list(row), columns)
            yield f"line {number}", [row[name] for name in columns]
