"""Weight files that claim what they do not hold: one line, at once, and no memory for it."""

import io
import json
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expect import expect_error
from protosteer.backbones import Backbone
from protosteer.backbones.build_vit import load_vit
from protosteer.backbones.checkpoint_io import METADATA_KEY, read_checkpoint
from protosteer.errors import ProtosteerError, WeightsError
from weight_toys import published, random_vit, tiny_weights, to_flax, write_weights

Make = Callable[[Path], object]


def zipped(path: Path, name: str, data: bytes, **changes: int) -> None:
    """An archive of one entry whose directory says what `changes` say."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
        for key, value in changes.items():
            setattr(archive.infolist()[0], key, value)


def npy(shape: str, data: bytes = b"\0" * 64) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def saved(value: Any) -> Make:
    return lambda path: torch.save({"x": value}, path)


BYTEARRAY = b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x08\x85R."  # 128 MB, which torch allows
MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."


def archived(*pickles: tuple[str, bytes]) -> Make:
    def make(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in (*pickles, ("archive/version", b"3\n")):
                archive.writestr(name, data)

    return make


def legacy_before_zip(path: Path) -> None:
    torch.save({"x": torch.zeros(2)}, path)
    path.write_bytes(MAGIC + BYTEARRAY + path.read_bytes())


def two_directories(path: Path) -> None:
    """An archive with two directories: torch reads the one at the stated offset, zipfile the last one."""
    archived(("archive/data.pkl", BYTEARRAY))(path)
    hostile = path.read_bytes()
    archived(("archive/data.pkl", b"\x80\x02}.".ljust(len(BYTEARRAY), b".")))(path)
    path.write_bytes(hostile[:-22] + path.read_bytes())


def two_sizes(path: Path, zip64: bool = False) -> None:
    """Two directories of one length; in the one that zipfile reads, all entries are small."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.writestr("archive/version", b"3\n" + bytes(2**26))
    data = path.read_bytes()
    size, start = struct.unpack_from("<II", data, len(data) - 10)
    honest, small, at = data[start : start + size], bytearray(data[start : start + size]), 0
    while at < len(small):
        struct.pack_into("<I", small, at + 24, 10)
        at += 46 + sum(struct.unpack_from("<HHH", small, at + 28))
    end = data[-22:]
    if zip64:  # zipfile takes what lies there, torch what is referred to
        there, here = start + 2 * size, start + 2 * size + 56
        record = b"PK\x06\x06" + struct.pack("<QHHIIQQQ", 44, 45, 45, 0, 0, 2, 2, size)
        records = record + struct.pack("<Q", start) + record + struct.pack("<Q", start + size)
        assert here - there == len(records) // 2
        end = records + struct.pack("<4sIQI", b"PK\x06\x07", 0, there, 1) + end
    path.write_bytes(data[:start] + honest + bytes(small) + end)


def repeated_size(path: Path) -> None:
    """An entry that states its size twice: first far beyond, then small."""
    archived(("archive/data.pkl", b"\x80\x02}."))(path)
    data = path.read_bytes()
    size, start = struct.unpack_from("<II", data, len(data) - 10)
    entry = bytearray(data[start:-22])
    extra = b"".join(struct.pack("<HHQ", 1, 8, number) for number in (2**32 - 1, 4))
    length = 46 + len("archive/data.pkl")
    struct.pack_into("<I", entry, 24, 2**32 - 1)
    struct.pack_into("<H", entry, 30, len(extra))
    entry[length:length] = extra
    end = bytearray(data[-22:])
    struct.pack_into("<I", end, 12, size + len(extra))
    path.write_bytes(data[:start] + entry + end)


DIVERGING: dict[str, Make] = {
    "two sizes": two_sizes,
    "two sizes of 64 bits": lambda path: two_sizes(path, zip64=True),
    "repeated size": repeated_size,
    "comment": lambda path: (archived(("archive/data.pkl", b"\x80\x02}."))(path), path.open("ab").write(b"x")),
}


@pytest.mark.parametrize("fault", DIVERGING)
def test_torch_opens_no_archive_that_zipfile_sees_otherwise(fault: str, tmp_path: Path, monkeypatch: Any) -> None:
    """torch reads an entry as soon as it opens an archive."""
    path = tmp_path / "w.pth"
    DIVERGING[fault](path)
    monkeypatch.setattr(torch._C, "PyTorchFileReader", lambda _: pytest.fail("torch has opened it"))
    with expect_error("damaged-weights", WeightsError, path=path):
        read_checkpoint(path)


def tarred(path: Path) -> None:
    """A tar file whose first bytes are pickles of nothing, and which holds torch's old format."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in (("N." * 4, b""), ("storages", BYTEARRAY), ("tensors", BYTEARRAY), ("pickle", BYTEARRAY)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


HOSTILE: dict[str, tuple[str, Make]] = {
    "impossible shape": (".npz", lambda p: zipped(p, "x.npy", npy("(10000000000, 10000000000)"))),
    "shape far beyond the file": (".npz", lambda p: zipped(p, "x.npy", npy("(3000000000,)"))),
    "negative shape": (".npz", lambda p: zipped(p, "x.npy", npy("(-5, 3)"))),
    "blocks of nothing": (".npz", lambda p: zipped(p, "Transformer/encoderblock/x.npy", npy("(1000000000000, 0)"))),
    "npz bomb": (".npz", lambda p: zipped(p, "x.npy", npy("(50000000,)", bytes(200_000_000)))),
    "encrypted npz": (".npz", lambda p: zipped(p, "x.npy", npy("(16,)"), flag_bits=1)),
    "unknown method npz": (".npz", lambda p: zipped(p, "x.npy", npy("(16,)"), compress_type=99)),
    "pth bomb": (".pth", lambda p: zipped(p, "archive/data.pkl", bytes(200_000_000))),
    "encrypted pth": (".pth", lambda p: zipped(p, "archive/data.pkl", b"x", flag_bits=1)),
    "stride 0": (".pth", saved(torch.zeros(1).expand(10**10))),
    "overlapping": (".pth", saved(torch.zeros(50_000).as_strided((25_000, 25_000), (1, 1)))),
    "one storage many times": (
        ".pth",
        lambda p: torch.save(dict.fromkeys(map(str, range(2000)), torch.zeros(100_000)), p),
    ),
    "sparse": (".pth", saved(torch.eye(3).to_sparse())),
    "meta": (".pth", saved(torch.zeros(10**12, device="meta"))),
    "doubling": (".pth", lambda p: torch.save({"x": bytearray(b"abc")}, p)),
    "capital letters": (".pth", archived(("archive/DATA.PKL", BYTEARRAY))),
    "two pickles": (".pth", archived(("archive/data.pkl", b"\x80\x02}."), ("archive/DATA.pkl", BYTEARRAY))),
    "a pickle beside": (".pth", archived(("archive/data.pkl", b"\x80\x02}."), ("archive/more.pkl", BYTEARRAY))),
    "a legacy file before a zip file": (".pth", legacy_before_zip),
    "two directories": (".pth", two_directories),
    "a tar file": (".pth", tarred),
    "legacy names": (".pth", lambda p: torch.save({"x": bytearray(b"abc")}, p, _use_new_zipfile_serialization=False)),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_what_a_file_cannot_hold_is_refused_without_memory(fault: str, tmp_path: Path) -> None:
    suffix, make = HOSTILE[fault]
    path = tmp_path / f"w{suffix}"
    make(path)
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError) as caught:
            load_vit(read_checkpoint(path))
        assert tracemalloc.get_traced_memory()[1] < 16 * path.stat().st_size + 2**25
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


ABOUT = {
    "a list": [1],
    "a number": 3,
    "heads as a word": {"heads": "3"},
    "no heads": {"heads": 0},
    "true heads": {"heads": True},
    "image size as a list": {"image_size": [16]},
    "immense image size": {"image_size": 10**400},
    "large image size": {"image_size": 32000, "heads": 3},
    "two means": {"mean": [0.5, 0.5]},
    "mean of words": {"mean": ["a", "b", "c"]},
    "std of nothing": {"std": [0, 1, 1]},
    "crop as a table": {"crop": {}},
    "small crop": {"crop": 0.0001, "heads": 3, "mean": [0, 0, 0], "std": [1, 1, 1]},
    "interpolation as a number": {"interpolation": 3},
    "pool as a list": {"pool": ["token"]},
}


@pytest.mark.parametrize("about", ABOUT.values(), ids=ABOUT.keys())
@pytest.mark.parametrize("place", ["metadata", "config"])
def test_mistyped_words_about_a_file_are_refused(place: str, about: Any, tmp_path: Path) -> None:
    path = tiny_weights(tmp_path / "w.safetensors", about if place == "metadata" else None)
    if place == "config":
        config = about
        if isinstance(about, dict):
            told = {"crop_pct": about.get("crop"), "input_size": about.get("image_size") and [3, about["image_size"]]}
            config = {"pretrained_cfg": about | told, "model_args": {"num_heads": about.get("heads")}}
            config["global_pool"] = about.get("pool")
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ProtosteerError) as caught:
        Backbone.load("strange", path, heads=None if "heads" in str(about) else 3)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "nul", '{"a":' * 50_000])
def test_nested_and_broken_json(text: str, tmp_path: Path) -> None:
    path = tiny_weights(tmp_path / "w.safetensors")
    (tmp_path / "config.json").write_text(text)
    with expect_error("bad-weights-config", WeightsError):
        Backbone.load("strange", path)
    (tmp_path / "config.json").unlink()
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length]) | {"__metadata__": {METADATA_KEY: text}}
    written = json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + data[8 + length :])
    with expect_error("damaged-weights", WeightsError):
        Backbone.load("strange", path)


def test_plain_files_are_read_in_every_way_that_torch_writes(tmp_path: Path) -> None:
    vit = random_vit()
    state = published(vit)

    def check(path: Path, heads: int | None = 3, rounding: float = 0.0) -> None:
        found = load_vit(read_checkpoint(path), heads)[0].state_dict()
        for name, tensor in vit.state_dict().items():
            torch.testing.assert_close(found[name], tensor, atol=rounding, rtol=rounding, msg=name)

    half = {name: torch.nn.Parameter(tensor.half()) for name, tensor in state.items()}
    for content, options in ((state, {}), (half, {}), (state, {"_use_new_zipfile_serialization": False})):
        torch.save({"model": content}, tmp_path / "w.pth", **options)
        check(tmp_path / "w.pth", rounding=1e-3 if content is half else 0.0)
    packed = io.BytesIO()
    np.savez_compressed(packed, **to_flax(state, 3))
    (tmp_path / "w.npz").write_bytes(packed.getvalue())
    check(tmp_path / "w.npz", heads=None)
    check(write_weights(tmp_path / "w.safetensors", state))
