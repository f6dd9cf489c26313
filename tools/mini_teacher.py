"""Compute the tokens of the teacher of `mini` for the packed photographs, and store them.

    python tools/mini_teacher.py --photos FOLDER --teacher vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors --view 1

The teacher is ViT-Tiny at 224 pixels, the photographs enlarged: at fewer it is quicker, but much worse. Of a view the
class token and the patch tokens are stored, these averaged from the teacher's grid to the student's. Stop it at any
time; the same command resumes. Views may be computed at the same time.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_data import PHOTOS, STORED, crops, cut
from protosteer.backbones import Backbone
from protosteer.util.files import write_atomically

GRID = 10  # patches along a side of the student
BATCH = 8  # photographs at once: more do not fit the caches of a CPU and are slower
FLUSH = 25  # batches, after which what was computed is safe on disk


@dataclass(frozen=True)
class TeacherOutputs:
    """The teacher's tokens of one view, float16, of `count` photographs so far."""

    folder: Path
    view: int

    @property
    def _counter(self) -> Path:
        return self.folder / f"view{self.view}.count"

    @property
    def count(self) -> int:
        return int(self._counter.read_text()) if self._counter.exists() else 0

    def file(self, kind: str) -> Path:
        return self.folder / f"view{self.view}_{kind}.npy"

    def read(self) -> tuple[np.memmap, np.memmap]:
        """Class tokens [N, D] and patch tokens [N, GRID², D]."""
        return np.load(self.file("class"), mmap_mode="r"), np.load(self.file("patches"), mmap_mode="r")

    def write(self, photos: int, dim: int) -> tuple[np.memmap, np.memmap]:
        """The same, to be filled; new where nothing is done yet."""
        return self._filled("class", photos, dim), self._filled("patches", photos, GRID**2, dim)

    def _filled(self, kind: str, *shape: int) -> np.memmap:
        if self.count:
            return np.load(self.file(kind), mmap_mode="r+")
        return np.lib.format.open_memmap(self.file(kind), "w+", np.float16, shape)

    def keep(self, count: int, *arrays: np.memmap) -> None:
        """Record that `count` photographs are done, after their tokens are on disk."""
        for array in arrays:
            array.flush()
        write_atomically(self._counter, str(count).encode())


def load_teacher(weights: Path) -> Backbone:
    """The backbone of a file named as timm names it; bf16 is half as fast again, and class means are as good."""
    return Backbone.load(weights.stem, weights=weights, crop=1.0, precision="bf16")


@torch.no_grad()
def embed(teacher: Backbone, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [N, 3, h, w] -> class tokens [N, D] and patch tokens [N, GRID², D], float16."""
    tokens = teacher.tokens(teacher.preprocessing(pixels))
    side = teacher.vit.config.grid
    square = tokens[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
    pooled = F.interpolate(square, size=(GRID, GRID), mode="bilinear", antialias=True)
    return tokens[:, 0].half(), pooled.flatten(2).transpose(1, 2).half()


def compute_outputs(teacher: Backbone, folder: Path, view: int, rows: int | None = None) -> None:
    """Compute a view until the first `rows` photographs are done (None: all)."""
    photos = np.load(folder / PHOTOS, mmap_mode="r")
    outputs = TeacherOutputs(folder, view)
    arrays = outputs.write(len(photos), teacher.dim)
    began, start, end = time.monotonic(), outputs.count, rows or len(photos)
    for number, first in enumerate(range(start, end, BATCH), 1):
        last = min(first + BATCH, end)
        pixels = cut(torch.from_numpy(np.array(photos[first:last])), crops(torch.arange(first, last), view), STORED)
        for array, tokens in zip(arrays, embed(teacher, pixels), strict=True):
            array[first:last] = tokens.numpy()
        if number % FLUSH == 0 or last == end:
            outputs.keep(last, *arrays)
            pace = (last - start) / (time.monotonic() - began)
            print(f"view {view}: {last} of {end} photographs, {pace:.1f} a second", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", type=Path, required=True, metavar="FOLDER", help="what mini_data.py wrote")
    parser.add_argument("--teacher", type=Path, required=True, metavar="FILE", help="named as timm names it")
    parser.add_argument("--view", type=int, default=0, help="0: whole photographs; any other: crops of its own")
    parser.add_argument("--rows", type=int, help="the first so many photographs; default all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    teacher = load_teacher(args.teacher)
    compute_outputs(teacher, args.photos, args.view, args.rows)


if __name__ == "__main__":
    main()
