"""Crops of the two photographs that scikit-learn contains.

A class is a region of a photograph; its images are squares from anywhere in the region, of several sizes and
brightnesses. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Generator, Tensor

from protosteer.data.datasets.base import Benchmark, Contents, DatasetInfo, Pair, Reading, all_of, arrays
from protosteer.data.transforms import resize

# Photograph, left, top, right and bottom of each region.
FIELDS = {
    "roof": ("china.jpg", 90, 25, 325, 160),
    "gallery": ("china.jpg", 80, 155, 330, 245),
    "storey": ("china.jpg", 60, 240, 355, 345),
    "lake": ("china.jpg", 330, 170, 560, 300),
    "bush": ("china.jpg", 330, 285, 560, 427),
    "tree": ("china.jpg", 545, 130, 640, 427),
    "rim": ("flower.jpg", 170, 85, 270, 355),
    "heart": ("flower.jpg", 230, 140, 400, 300),
    "leaf": ("flower.jpg", 0, 60, 150, 330),
}
TRAIN, TEST = 20, 40  # crops per region
SIDE = 64  # pixels of a crop
SMALLEST, LARGEST = 0.4, 0.8  # side of the square, relative to the shorter side of its region
BRIGHTNESS = 0.3


def _read(files: Sequence[Path], reading: Reading) -> Contents:
    photographs, gen = {path.name: _pixels(path) for path in files}, Generator().manual_seed(0)
    fields = [photographs[name][:, top:bottom, left:right] for name, left, top, right, bottom in FIELDS.values()]
    details = torch.stack([_details(field, gen) for field in fields])  # [C, TRAIN + TEST, 3, SIDE, SIDE]
    return arrays(list(FIELDS), _labelled(details[:, :TRAIN]), _labelled(details[:, TRAIN:]))


def _pixels(path: Path) -> Tensor:
    """Read a photograph to uint8 [3, h, w]."""
    with Image.open(path) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def _details(field: Tensor, gen: Generator) -> Tensor:
    """Draw crops uint8 [TRAIN + TEST, 3, SIDE, SIDE] from a region [3, h, w]."""
    height, width = field.shape[1:]
    crops = []
    for share, down, across, light in torch.rand(TRAIN + TEST, 4, generator=gen).tolist():
        side = round(min(height, width) * (SMALLEST + (LARGEST - SMALLEST) * share))
        top, left = round((height - side) * down), round((width - side) * across)
        square = resize(field[None, :, top : top + side, left : left + side], (SIDE, SIDE), "bicubic")
        lit = square.float() * (1 + BRIGHTNESS * (2 * light - 1))
        crops.append(lit.round().clamp(0, 255).byte())
    return torch.cat(crops)


def _labelled(images: Tensor) -> Pair:
    return images.flatten(0, 1), torch.arange(len(images)).repeat_interleave(images.shape[1])


DETAILS = DatasetInfo(
    name="details",
    title="Details of scikit-learn's photographs",
    classes=len(FIELDS),
    licence="CC BY 2.0",
    source="https://scikit-learn.org/stable/datasets/loading_other_datasets.html#sample-images",
    find=lambda folder: all_of(folder, "china.jpg", "flower.jpg"),
    read=_read,
    shipped_with="sklearn",
    shipped_in="datasets/images",
    note="Training and test details of a field may overlap.",
)

BENCHMARK = Benchmark("split-details", "Split Details", tasks=3, crop=1.0, datasets=("details",))
