"""The paper's augmentation on this processor: batched forms against ours, which treats images one by one.

There are two references: kornia's own modules for the same list, and our batched form, which is meant for GPUs.
Both sides go from uint8 pixels to normalised images; repeats are interleaved, so that a busy machine slows all.
The figure is the ratio of medians at 224 px, for the less favourable reference. Small images are another matter:
run this file alone to see 32 px, where the cost of single operations weighs more than the cache.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import kornia.augmentation as K
import torch
from torch import Tensor, nn

from protosteer.data import augment
from protosteer.data.augment import Augmentation
from protosteer.data.transforms import Preprocessing

TARGET = 1.0
CASES = (
    (224, 248, 32),
    (32, 32, 256),
)  # size of the result, size of the pixels, images; the first one counts
HALF = (0.5, 0.5, 0.5)
Side = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """Seconds of each repeat, for one image size."""

    size: int
    images: int
    references: dict[str, list[float]]
    ours: list[float]

    def ratio(self, name: str) -> float:
        return median(self.references[name]) / median(self.ours)

    def spread(self, name: str) -> float:
        """Greatest minus smallest ratio over the repeats."""
        ratios = [slow / quick for slow, quick in zip(self.references[name], self.ours, strict=True)]
        return max(ratios) - min(ratios)


def kornia_modules(size: int) -> Side:
    """The same list and odds, as kornia offers them; its jitter has one order of steps for a whole batch."""
    reach = int(3 * augment.BLUR_RADIUS[1] * size / augment.BLUR_IMAGE_SIZE + 1)
    radius = tuple(value * size / augment.BLUR_IMAGE_SIZE for value in augment.BLUR_RADIUS)
    steps = nn.Sequential(
        K.RandomResizedCrop(
            (size, size), augment.CROP_SCALE, augment.CROP_RATIO, resample="bicubic", align_corners=False
        ),
        K.RandomHorizontalFlip(p=augment.FLIP),
        K.ColorJitter(*augment.JITTER_RANGE, p=augment.JITTER),
        K.RandomGrayscale(p=augment.GREY),
        K.RandomGaussianBlur((2 * reach + 1, 2 * reach + 1), radius, border_type="replicate", p=augment.BLUR),
        K.RandomSolarize(thresholds=(0.5, 0.5), additions=(0.0, 0.0), p=augment.SOLARIZE),
        K.Normalize(torch.tensor(HALF), torch.tensor(HALF)),
    )
    return lambda pixels: steps(pixels.float() / 255)


def measure(size: int, source: int, images: int, repeats: int) -> Case:
    preprocessing = Preprocessing(size, HALF, HALF)
    sides: dict[str, Side] = {
        "kornia": kornia_modules(size),
        "our batched form": Augmentation(preprocessing, batched=True),
        "ours": Augmentation(preprocessing, batched=False),
    }
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, source, source), dtype=torch.uint8)

    def seconds(side: Side, seed: int) -> float:
        torch.manual_seed(seed)
        begin = time.perf_counter()
        side(pixels)
        return time.perf_counter() - begin

    for side in sides.values():
        seconds(side, 0)  # warm up
    with torch.no_grad():
        times = [{name: seconds(side, seed) for name, side in sides.items()} for seed in range(repeats)]
    columns = {name: [row[name] for row in times] for name in sides}
    return Case(size, images, ours=columns.pop("ours"), references=columns)


def summary(case: Case) -> dict[str, float]:
    worst = min(case.references, key=case.ratio)
    return {"value": case.ratio(worst), "target": TARGET, "spread": case.spread(worst)}


def run(repeats: int = 5) -> dict[str, float]:
    return summary(measure(*CASES[0], repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    options = parser.parse_args()
    if options.json:
        print(json.dumps({"ratios": {"augmentation": run(options.repeats)}}))
        return
    for case in (measure(*sizes, options.repeats) for sizes in CASES):
        each = 1000 / case.images
        print(f"{case.size} px, {case.images} images: one by one {median(case.ours) * each:.2f} ms an image")
        for name, times in case.references.items():
            figures = f"ratio {case.ratio(name):.2f} (spread {case.spread(name):.2f})"
            print(f"  {name}: {median(times) * each:.2f} ms an image, {figures}")


if __name__ == "__main__":
    main()
