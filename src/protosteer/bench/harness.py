"""Functions that all measurements share: ratios of times, and random backbones, images and memories.

Speed does not depend on the values of the weights, so random ones stand for trained ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import IMAGENET, Backbone
from protosteer.backbones.precision import FP32
from protosteer.data.transforms import Preprocessing
from protosteer.evidence.prototype_summary import ClassSummary
from protosteer.learner import Learner
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord, TaskRecord
from protosteer.paper.prototypes import Centroids
from protosteer.paper.vit import ViT, ViTConfig
from protosteer.settings import Settings

CENTROIDS = 5  # of a class
IMAGES = 20  # of a class, for the default classifier

Name = TypeVar("Name", bound=Hashable)
Side = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """Reference time / our time: larger is better."""

    name: str
    about: str  # the comparison in words
    reference: list[float]  # seconds of each repeat
    ours: list[float]  # repeat i ran beside repeat i of the reference
    target: float
    notes: list[str] = field(default_factory=list)  # absolute rates, for information only

    @property
    def value(self) -> float:
        """Ratio of the medians."""
        return median(self.reference) / median(self.ours)

    @property
    def spread(self) -> float:
        """Greatest minus smallest ratio over the repeats."""
        ratios = [reference_time / our_time for reference_time, our_time in zip(self.reference, self.ours, strict=True)]
        return max(ratios) - min(ratios)


def interleaved(sides: Mapping[Name, Side], repeats: int) -> dict[Name, list[float]]:
    """Run all sides in turn, `repeats` times and once before to warm up; return the seconds of each repeat."""
    times: dict[Name, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name in sides if repeat % 2 else reversed(list(sides)):
            begin = time.perf_counter()
            sides[name]()
            times[name].append(time.perf_counter() - begin)
    return {name: seconds[1:] for name, seconds in times.items()}


def by_layer(name: str, about: str, images: int, sides: Mapping[int, Side], target: float, repeats: int) -> list[Ratio]:
    """Measure side 1, ours, against side 0, the reference; then side k, prompts from layer k on, against side 1."""
    times = interleaved(sides, repeats)
    ratios = [Ratio(name, about, times[0], times[1], target)]
    for k in list(sides)[2:]:
        ratio_name, comparison = f"late_{name.replace('_step', '')}_k{k}", f"ours with prompts from layer 1 / {k}"
        ratios.append(Ratio(ratio_name, comparison, times[1], times[k], 1.0))
    for ratio in ratios:
        image_times = [1000 * median(seconds) / images for seconds in (ratio.reference, ratio.ours)]
        ratio.notes.append("{:.2f} ms an image against {:.2f}".format(*image_times))
    return ratios


def quarters(backbone: Backbone) -> range:
    """Return the layers that prompts begin in: the first one, and every further quarter of the depth."""
    return range(1, backbone.depth, max(1, backbone.depth // 4))


def vit_tiny() -> Backbone:
    """Return a random ViT-Ti/16 at 224 px, in fp32: the shape of DeiT-Tiny."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vit = ViT(ViTConfig(image_size=224, patch_size=16, dim=192, depth=12, heads=3, mlp_dim=768))
    preprocessing = Preprocessing(224, IMAGENET["mean"], IMAGENET["std"])
    return Backbone("random ViT-Ti/16", vit, preprocessing, precision=FP32)


def pictures(backbone: Backbone, count: int, seed: int = 0) -> Tensor:
    """Return uint8 [count, 3, s, s]: 4 x 4 fields of random colours; a ViT embeds plain noise all alike."""
    generator = torch.Generator().manual_seed(seed)
    fields = torch.randint(0, 256, (count, 3, 4, 4), generator=generator, dtype=torch.uint8)
    return F.interpolate(fields, size=backbone.image_size, mode="nearest")


def memory_of(
    backbone: Backbone, tasks: int = 10, classes: int = 10, prompt_from_layer: int = 1, evidence: bool = False
) -> Memory:
    """Return random records whose prototypes are spread as the backbone's embeddings are.

    So different images retrieve different tasks. The prototypes do not depend on the prompts' layers.
    """
    embeddings = backbone.embed_pixels(pictures(backbone, 16, seed=1))
    generator = torch.Generator().manual_seed(0)
    mean, deviation = embeddings.mean(dim=0), embeddings.std(dim=0)

    def draw(count: int) -> Tensor:
        return mean + deviation * torch.randn(tasks, classes, count, backbone.dim, generator=generator)

    keys, values = draw(IMAGES if evidence else CENTROIDS), draw(CENTROIDS)
    prompts = torch.randn(tasks, *backbone.prompt_shape(1, from_layer=prompt_from_layer), generator=generator)
    deviations = torch.zeros(1, 1).expand(CENTROIDS, backbone.dim)  # takes no memory
    counts, single = (torch.ones(count, dtype=torch.int64) for count in (CENTROIDS, IMAGES))

    def record(t: int, k: int) -> ClassRecord:
        groups = Centroids(values[t, k], deviations, counts)
        summary = ClassSummary(F.normalize(keys[t, k], dim=1), single, deviations[0]) if evidence else None
        return ClassRecord(f"class-{t}-{k}", summary.points if summary else keys[t, k], groups, plain=summary)

    return Memory(
        TaskRecord(f"task-{t}", ClassTable.of(record(t, k) for k in range(classes)), prompts[t]) for t in range(tasks)
    )


def learner_for(backbone: Backbone, prompt_from_layer: int = 1) -> Learner:
    """Return a learner of ten tasks of ten classes; all such learners retrieve the same candidates."""
    learner = Learner(backbone, Settings.preset("paper"))
    learner.memory = memory_of(backbone, prompt_from_layer=prompt_from_layer)
    return learner
