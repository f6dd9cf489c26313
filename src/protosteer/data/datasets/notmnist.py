"""notMNIST: the letters A to J in many typefaces, as image files or in the format of MNIST."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from protosteer.data.class_folders import Files, read_folder
from protosteer.data.datasets.base import Contents, DatasetInfo, Reading, arrays, readable_only, split_grey
from protosteer.data.datasets.idx import as_small_images, idx_files, read_halves
from protosteer.data.downloads import Remote
from protosteer.data.image_files import tree_checksum
from protosteer.data.images import FileImages
from protosteer.data.transforms import Preprocessing

LETTERS = tuple("ABCDEFGHIJ")
# Empty files in the official archives, which all published runs skip.
BROKEN = ("RGVtb2NyYXRpY2FCb2xkT2xkc3R5bGUgQm9sZC50dGY=.png", "Q3Jvc3NvdmVyIEJvbGRPYmxpcXVlLnR0Zg==.png")
TEST_SHARE = 0.1


def _find(folder: Path) -> Sequence[Path] | None:
    halves = idx_files(folder) or idx_files(folder, ("t10k",)) or idx_files(folder, ("train",))
    if halves:
        return halves
    if (folder / "Train" / "A").is_dir() and (folder / "Test" / "A").is_dir():
        return [folder / "Train", folder / "Test"]
    return [folder] if all((folder / letter).is_dir() for letter in LETTERS) else None


def _read(paths: Sequence[Path], reading: Reading) -> Contents:
    """Read all images into memory, padded like MNIST's digits."""
    checksums = {}
    if paths[0].is_file():
        parts = read_halves(paths)
    else:
        halves = [_letters(folder, reading) for folder in paths]
        base = paths[0].parent if len(paths) == 2 else paths[0]
        checksums["images"] = tree_checksum([path for files in halves for path in files.paths], base)
        parts = [(as_small_images(_grey(files)), files.numbers(LETTERS)) for files in halves]
    train, test = parts if len(parts) == 2 else split_grey(*parts[0], TEST_SHARE)
    return arrays(LETTERS, train, test, checksums=checksums)


def _letters(folder: Path, reading: Reading) -> Files:
    files = read_folder(folder)
    intact_files = files.rows(i for i, path in enumerate(files.paths) if path.name not in BROKEN)
    return readable_only(intact_files, reading)


def _grey(files: Files) -> Tensor:
    """Read files to uint8 [N, 28, 28]."""
    unchanged = Preprocessing(28, (0.0,) * 3, (1.0,) * 3)
    return FileImages(files.paths, unchanged).pixels(range(len(files)))[:, 0]


NOTMNIST = DatasetInfo(
    name="notmnist",
    title="notMNIST",
    classes=10,
    licence="none stated",
    source="http://yaroslavvb.com/upload/notMNIST/",
    find=_find,
    read=_read,
    files=(
        Remote(
            "notMNIST.zip", None,
            ("https://github.com/facebookresearch/Adversarial-Continual-Learning/raw/main/data",),
            None, "notMNIST",
        ),
    ),
    accepted=(
        Remote(
            "notMNIST_small.tar.gz", 8_458_043, ("http://yaroslavvb.com/upload/notMNIST",),
            "c9890a473a9769fda4bdf314aaf500dd", "notMNIST_small",
        ),
    ),
    own_folder=True,
    note="There is no published split of notMNIST_small: one image in ten of every letter is a test image, "
    "drawn with a fixed seed. notMNIST.zip, which published runs of five-datasets use, has Train and Test.",
)  # fmt: skip
