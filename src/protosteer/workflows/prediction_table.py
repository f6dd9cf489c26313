"""Rows of `photos.rows` as a file: Parquet, CSV or lines of JSON, by its suffix; whole or not there.

Parquet has the columns of `predict --json`, a list of classes included, and fixed types. In CSV what is a list
has a column per place: label_2, probability_2 of the second class, embedding_0, embedding_1 and so on.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from protosteer.data.hf_arrow import pyarrow
from protosteer.data.image_lists import SUFFIXES
from protosteer.errors import DataError
from protosteer.util.files import growing, real
from protosteer.util.text import without_control
from protosteer.workflows.prediction_rows import FIGURES, SUGGESTED, Kind, Row

_GROUP = 4096  # rows of a Parquet file that are in memory at once


def is_table(path: str) -> bool:
    """Whether a path names a file of rows, and not a folder."""
    return Path(path).suffix.lower() in SUFFIXES


def write_table(path: Path, maker: Kind, rows: Iterable[Row]) -> None:
    """All rows, as they come; they are never in memory at once. A file that is there is refused."""
    write = {".parquet": write_parquet, ".csv": _write_csv, ".jsonl": _write_json}[path.suffix.lower()]
    if write is write_parquet:
        pyarrow()  # complains before there is a file
    with growing(real(path)) as file:
        write(file, maker, rows)
        if path.exists():  # also since the work began
            raise DataError(f"{path} exists already; choose another file with out=")


def write_parquet(file: IO[bytes], maker: Kind, rows: Iterable[Row]) -> None:
    pa = pyarrow()
    schema = _schema(pa, maker)
    with pa.parquet.ParquetWriter(file, schema) as writer:
        for some in _groups(rows):
            writer.write_table(
                pa.Table.from_pylist([{**row, "path": as_text(row["path"])} for row in some], schema)
            )


def _schema(pa: Any, maker: Kind) -> Any:
    """The same for every file of one kind, also where all of its rows are errors."""
    text, number = pa.string(), pa.float64()
    if maker.kind == "embeddings":
        own = {"path": text, "sha256": text, "embedding": pa.list_(pa.float32(), maker.width)}
    elif maker.kind == "suggestions":
        own = {name: number if name == "probability" else text for name in SUGGESTED}
    else:
        top = pa.list_(pa.struct({"label": text, "probability": number, "similarity": number}))
        own = {"path": text, "label": text, "probability": number, "similarity": number, "energy": number}
        own |= {"unknown": pa.bool_(), "task": text, "passes": pa.int32(), "top": top}
    return pa.schema({**own, "error": text})


def _write_csv(file: IO[bytes], maker: Kind, rows: Iterable[Row]) -> None:
    out = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="", write_through=True)
    table = csv.DictWriter(out, _flat_columns(maker), restval="", lineterminator="\n")
    table.writeheader()
    for row in rows:
        table.writerow({name: _cell(value) for name, value in _flat(row).items()})
    out.detach()  # or the file would be closed with it


def _flat_columns(maker: Kind) -> list[str]:
    if maker.kind == "embeddings":
        return ["path", "sha256", *(f"embedding_{i}" for i in range(maker.width)), "error"]
    if maker.kind == "suggestions":
        return [*SUGGESTED, "error"]
    others = [f"{name}_{place}" for place in range(2, maker.width + 1) for name in ("label", "probability")]
    return [*FIGURES, *others, "error"]


def _flat(row: Row) -> dict[str, Any]:
    flat = {name: value for name, value in row.items() if name not in ("top", "embedding")}
    for place, other in enumerate(row.get("top", ())[1:], 2):
        flat |= {f"label_{place}": other["label"], f"probability_{place}": other["probability"]}
    return flat | {f"embedding_{i}": value for i, value in enumerate(row.get("embedding", ()))}


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return without_control(value)
    return str(value).lower() if isinstance(value, bool) else value


def _write_json(file: IO[bytes], maker: Kind, rows: Iterable[Row]) -> None:
    for row in rows:
        plain = {**row, "embedding": row["embedding"].tolist()} if "embedding" in row else row
        file.write(json.dumps(plain).encode() + b"\n")


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    left = iter(rows)
    while some := list(itertools.islice(left, _GROUP)):
        yield some


def as_text(name: str) -> str:
    """A file's name, whose bytes need not be text."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
