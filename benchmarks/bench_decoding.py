"""Measure learning a task from photographs: files decoded again in every epoch, against decoded once and cached.

python benchmarks/bench_decoding.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image

from measure_script import measure_script
from protosteer.backbones import Backbone
from protosteer.bench.harness import Ratio, interleaved, pictures, vit_tiny
from protosteer.data.decode_cache import cache_decoded
from protosteer.data.images import FileImages, ImageSet
from protosteer.model.memory import Memory
from protosteer.runtime.task_images import TaskImages
from protosteer.settings import Settings
from protosteer.tasks import learn_task

PHOTOS, SIZE = 32, (1600, 1200)
SETTINGS = Settings.preset("paper", epochs=5, batch_size=16)
TARGET = 1.0


def run(repeats: int) -> list[Ratio]:
    backbones = {"learn_photos": vit_tiny(), "learn_photos_nano": Backbone.load("nano", precision="fp32")}
    with TemporaryDirectory() as folder:
        paths = photographs(Path(folder), backbones["learn_photos"])
        return [measure(name, backbone, paths, repeats) for name, backbone in backbones.items()]


def photographs(folder: Path, backbone: Backbone) -> list[Path]:
    """Write JPEG files of two scenes in turn, each a little brighter than the last."""
    paths, scenes = [folder / f"{i}.jpg" for i in range(PHOTOS)], pictures(backbone, 2)
    for i, path in enumerate(paths):
        pixels = (scenes[i % 2] // 2 + i).permute(1, 2, 0).numpy()
        Image.fromarray(pixels).resize(SIZE).save(path, quality=90)
    return paths


def measure(name: str, backbone: Backbone, paths: list[Path], repeats: int) -> Ratio:
    def learn(images: ImageSet) -> None:
        task_images, labels = TaskImages(images, backbone, SETTINGS, "task"), torch.arange(len(paths)) % 2
        learn_task("task", ["a", "b"], task_images, labels, backbone, Memory(), SETTINGS)

    sides = {
        "again": lambda: learn(FileImages(paths, backbone.preprocessing)),
        "cached": lambda: learn(cache_decoded(FileImages(paths, backbone.preprocessing))),
    }
    times = interleaved(sides, repeats)
    about = f"{backbone.name}: learning {len(paths)} photographs of {SIZE[0]} x {SIZE[1]}, {SETTINGS.epochs} epochs"
    return Ratio(name, f"{about}; decoded in each / once", times["again"], times["cached"], TARGET)


if __name__ == "__main__":
    measure_script(run)
