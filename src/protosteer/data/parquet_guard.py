"""Bound what a Parquet file takes in memory, by the headers of its pages, before anything is decompressed.

The sizes in a file's footer may be forged, and nothing checks them; pages are decompressed by their own headers. A
header is a struct in Thrift's compact protocol: fields as (difference to the last field's number, type), then a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_STRUCT = 12
_TRUE, _FALSE = 1, 2
_SIZE, _STORED, _PAGE, _PAGE_V2 = 2, 3, 5, 8  # fields of a page's header
_ENCODING, _ENCODING_V2 = 2, 4  # fields of _PAGE and _PAGE_V2
_SHARES_PREFIXES = 7  # DELTA_BYTE_ARRAY: a row of some bits may repeat a text of a megabyte


def max_size(stored: int) -> int:
    """Return the most bytes that columns of a file of `stored` bytes may have when decompressed."""
    return 2**24 + 256 * stored


def max_rows(stored: int) -> int:
    """Return the most rows that a file of `stored` bytes may have; distinct paths take more than this."""
    return 100_000 + 64 * stored


def check_pages(data: bytes, metadata: Any, columns: Sequence[str]) -> None:
    """Raise a `ValueError` if the columns' pages decompress to more than `max_size`, or expand when decoded.

    Args:
        data: The file.
        metadata: pyarrow's `FileMetaData` of it.
        columns: The names of the columns that will be read.
    """
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    size = 0
    for chunk in (chunk for chunk in chunks if chunk.path_in_schema in columns):
        first, at = chunk.dictionary_page_offset or 0, chunk.data_page_offset
        at = first if 0 < first < at else at  # as Arrow begins
        end = at + chunk.total_compressed_size
        while at < end:
            header, at = _struct(data, at)
            at += header[_STORED]
            size += header[_SIZE]
            if not 0 <= header[_STORED] <= end or header[_SIZE] < 0 or size > max_size(len(data)):
                raise ValueError(f"column {chunk.path_in_schema} is far larger than the file; save it uncompressed")
            encodings = header.get(_PAGE, {}).get(_ENCODING), header.get(_PAGE_V2, {}).get(_ENCODING_V2)
            if _SHARES_PREFIXES in encodings:
                raise ValueError("the encoding DELTA_BYTE_ARRAY is not read; save with another encoding")


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """Read a struct: its whole numbers and structs by field, and where it ends. Lists and maps are not in these."""
    fields: dict[int, Any] = {}
    number = 0
    while kind := data[at]:
        number, at = number + (kind >> 4), at + 1
        if not kind >> 4:
            number, at = _whole(data, at)
        kind &= 15
        if kind == _STRUCT:
            fields[number], at = _struct(data, at)
        elif kind in (4, 5, 6):  # 16, 32, 64 bits
            fields[number], at = _whole(data, at)
        elif kind == 8:  # text
            length, at = _unsigned(data, at)
            at += length
        elif kind in (3, 7):  # a byte, a double
            at += 1 if kind == 3 else 8
        elif kind not in (_TRUE, _FALSE):
            raise ValueError("the header of a page is damaged")
    return fields, at + 1


def _whole(data: bytes, at: int) -> tuple[int, int]:
    value, at = _unsigned(data, at)
    return value >> 1 ^ -(value & 1), at


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        value |= (data[at] & 127) << shift
        if data[at] < 128:
            return value, at + 1
        at, shift = at + 1, shift + 7
    raise ValueError("the header of a page is damaged")
