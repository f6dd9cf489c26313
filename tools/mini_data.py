"""Pack the photographs that `mini` is trained on into one file, and cut views of them.

    python tools/mini_data.py --photos DIR[:COUNT] [DIR[:COUNT] ...] --cifar DIR --out FOLDER

Packed are the photographs in the folders (no label is read; of DIR:COUNT, so many at random) and CIFAR-100's training
images except the last `HELD_OUT` of each class, which judge recipes. All become squares of `STORED` pixels, in a seeded
random order, so that any stretch of the file is a fair sample.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from multiprocessing import Pool
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Generator, Tensor

from protosteer.data.datasets.cifar import read_cifar100

SIZE, STORED = 160, 192  # pixels along a side, of what mini sees and of what is kept
HELD_OUT = 40  # of CIFAR-100's training images, per class
PHOTOS = "photos.npy"
SMALLEST_CROP = 0.4  # of a photograph's area
ORDER_SEED = 17


def held_out(labels: Tensor) -> Tensor:
    """Rows [classes, HELD_OUT] of the last images of every class, in file order."""
    return torch.stack([(labels == c).nonzero().squeeze(1)[-HELD_OUT:] for c in range(int(labels.max()) + 1)])


def cifar_photos(folder: Path) -> list[np.ndarray]:
    """Read CIFAR-100's training images without those held out, uint8 [3, 32, 32] each."""
    pixels, labels, _ = read_cifar100(folder, "train")
    is_kept = torch.ones(len(pixels), dtype=torch.bool)
    is_kept[held_out(labels).flatten()] = False
    return list(pixels[is_kept].numpy())


def files_of(place: str, random: Random) -> list[str]:
    """List the photographs of DIR, or a sample of DIR:COUNT."""
    folder, _, count = place.partition(":")
    files = sorted(str(f) for f in Path(folder).rglob("*") if f.suffix.lower() in (".jpg", ".jpeg", ".png"))
    return random.sample(files, int(count)) if count else files


def read_photo(photo: Path | str | np.ndarray) -> np.ndarray:
    """Read the largest square in the middle of a file, or of pixels, as uint8 [3, STORED, STORED]."""
    if isinstance(photo, np.ndarray):
        square = Image.fromarray(photo.transpose(1, 2, 0)).resize((STORED, STORED), Image.Resampling.BICUBIC)
        return np.asarray(square).transpose(2, 0, 1)
    with Image.open(photo) as image:
        image.draft("RGB", (2 * STORED, 2 * STORED))  # a JPEG is decoded at half or a quarter of its size
        square = ImageOps.fit(image.convert("RGB"), (STORED, STORED), Image.Resampling.BICUBIC)
        return np.asarray(square).transpose(2, 0, 1)


def pack(places: Sequence[str], cifar: Path, out: Path, processes: int) -> None:
    """Write PHOTOS into the folder `out`, under a temporary name until it is complete."""
    random = Random(ORDER_SEED)
    photos: list[str | np.ndarray] = [*cifar_photos(cifar)]
    for place in places:
        photos += files_of(place, random)
    random.shuffle(photos)
    unfinished = out / (PHOTOS + ".part")
    packed = np.lib.format.open_memmap(unfinished, "w+", np.uint8, (len(photos), 3, STORED, STORED))
    with Pool(processes) as pool:
        for row, square in enumerate(pool.imap(read_photo, photos, chunksize=32)):
            packed[row] = square
            if (row + 1) % 20_000 == 0:
                print(f"{row + 1} of {len(photos)} photographs", flush=True)
    packed.flush()
    unfinished.rename(out / PHOTOS)


def crops(rows: Tensor, view: int) -> Tensor:
    """Boxes [N, 3] (side, centre x, centre y; the whole photograph is 1, 0, 0) of one view of some photographs.

    View 0 is the whole. Others are squares; each depends on its photograph's row and the view alone.
    """
    if view == 0:
        return torch.tensor([1.0, 0.0, 0.0]).repeat(len(rows), 1)
    gens = (Generator().manual_seed(view * 10**9 + row) for row in rows.tolist())
    return boxes(torch.stack([torch.rand(3, generator=gen) for gen in gens]))


def boxes(numbers: Tensor) -> Tensor:
    """Squares inside of photographs, by three numbers each [N, 3] from 0 to 1; of at least SMALLEST_CROP of the area."""
    side = (SMALLEST_CROP + (1 - SMALLEST_CROP) * numbers[:, :1]).sqrt()
    return torch.cat([side, (2 * numbers[:, 1:] - 1) * (1 - side)], dim=1)


def cut(pixels: Tensor, boxes: Tensor, size: int) -> Tensor:
    """What lies in the boxes: uint8 [N, 3, h, w] -> uint8 [N, 3, size, size]."""
    side, centre = boxes[:, 0], boxes[:, 1:]
    theta = torch.zeros(len(boxes), 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = side
    theta[:, :, 2] = centre
    grid = F.affine_grid(theta, [*pixels.shape[:2], size, size], align_corners=False)
    crops = F.grid_sample(pixels.float(), grid, "bicubic", "border", align_corners=False)
    return crops.round_().clamp_(0, 255).byte()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", nargs="+", required=True, metavar="DIR[:COUNT]", help="folders of photographs")
    parser.add_argument("--cifar", type=Path, required=True, metavar="DIR", help="cifar-100-python")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    pack(args.photos, args.cifar, args.out, args.processes)


if __name__ == "__main__":
    main()
