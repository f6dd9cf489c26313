"""Peak memory of `learn` and `predict`, beyond the weights, against that of one bare batch. On Linux alone.

Each figure is that of a process of its own: `python -m protosteer.bench.memory KIND IMAGES` prints the bytes by
which its resident memory rose at most, counted from when the backbone had been loaded and the same thing had been
done with a small ViT, so that code is loaded too. Images are made when asked for: the data set takes no memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.bench.subjects import memory_of, pictures, small, vit_tiny
from protosteer.bench.timing import Ratio
from protosteer.data.images import LazyImages
from protosteer.errors import ProtosteerError, ProtosteerWarning
from protosteer.learner import Learner
from protosteer.settings import Settings

BATCH = 16  # in training, and in embedding for it
PER_CLASS = 16
LEARNED = 32  # images, two steps; and four times as many for the growth
PREDICTED = 256  # more than a chunk of prediction, which is held whatever the batch
MOST_REPEATS = 2  # peaks differ by less than a percent
TARGET, GROWTH_TARGET = 0.5, 0.95
# Further epochs use the same memory again, and so do further candidates of an image.
LEARNING = Settings(epochs=1, batch_size=BATCH, embed_batch_size=BATCH)
PREDICTING = Settings(neighbours=1)
_FORGET_PEAK = Path("/proc/self/clear_refs")

Action = Callable[[], object]


def run(repeats: int) -> list[Ratio]:
    if not _FORGET_PEAK.exists():
        return []

    def ratio(what: str, about: str, one: list[float], other: list[float], target: float = TARGET) -> Ratio:
        notes = ["{:.0f} MB against {:.0f} MB".format(*(median(peaks) / 1e6 for peaks in (one, other)))]
        return Ratio.of(f"memory_{what}", f"peak memory, {about}", one, other, target, notes)

    def peaks(kind: str, images: int, kept: int = 0) -> list[float]:
        return [child_peak(kind, images) - kept for _ in range(min(repeats, MOST_REPEATS))]

    def compared(what: str, batch: int, images: int) -> Ratio:
        about = f"beyond the weights: one bare batch of {batch}, against {what} of {images} images"
        return ratio(what, about, peaks(f"bare-{what}", batch), peaks(what, images))

    # Without the keys and values [images, 192], which `learn` keeps until they are clustered.
    few, many = (peaks("learn-2", n, kept=2 * n * 192 * 4) for n in (LEARNED, 4 * LEARNED))
    growth = f"learn with a ViT of 2 layers: {LEARNED} images, against {4 * LEARNED}; embeddings left out"
    return [
        compared("learn", BATCH, LEARNED),
        compared("predict", vit_tiny().batch_size(PREDICTING.embed_batch_size), PREDICTED),
        ratio("learn_growth", growth, few, many, GROWTH_TARGET),
    ]


def child_peak(kind: str, images: int) -> float:
    """What a process of its own measures, with as many threads as this one has.

    There freed blocks go back to the system at once, so that the figure is what was in use; glibc otherwise keeps
    the more of them the larger they were, and by chance.
    """
    command = [sys.executable, "-m", "protosteer.bench.memory", kind, str(images)]
    threads = str(torch.get_num_threads())
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ProtosteerError(f"measuring the memory of {kind} failed: {reason}; run {' '.join(command[1:])}")
    return float(done.stdout)


# In the child: what is prepared is not counted, what is done is.


def learn(backbone: Backbone, images: int) -> Action:
    return partial(Learner(backbone, LEARNING).learn, lazy_images(backbone, images))


def bare_learn(backbone: Backbone, images: int) -> Action:
    """One batch through the prompted ViT and back."""
    prompt = torch.zeros(backbone.prompt_shape(1), requires_grad=True)
    return lambda: torch.autograd.grad(backbone.embed(_ready(backbone, images), prompt).sum(), prompt)[0]


def predict(backbone: Backbone, images: int) -> Action:
    learner = Learner(backbone, PREDICTING)
    learner.memory = memory_of(backbone, tasks=10, classes_per_task=10, centroids=5)
    return partial(learner.predict, lazy_images(backbone, images)[0])


def bare_predict(backbone: Backbone, images: int) -> Action:
    """One batch through the plain ViT."""
    return lambda: backbone.embed(_ready(backbone, images))


# With the depth of the ViT. Where no graph is kept, a layer's activations are gone before the next one's come.
KINDS: dict[str, tuple[Callable[[Backbone, int], Action], int]] = {
    "learn": (learn, 12),
    "bare-learn": (bare_learn, 12),
    "learn-2": (learn, 2),
    "predict": (predict, 2),
    "bare-predict": (bare_predict, 2),
}


def lazy_images(backbone: Backbone, count: int) -> tuple[LazyImages, list[str]]:
    """Noisy copies of one picture per class, and their labels."""
    classes = max(1, count // PER_CLASS)

    def load(row: int) -> Tensor:
        picture = pictures(backbone, 1, seed=row % classes)[0]
        noise = torch.randint(0, 32, picture.shape, generator=torch.Generator().manual_seed(row))
        return (picture // 2 + noise).to(torch.uint8)

    labels = [f"class {row % classes}" for row in range(count)]
    return LazyImages(count, load, backbone.preprocessing), labels


def _ready(backbone: Backbone, images: int) -> Tensor:
    return torch.rand(images, 3, backbone.image_size, backbone.image_size)


def measured_peak(kind: str, images: int) -> int:
    prepare, depth = KINDS[kind]
    prepare(small(), LEARNED)()
    action = prepare(vit_tiny(depth), images)
    return rise(action)


def rise(action: Action) -> int:
    """Bytes by which resident memory rose at most."""
    _FORGET_PEAK.write_text("5")  # sets the high-water mark to what is resident
    before = _high_water()
    action()
    return _high_water() - before


def _high_water() -> int:
    """Most bytes that were resident; not by `getrusage`, where a child begins with its parent's figure."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    warnings.simplefilter("ignore", ProtosteerWarning)  # random images on a random ViT are no one's concern
    print(measured_peak(sys.argv[1], int(sys.argv[2])))
