"""Estimate what runs cost: images, forward passes, and time on this machine by timing a few passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from protosteer.backbones import Backbone
from protosteer.backbones.registry import known_weights
from protosteer.evaluation.experiment import Experiment
from protosteer.methods import find_method
from protosteer.paper.vit import ViT
from protosteer.reproduction.grid import is_finished
from protosteer.runtime.device import choose_device
from protosteer.streams import find_benchmark

TIMED_IMAGES = 2  # per timed pass
REPEATS = 2
# Training images, test images and classes of streams that may not be on this disk. notMNIST: its small set.
SIZES = {
    "split-cifar100": (50_000, 10_000, 100),
    "five-datasets": (262_000, 60_000, 50),
    "imagenet-r": (24_000, 6_000, 200),
    "imagenet-subset": (130_000, 5_000, 100),
    "split-digits": (898, 899, 10),
    "split-details": (360, 360, 9),
    "glyphs": (76_851, 11_873, 20),
    "pets": (3_680, 3_669, 37),
}


@dataclass(frozen=True)
class Cost:
    """What all seeds of a run cost.

    Attributes:
        run: The run.
        train_images: Training images of all tasks.
        test_images: Test images of all tasks.
        training_passes: Forward and backward passes in training.
        forward_passes: Forward passes that store classes and test, at most.
        seconds: The estimated time; 0 if the run is finished.
    """

    run: Experiment
    train_images: int
    test_images: int
    training_passes: int
    forward_passes: int
    seconds: float


class Stopwatch:
    """Times passes of each backbone once, on random weights where the real ones are not on this disk."""

    def __init__(self) -> None:
        self.timings: dict[tuple[str, int | None, bool], tuple[float, float]] = {}

    def seconds(self, run: Experiment) -> tuple[float, float]:
        """Return seconds per image of a forward pass, and of a forward and backward pass."""
        trains_backbone = find_method(run.method).trains_backbone
        info = known_weights(run.backbone)
        architecture = str(info.config) if info else run.backbone  # equal ones take equal time
        key = (architecture, run.image_size, trains_backbone)
        if key not in self.timings:
            self.timings[key] = _time_passes(_load_backbone(run), trains_backbone)
        return self.timings[key]


def _load_backbone(run: Experiment) -> Backbone:
    info = known_weights(run.backbone)
    if info is None:
        return run.load_backbone()
    config = replace(info.config, image_size=run.image_size or info.config.image_size)
    backbone = Backbone(info.name, ViT(config), info.preprocessing, "random", precision=run.precision)
    return backbone.to(choose_device(run.device))


def _time_passes(backbone: Backbone, trains_backbone: bool) -> tuple[float, float]:
    images = torch.zeros(TIMED_IMAGES, 3, backbone.image_size, backbone.image_size, device=backbone.device)
    prompt = torch.zeros(backbone.depth, 1, backbone.dim, device=backbone.device, requires_grad=True)
    learner = backbone.trainable_copy() if trains_backbone else backbone

    def forward() -> None:
        with torch.no_grad():
            backbone.embed(images)

    def train() -> None:
        learner.embed(images, None if trains_backbone else prompt).sum().backward()

    return _time_per_image(forward), _time_per_image(train)


def _time_per_image(work: Callable[[], None]) -> float:
    """Return the least seconds per image; the first call, which warms up, does not count."""
    work()
    durations = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        durations.append(time.perf_counter() - start)
    return min(durations) / TIMED_IMAGES


def estimate(run: Experiment, stopwatch: Stopwatch) -> Cost:
    """Estimate the cost of all seeds of a run."""
    train, test = _count_images(run)
    settings, method = run.settings_for(0), find_method(run.method)
    seeds = len(run.seeds or (0,))
    is_training = run.states_from is None and getattr(settings, "prompts", True)
    train_passes = train * getattr(settings, "epochs", 0) if is_training else 0
    if method.state_grows and method.trains_backbone:  # retrains on all images after each task
        train_passes = train_passes * (_count_tasks(run) + 1) // 2
    store_passes = 0 if run.states_from else train * (2 if train_passes else 1)
    prompts = getattr(settings, "neighbours", 1) * getattr(settings, "prompts", train_passes > 0)
    passes_per_image = (_count_tasks(run) + 1) / 2 if method.trains_backbone else 1 + prompts
    forward_passes = store_passes + round(test * passes_per_image)
    pass_seconds, step_seconds = stopwatch.seconds(run)
    seconds = 0.0 if is_finished(run) else train_passes * step_seconds + forward_passes * pass_seconds
    return Cost(run, seeds * train, seeds * test, seeds * train_passes, seeds * forward_passes, seeds * seconds)


def _count_tasks(run: Experiment) -> int:
    return run.options.tasks or find_benchmark(run.stream).tasks


def _count_images(run: Experiment) -> tuple[int, int]:
    """Return training and test images of a run's stream, as its options reduce them."""
    name, options = find_benchmark(run.stream).name, run.options
    *counts, classes = SIZES[name]
    if options.task_file is not None:
        class_count = sum(line.count(",") + 1 for line in options.task_file.read_text().splitlines() if line)
        counts, classes = [count * class_count // classes for count in counts], class_count
    caps = (options.train_per_class, options.test_per_class)
    train, test = (min(count, cap * classes) if cap else count for count, cap in zip(counts, caps, strict=True))
    return train, test
