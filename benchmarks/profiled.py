"""Where the time of a training step and of a prediction goes, by kind of operation: `python -m benchmarks.profiled`.

The torch profiler's own time of every operation, as a share of the whole; on a random ViT-Ti/16 at 224 px.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from protosteer.backbones import Backbone
from protosteer.bench.prediction import learner_for
from protosteer.bench.subjects import pictures, vit_tiny
from protosteer.data.augment import Augmentation
from protosteer.data.images import ArrayImages
from protosteer.settings import Settings
from protosteer.training import Head, initial_prompt
from protosteer.views import CachedViews, FreshViews

# Names of operations that begin like this; the first that fits counts.
KINDS = {
    "matrix products": ("aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm"),
    "attention": ("aten::_scaled_dot_product",),
    "GELU": ("aten::gelu",),
    "layer norm": ("aten::native_layer_norm",),
    "patch embedding": ("aten::mkldnn_convolution", "aten::convolution", "aten::_conv", "aten::thnn_conv"),
    "copying": ("aten::copy_", "aten::cat", "aten::index", "aten::fill_", "aten::_to_copy", "aten::clone"),
}


def shares(work: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """Seconds of one call, and the percentage of each kind of operation."""
    work()  # warm up
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    times: dict[str, float] = dict.fromkeys([*KINDS, "everything else"], 0.0)
    for event in profiler.key_averages():
        own = (kind for kind, starts in KINDS.items() if event.key.startswith(starts))
        times[next(own, "everything else")] += event.self_cpu_time_total
    total = sum(times.values())
    return total / 1e6, {kind: 100 * own / total for kind, own in times.items()}


def training_step(backbone: Backbone, settings: Settings, images: int) -> Callable[[], object]:
    """Forward, loss and backward of one batch, from pixels or from cached tokens."""
    layers = settings.prompt_from_layer - 1
    augment = Augmentation(backbone.preprocessing)
    fresh = FreshViews(backbone, ArrayImages(pictures(backbone, images)), augment, layers)
    views = CachedViews(fresh, 1, images) if settings.cached_views else fresh
    prompt = nn.Parameter(initial_prompt(backbone, settings, None))
    head, labels, rows = Head(backbone.dim, 10, settings), torch.arange(images) % 10, torch.arange(images)

    def step() -> None:
        (tokens,) = views.batches(0, [rows])
        head.loss(backbone.rest(tokens, layers, prompt), labels, None).backward()

    return step


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.profiled", description=__doc__)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    options = parser.parse_args(words)
    backbone, images = vit_tiny(), options.images
    learner, pixels = learner_for(backbone), pictures(backbone, images)
    late = Settings(prompt_from_layer=7, cached_views=1)
    columns = {
        "training step": shares(training_step(backbone, Settings(), images)),
        "from layer 7, cached": shares(training_step(backbone, late, images)),
        "prediction": shares(lambda: learner.predict(pixels)),
    }
    if options.json:
        print(json.dumps({name: {"seconds": s, "percent": kinds} for name, (s, kinds) in columns.items()}))
        return
    print(f"{'percent of the time':<20}" + "".join(f"{name:>22}" for name in columns))
    for kind in [*KINDS, "everything else"]:
        print(f"{kind:<20}" + "".join(f"{kinds[kind]:>22.1f}" for _, kinds in columns.values()))
    print(f"{'ms an image':<20}" + "".join(f"{1000 * s / images:>22.1f}" for s, _ in columns.values()))


if __name__ == "__main__":
    main()
