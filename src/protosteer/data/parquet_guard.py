"""Bound what a Parquet file takes in memory, by the headers of its pages, before anything is decompressed.

Sizes in a file's footer may be forged, and pyarrow does not check them: pages are decompressed by their own headers.
Footer and headers are structs in Thrift's compact protocol. They are read here because pyarrow shows no headers of
pages, and ends the process when it is asked for columns of some damaged footers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

_I32, _I64, _LIST, _STRUCT = 5, 6, 9, 12  # types in Thrift
# Fields, by number and type, of the file, a group of rows, a column in it, ...
_GROUPS, _COLUMNS, _COLUMN = (4, _LIST), (1, _LIST), (3, _STRUCT)
_STORED_SIZE, _FIRST_PAGE, _DICTIONARY = (7, _I64), (9, _I64), (11, _I64)
# ... and of a page: its size, its size in the file, and its kind, which has an encoding.
_SIZE, _STORED, _KINDS = (2, _I32), (3, _I32), {(5, _STRUCT): (2, _I32), (8, _STRUCT): (4, _I32)}
_SHARES_PREFIXES = 7  # DELTA_BYTE_ARRAY: a row of some bits may repeat a text of a megabyte

Fields = dict[tuple[int, int], Any]


def max_size(file_size: int) -> int:
    """Return the most bytes that columns of a file of `stored` bytes may have when decompressed."""
    return 2**24 + 256 * file_size


def max_rows(file_size: int) -> int:
    """Return the most rows that a file of `stored` bytes may have; distinct paths take more than this."""
    return 100_000 + 64 * file_size


def check_pages(data: bytes, columns: Collection[int]) -> None:
    """Raise an error if columns decompress to more than `max_size`, or expand when they are decoded.

    Args:
        data: The file.
        columns: The positions, among the leaves of the schema, of the columns that will be read.

    Raises:
        ValueError: There are too many bytes, or an encoding that is not read.
        LookupError: The file is damaged.
    """
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    groups = _Reader(data, footer).struct()[_GROUPS]
    size = 0
    for column in (group[_COLUMNS][i][_COLUMN] for group in groups for i in columns):
        start, at = column.get(_DICTIONARY, 0), column[_FIRST_PAGE]
        reader = _Reader(data, start if 0 < start < at else at)  # as Arrow begins
        end = reader.at + column[_STORED_SIZE]
        while reader.at < end:
            page = reader.struct()
            size += page[_SIZE]
            if min(page[_SIZE], page[_STORED]) < 0 or size > max_size(len(data)):
                raise ValueError("a column is far larger than the file; save it uncompressed")
            if any(page.get(kind, {}).get(encoding) == _SHARES_PREFIXES for kind, encoding in _KINDS.items()):
                raise ValueError("the encoding DELTA_BYTE_ARRAY is not read; save with another encoding")
            reader.at += page[_STORED]


class _Reader:
    """Read Thrift's compact protocol from a position on."""

    def __init__(self, data: bytes, at: int):
        if at < 0:
            raise IndexError("a position is before the file")
        self.data, self.at = data, at

    def struct(self) -> Fields:
        """Read a struct: a field's number, as the difference to the last one, its type, its value."""
        fields: Fields = {}
        number = 0
        while byte := self.byte():
            number = number + (byte >> 4) if byte >> 4 else self.whole()
            kind = byte & 15
            if any(field_number == number for field_number, _ in fields):  # readers differ in which one counts
                raise ValueError("a field is there twice")
            fields[number, kind] = self.value(kind)
        return fields

    def value(self, kind: int, in_list: bool = False) -> Any:
        """Read a value; flags are part of the type, but for those inside a list."""
        if kind in (1, 2):
            return self.byte() if in_list else kind == 1
        if kind in (4, _I32, _I64):
            return self.whole()
        if kind == _STRUCT:
            return self.struct()
        if kind in (_LIST, 10):  # 10: a set
            byte = self.byte()
            count = byte >> 4 if byte >> 4 < 15 else self.unsigned()
            return [self.value(byte & 15, in_list=True) for _ in range(count)]
        if kind not in (3, 7, 8):  # a byte, a double, a text
            raise ValueError("a header is damaged")
        length = {3: 1, 7: 8}.get(kind) or self.unsigned()
        self.at += length
        return None

    def whole(self) -> int:
        value = self.unsigned()
        return value >> 1 ^ -(value & 1)

    def unsigned(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number is too long")

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]
