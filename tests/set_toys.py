"""Small files in the form of official data sets, and image sets as `datasets` saves them.

`info.load` reads without verifying checksums.
"""

import gzip
import json
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from protosteer.data.datasets.base import Reading
from protosteer.data.transforms import Preprocessing

HALF = (0.5, 0.5, 0.5)
SMALL = Preprocessing(8, HALF, HALF)
READING = Reading(SMALL)


def save(path, colour=(255, 0, 0), mode="RGB", size=(12, 10)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


def idx_bytes(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder, prefixes=("train", "t10k"), count=100):
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = (np.arange(count) % 10).astype(np.uint8)
    for prefix in prefixes:
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx_bytes(pixels))
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(labels)))
    return pixels


def write_cifar100(folder, images=10):
    """CIFAR-100 in its Python format: rows of 3072 bytes, colour planes one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.random.default_rng(0).integers(0, 256, (images, 3072), dtype=np.uint8)
    table = {"data": rows, "fine_labels": list(range(images)), "coarse_labels": [0] * images}
    names = {"fine_label_names": [f"class {i}" for i in range(100)]}
    for name, content in (("train", table), ("test", table), ("meta", names)):
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return folder


def idx_folder(folder: Path, classes: int, seed: int = 0, splits: tuple[str, ...] = ("train", "t10k")) -> Path:
    """Idx files with ten noisy copies of one random picture per class."""
    folder.mkdir()
    pictures = np.random.default_rng(seed).integers(0, 206, (classes, 28, 28))
    for split in splits:
        noise = np.random.default_rng([seed, len(split)]).integers(0, 50, (10, classes, 28, 28))
        images = (pictures + noise).reshape(-1, 28, 28).astype(np.uint8)
        labels = np.tile(np.arange(classes), 10).astype(np.uint8)
        for part, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            sizes = struct.pack(f">{array.ndim}I", *array.shape)
            (folder / f"{split}-{part}").write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())
    return folder


ROWS = 3  # of a batch


def save_set(
    folder: Path,
    images: Sequence[dict[str, Any] | None],
    labels: Sequence[Any],
    names: Sequence[str] | None = None,
    files: int = 1,
) -> Path:
    """Write an image set with pyarrow alone.

    images: bytes or path of each. names: of the classes, if labels are their numbers.
    """
    import pyarrow as pa

    label = {"names": list(names), "_type": "ClassLabel"} if names else {"dtype": "string", "_type": "Value"}
    about = {"info": {"features": {"image": {"_type": "Image"}, "label": label}}}
    kinds = {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()})}
    kinds["label"] = pa.int64() if names else pa.string()
    schema = pa.schema(kinds, metadata={"huggingface": json.dumps(about)})
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pydict({"image": list(images), "label": list(labels)}, schema)
    called, each = [], -(-len(images) // files)
    for i in range(files):
        called.append(f"data-{i:05}-of-{files:05}.arrow")
        with pa.ipc.new_stream(str(folder / called[-1]), schema) as stream:
            stream.write_table(table.slice(i * each, each), ROWS)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in called]}))
    (folder / "dataset_info.json").write_text(json.dumps(about["info"]))
    return folder
