"""The photographs that `mini` is trained on, packed into one file, and how a view of them is cut.

    python tools/mini_data.py --photos DIR [DIR ...] --cifar DIR --out FOLDER

All photographs in the folders (no label is read) and CIFAR-100's training images, but for the last `HELD_OUT` of
every class, which judge recipes. All are squares of `STORED` pixels, in a seeded random order, so that any
stretch of the file is a fair sample.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Generator, Tensor

from protosteer.data.datasets.cifar import read_cifar100
from protosteer.data.transforms import resize

SIZE, STORED = 96, 128  # pixels along a side, of what mini sees and of what is kept
HELD_OUT = 40  # of CIFAR-100's training images, per class
PHOTOS = "photos.npy"
SMALLEST_CROP = 0.4  # of a photograph's area
ORDER_SEED = 17


def held_out(labels: Tensor) -> Tensor:
    """Rows [classes, HELD_OUT] of the last images of every class, in file order."""
    return torch.stack([(labels == c).nonzero().squeeze(1)[-HELD_OUT:] for c in range(int(labels.max()) + 1)])


def cifar_photos(folder: Path) -> Tensor:
    """CIFAR-100's training images without those held out, uint8 [N, 3, STORED, STORED]."""
    pixels, labels, _ = read_cifar100(folder, "train")
    kept = torch.ones(len(pixels), dtype=torch.bool)
    kept[held_out(labels).flatten()] = False
    return resize(pixels[kept], (STORED, STORED), "bicubic")


def read_photo(file: Path) -> np.ndarray:
    """The largest square in the middle, uint8 [3, STORED, STORED]."""
    with Image.open(file) as image:
        image.draft("RGB", (2 * STORED, 2 * STORED))  # a JPEG is decoded at half or a quarter of its size
        square = ImageOps.fit(image.convert("RGB"), (STORED, STORED), Image.Resampling.BICUBIC)
        return np.asarray(square).transpose(2, 0, 1)


def pack(photos: Sequence[Path], cifar: Path, out: Path) -> None:
    """Write PHOTOS into the folder `out`, under a temporary name until it is whole."""
    files = sorted(f for folder in photos for f in folder.rglob("*") if f.suffix.lower() in (".jpg", ".jpeg", ".png"))
    small = cifar_photos(cifar).numpy()
    order = torch.randperm(len(files) + len(small), generator=Generator().manual_seed(ORDER_SEED)).tolist()
    unfinished = out / (PHOTOS + ".part")
    packed = np.lib.format.open_memmap(unfinished, "w+", np.uint8, (len(order), 3, STORED, STORED))
    for place, row in enumerate(order):
        packed[place] = read_photo(files[row]) if row < len(files) else small[row - len(files)]
        if (place + 1) % 20_000 == 0:
            print(f"{place + 1} of {len(order)} photographs", flush=True)
    packed.flush()
    unfinished.rename(out / PHOTOS)


def crops(rows: Tensor, view: int) -> Tensor:
    """Boxes [N, 3] (side, centre x, centre y; the whole photograph is 1, 0, 0) of one view of some photographs.

    View 0 is the whole. Others are squares; each depends on its photograph's row and the view alone.
    """
    if view == 0:
        return torch.tensor([1.0, 0.0, 0.0]).repeat(len(rows), 1)
    drawn = torch.stack([torch.rand(3, generator=Generator().manual_seed(view * 10**9 + row)) for row in rows.tolist()])
    return boxes(drawn)


def boxes(drawn: Tensor) -> Tensor:
    """Squares inside of photographs, by three numbers each [N, 3] from 0 to 1; of at least SMALLEST_CROP of the area."""
    side = (SMALLEST_CROP + (1 - SMALLEST_CROP) * drawn[:, :1]).sqrt()
    return torch.cat([side, (2 * drawn[:, 1:] - 1) * (1 - side)], dim=1)


def cut(pixels: Tensor, boxes: Tensor, size: int) -> Tensor:
    """What lies in the boxes: uint8 [N, 3, h, w] -> uint8 [N, 3, size, size]."""
    side, centre = boxes[:, 0], boxes[:, 1:]
    theta = torch.zeros(len(boxes), 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = side
    theta[:, :, 2] = centre
    grid = F.affine_grid(theta, [*pixels.shape[:2], size, size], align_corners=False)
    found = F.grid_sample(pixels.float(), grid, "bicubic", "border", align_corners=False)
    return found.round_().clamp_(0, 255).byte()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", type=Path, nargs="+", required=True, metavar="DIR", help="of photographs")
    parser.add_argument("--cifar", type=Path, required=True, metavar="DIR", help="cifar-100-python")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args()
    pack(args.photos, args.cifar, args.out)


if __name__ == "__main__":
    main()
