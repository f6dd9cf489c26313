"""Any bytes are weights of a ViT, or are refused in one line."""

import io
import json
import struct
import warnings
import zipfile
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from safetensors.torch import save as to_safetensors
from targets import TARGETS, Target, mutate, try_out

from protosteer.backbones import Backbone
from protosteer.backbones.checkpoint_io import METADATA_KEY
from protosteer.errors import ProtosteerError
from weight_toys import OWN, published, random_vit, to_flax

pytestmark = pytest.mark.slow


@cache
def seeds() -> dict[str, list[bytes]]:
    state = published(random_vit(dim=12, heads=3, mlp_dim=8, depth=1))
    state = {name: tensor.detach() for name, tensor in state.items() if not name.startswith("head")}
    about = {METADATA_KEY: json.dumps(OWN)}
    zipped, legacy, arrays, packed = (io.BytesIO() for _ in range(4))
    torch.save({"model": state}, zipped)
    torch.save(state, legacy, _use_new_zipfile_serialization=False)
    np.savez(arrays, **to_flax(state, 3))
    np.savez_compressed(packed, **to_flax(state, 3, late=True, stacked=True))
    half = {name: tensor.half() for name, tensor in state.items()}
    return {
        ".safetensors": [to_safetensors(state, about), to_safetensors(half, about)],
        ".pth": [zipped.getvalue(), legacy.getvalue()],
        ".npz": [arrays.getvalue(), packed.getvalue()],
    }


def inside_zip(data: bytes, random: Random) -> bytes:
    """Changes within an entry, with checksums that are right again; at times of the archive as a whole."""
    if not data.startswith(b"PK") or random.randrange(4) == 0:
        return mutate(data, random)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    likely = [name for name in entries if name.endswith(("data.pkl", ".npy"))]
    chosen = random.choice(likely)
    head = entries[chosen][: 10_000 if chosen.endswith(".pkl") else 128]
    entries[chosen] = mutate(head, random) + entries[chosen][len(head) :]
    changed = io.BytesIO()
    with zipfile.ZipFile(changed, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return changed.getvalue()


def inside_header(data: bytes, random: Random) -> bytes:
    """Changes of the JSON header, with a length that is right again."""
    length = struct.unpack("<Q", data[:8])[0]
    if random.randrange(4) == 0:
        return mutate(data, random)
    header = mutate(data[8 : 8 + length], random)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def check(suffix: str, data: bytes) -> None:
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of pickles' versions
        path = Path(folder, f"w{suffix}")
        path.write_bytes(data)
        try:
            backbone = Backbone.load("own", path, mean=(0, 0, 0), std=(1, 1, 1), heads=3)
        except ProtosteerError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000
        else:
            assert backbone.dim == 12 or backbone.parameters * 4 <= 16 * len(data) + 2**24


TARGETS["safetensors"] = Target(
    lambda: seeds()[".safetensors"], lambda data: check(".safetensors", data), inside_header
)
TARGETS["pth"] = Target(lambda: seeds()[".pth"], lambda data: check(".pth", data), inside_zip)
TARGETS["npz"] = Target(lambda: seeds()[".npz"], lambda data: check(".npz", data), inside_zip)


def test_safetensors() -> None:
    try_out("safetensors", examples=200)


def test_pth() -> None:
    try_out("pth", examples=150)


def test_npz() -> None:
    try_out("npz", examples=150)
