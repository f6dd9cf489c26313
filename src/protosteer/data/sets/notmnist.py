"""notMNIST: the letters A to J in many typefaces, as image files or in the format of MNIST."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from protosteer.data.datasets import Dataset
from protosteer.data.files import tree_checksum
from protosteer.data.folders import Files, read_folder, read_grey
from protosteer.data.sets.base import DatasetInfo, Reading, arrays, gone, readable_only, remote, split_grey
from protosteer.data.sets.idx import as_small_images, idx_files, load_idx, read_images

LETTERS = tuple("ABCDEFGHIJ")
# Empty files in the official archives, which everybody leaves out.
BROKEN = (
    "RGVtb2NyYXRpY2FCb2xkT2xkc3R5bGUgQm9sZC50dGY=.png",
    "Q3Jvc3NvdmVyIEJvbGRPYmxpcXVlLnR0Zg==.png",
)
TEST_SHARE = 0.1


def _find(folder: Path) -> Sequence[Path] | None:
    halves = idx_files(folder) or idx_files(folder, ("t10k",)) or idx_files(folder, ("train",))
    if halves:
        return halves
    if (folder / "Train" / "A").is_dir() and (folder / "Test" / "A").is_dir():
        return [folder / "Train", folder / "Test"]
    return [folder] if all((folder / letter).is_dir() for letter in LETTERS) else None


def _load(folder: Path, reading: Reading) -> Dataset:
    """Read at once: the letters are as small as MNIST's digits, and are to be seen like them."""
    found = _find(folder) or gone(folder)
    if len(found) == 4:
        return load_idx("notmnist", LETTERS, folder)
    if found[0].is_file():
        pixels, labels = read_images(*found)
        checksums = {}
    else:
        parts = [_letters(path, reading) for path in found]
        checksums = {"images": tree_checksum([path for files in parts for path in files.paths], folder)}
        loaded = [(as_small_images(read_grey(files)), files.numbers(LETTERS)) for files in parts]
        if len(loaded) == 2:
            return replace(arrays("notmnist", LETTERS, *loaded), checksums=checksums)
        pixels, labels = loaded[0]
    train, test = split_grey(pixels, labels, TEST_SHARE)
    return replace(arrays("notmnist", LETTERS, train, test), checksums=checksums)


def _letters(folder: Path, reading: Reading) -> Files:
    files = read_folder(folder)
    whole = files.rows(i for i, path in enumerate(files.paths) if path.name not in BROKEN)
    return readable_only(whole, reading)


NOTMNIST = DatasetInfo(
    name="notmnist",
    title="notMNIST",
    classes=10,
    licence="none stated",
    source="http://yaroslavvb.com/upload/notMNIST/",
    find=_find,
    load=_load,
    files=(
        remote(
            ("https://github.com/facebookresearch/Adversarial-Continual-Learning/raw/main/data",),
            "notMNIST.zip", None, None, "notMNIST",
        ),
    ),
    accepted=(
        remote(
            ("http://yaroslavvb.com/upload/notMNIST",), "notMNIST_small.tar.gz", 8_458_043,
            "c9890a473a9769fda4bdf314aaf500dd", "notMNIST_small",
        ),
    ),
    folders=("notMNIST", "notMNIST_small"),
    own_folder=True,
    note="Nobody has published a split of notMNIST_small: one image in ten of every letter is a test image, "
    "drawn with a fixed seed. notMNIST.zip, which published runs of five-datasets use, has Train and Test.",
)  # fmt: skip
