"""Check untrusted weights files before a library acts on their content.

Sizes must fit the file's bytes, names must be those that weights need, and metadata must have the right types.
"""

from __future__ import annotations

import contextlib
import math
import pickletools
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protosteer.errors import WeightsError
from protosteer.util.files import open_regular
from protosteer.util.text import listed, printable

# Numbers may be stored in an eighth of fp32, and archives are compressed a little; a bomb a thousandfold.
_MAX_RATIO, _RATIO_SLACK = 16, 2**24
MAX_BLOCKS = 1000

_NAMES = re.compile(
    r"collections OrderedDict|argparse Namespace|torch\._utils _rebuild_(?:tensor|tensor_v2|parameter)"
    r"|torch\.storage (?:Typed|Untyped)Storage|torch\.nn\.parameter Parameter"
    r"|torch (?:\w+Storage|Size|device|b?float\d+)"
)
_ZIP = b"PK\x03\x04"
_END = struct.Struct("<4s8xIIH")  # of a zip file: mark, size and offset of the directory, length of a comment
_END64 = struct.Struct("<4s36xQQ")  # with 64 bits, and where that is
_LOCATOR = struct.Struct("<4s4xQ4x")
_LEGACY_PICKLES = 4  # a magic number, a version, the machine, the weights

Test = Callable[[Any], bool]


def allowance(path: Path) -> int:
    """Return how many bytes a file's content may take in memory."""
    return _MAX_RATIO * path.stat().st_size + _RATIO_SLACK


def check_zip(path: Path) -> None:
    """Raise `WeightsError` if a zip file has unusual entries, or claims more bytes than it can hold."""
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    faulty_names = [e.filename for e in entries if e.flag_bits & 1 or e.compress_type not in (0, zipfile.ZIP_DEFLATED)]
    if faulty_names:
        raise _damaged(path, f"encrypted, or packed in an unknown way: {names(faulty_names)}; pack it again")
    _check_bytes(path, sum(entry.file_size for entry in entries))


def check_pickle(path: Path) -> None:
    """Raise `ValueError` if a PyTorch file names anything that plain weights do not need.

    torch also allows other kinds of tensors, and functions that turn a few bytes into many. The file is parsed as by
    torch: its first bytes decide whether it is a zip file, and torch ignores the case of names in it.
    """
    with open_regular(path) as file:
        if file.read(len(_ZIP)) == _ZIP:
            _check_one_directory(path)
            check_zip(path)
            archive = torch._C.PyTorchFileReader(str(path))
            records = archive.get_all_records()
            pickles = [name for name in records if name.casefold().endswith(".pkl")]
            if [name.casefold() for name in pickles].count("data.pkl") != 1:
                raise ValueError("it does not hold exactly one data.pkl")
            for name in pickles:
                _check_names(pickletools.genops(archive.get_record(name)))
        else:
            file.seek(0)
            with contextlib.suppress(tarfile.TarError), tarfile.open(fileobj=file, mode="r:"):
                raise ValueError("it is a tar file")  # torch's oldest format, which it tries before plain pickles
            file.seek(0)
            _check_names(step for _ in range(_LEGACY_PICKLES) for step in pickletools.genops(file))


def _check_one_directory(path: Path) -> None:
    """Raise `ValueError` if torch could read other sizes from a zip file than `zipfile`, which `check_zip` asks.

    torch trusts the offsets that the end of the file states; zipfile takes what lies right before that end. If an entry
    has several sizes beyond 32 bits, torch takes the first, zipfile the last.
    """
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        stop = file.seek(0, 2) - _END.size
        file.seek(max(0, stop - _END64.size - _LOCATOR.size))
        tail = file.read()
        mark, size, start, comment = _END.unpack(tail[-_END.size :])
        if tail[: -_END.size][-_LOCATOR.size :].startswith(b"PK\x06\x07"):
            stop -= _END64.size + _LOCATOR.size
            _, size, start = _END64.unpack(tail[: _END64.size])
            _, position = _LOCATOR.unpack(tail[_END64.size : -_END.size])
            comment += position != stop
        if mark != b"PK\x05\x06" or comment or start + size != stop or start != archive.start_dir:
            raise ValueError("its directory is not where its end says")
        if any(_has_field(entry.extra, 1) for entry in archive.infolist()):
            raise ValueError("an entry has more than 4 GB")


def _has_field(data: bytes, field_kind: int) -> bool:
    """Return whether the extra data of a zip file's entry has a field of this kind."""
    while len(data) >= 4:
        kind, length = struct.unpack_from("<HH", data)
        if kind == field_kind:
            return True
        data = data[4 + length :]
    return False


def _check_names(steps: Iterable[tuple[pickletools.OpcodeInfo, Any, int | None]]) -> None:
    for code, argument, _ in steps:
        if code.name == "GLOBAL" and not _NAMES.fullmatch(argument):
            raise ValueError(f"it names {printable(argument[:80]).replace(' ', '.')}")


def check_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Raise `WeightsError` unless tensors are plain floats that fit the file's size: views may claim more."""
    faulty_names = [name for name, value in tensors.items() if not _is_plain(value)]
    if faulty_names:
        raise _damaged(path, f"not floating-point tensors: {names(faulty_names)}; give plain weights")
    _check_bytes(path, sum(tensor.numel() * 4 for tensor in tensors.values()))


def _is_plain(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.layout == torch.strided and value.device.type == "cpu" and value.numel() > 0


def _check_bytes(path: Path, size: int) -> None:
    if size > allowance(path):
        raise _damaged(path, f"it claims {size:,} bytes of weights, far more than it holds; fetch it again")


def _damaged(path: Path, fault: str) -> WeightsError:
    return WeightsError(f"{path}: {fault}", code="damaged-weights", path=path)


def names(untrusted: Iterable[str]) -> str:
    """List the first of many untrusted names, short enough for one line."""
    return listed([printable(name[:100]) for name in untrusted], 5)


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 2**16


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e6 and math.isfinite(value)


def _is_triple(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 3 and all(map(_is_number, value))


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 200


_ABOUT: Mapping[str, tuple[Test, str]] = {
    "heads": (_is_count, "a number of at least 1"),
    "image_size": (_is_count, "a number of at least 1"),
    "mean": (_is_triple, "three numbers"),
    "std": (lambda value: _is_triple(value) and min(value) > 0, "three numbers greater than 0"),
    "crop": (lambda value: _is_number(value) and 0 < value <= 1, "a number in (0, 1]"),
    "interpolation": (_is_word, "a word"),
    "pool": (_is_word, "a word"),
    "name": (_is_word, "a short text"),
    "licence": (_is_word, "a short text"),
}


def check_metadata(path: Path, metadata: Any) -> dict[str, Any]:
    """Return the known entries of a file's metadata; raise `WeightsError` if one has a wrong type."""
    if not isinstance(metadata, dict):
        message = f"{path}: its metadata is not a JSON object; repair or remove it"
        raise WeightsError(message, code="bad-weights-config", path=path)
    entries = {key: metadata[key] for key in _ABOUT if metadata.get(key) is not None}
    for key, value in entries.items():
        valid, requirement = _ABOUT[key]
        if not valid(value):
            message = f"{path}: it says {key} = {printable(str(value)[:80])}; that must be {requirement}"
            raise WeightsError(message, code="bad-weights-config", path=path, name=key)
    return entries
