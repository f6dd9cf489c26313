"""What corrections bring: a stream of images whose wrong answers are corrected one by one.

    python tools/corrections.py --cifar cifar-100-python --weights deit_tiny_patch16_224.safetensors \
        --mnist mnist --out experiments/corrections/corrections.json
    python tools/corrections.py --plot experiments/corrections/corrections.json docs/images/corrections.png

A model of the preset `instant` is taught a few images of each class. Then other images arrive, in an order drawn by
the seed; whichever is taken for another class is corrected, and of the others a share is confirmed (`--confirmed`).
After each tenth correction the model is asked about test images, which are never corrected. CIFAR-100: classes and images drawn by the seed, DeiT-Tiny; MNIST: nano.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.datasets.cifar import read_cifar100
from protosteer.data.datasets.idx import idx_files, read_images
from protosteer.evaluation.manifest import circumstances
from protosteer.learner import Learner
from protosteer.settings import Settings
from protosteer.util.statistics import calibration_error, reliability

EVERY = 10  # corrections between two tests


@dataclass(frozen=True)
class Plan:
    """How many classes, and how many images of each are taught, arrive, and test."""

    classes: int
    taught: int
    arriving: int
    tested: int


PLANS = {"CIFAR-100, DeiT-Tiny": Plan(20, 5, 20, 20), "MNIST, nano": Plan(10, 5, 60, 50)}


def play(
    backbone: Backbone,
    images: Tensor,
    labels: Tensor,
    plan: Plan,
    seed: int,
    confirmed: float = 0.0,
    steps: bool = True,
) -> dict[str, Any]:
    """Run one stream: test accuracy by number of corrections, and how often a correction changed its own answer."""
    draw = torch.Generator().manual_seed(seed)
    classes = torch.randperm(int(labels.max()) + 1, generator=draw)[: plan.classes].tolist()
    parts: list[list[tuple[int, int]]] = [[], [], []]  # rows and classes
    for c in classes:
        rows = (labels == c).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=draw)][: plan.taught + plan.arriving + plan.tested]
        for part, group in zip(parts, rows.split([plan.taught, plan.arriving, plan.tested]), strict=True):
            part += [(row, c) for row in group.tolist()]
    learn_rows, stream_rows, test_rows = parts
    learner = Learner(backbone, Settings.preset("instant"))
    learner.learn((images[[row for row, _ in learn_rows]], [str(c) for _, c in learn_rows]))
    pixels, truth = images[[row for row, _ in test_rows]], [str(c) for _, c in test_rows]

    def run_test() -> tuple[int, float, float]:
        """Return the corrections so far, accuracy on the test images and calibration error."""
        answer = learner.predict(pixels)
        hits = torch.tensor([a == b for a, b in zip(answer.labels, truth, strict=True)])
        error = calibration_error(reliability(answer.probabilities.amax(dim=1), hits))
        return num_corrections, 100 * float(hits.double().mean()), error

    num_corrections = num_changed = num_heavier = 0
    curve, hits = [run_test()], list[Tensor]()
    order = torch.randperm(len(stream_rows), generator=draw).tolist()
    is_confirmed = torch.rand(len(stream_rows), generator=draw) < confirmed
    for place in order:
        row, c = stream_rows[place]
        image = images[row : row + 1]
        if learner.predict(image).labels == [str(c)]:
            hits += [image] if is_confirmed[place] else []
            continue
        (record,) = learner.correct(image, str(c)).classes
        num_corrections += 1
        num_changed += learner.predict(image).labels == [str(c)]
        num_heavier += record.plain is not None and int(record.plain.counts.sum()) > 1
        if num_corrections % EVERY == 0:
            if hits:
                learner.confirm(torch.cat(hits))
            hits = []
            curve += [run_test()] if steps else []
    if hits:
        learner.confirm(torch.cat(hits))
    curve.append(run_test())
    print(
        f"seed {seed}, {confirmed:.0%} confirmed: {num_corrections} corrections, {num_changed} changed their answer; accuracy "
        f"{curve[0][1]:.1f} -> {curve[-1][1]:.1f}, calibration error {curve[0][2]:.1f} -> {curve[-1][2]:.1f}",
        flush=True,
    )
    figures = {"corrections": num_corrections, "changed": num_changed, "heavier": num_heavier, "curve": curve}
    return {"seed": seed, "confirmed": confirmed, **figures}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    streams: dict[str, Any] = {}
    for name, plan in PLANS.items():
        if (options.cifar if name.startswith("CIFAR") else options.mnist) is None:
            continue
        if name.startswith("CIFAR"):
            images, numbers, _ = read_cifar100(options.cifar, "test")
            backbone = Backbone.load("deit_tiny_patch16_224", weights=options.weights)
        else:
            files = idx_files(options.mnist, ("t10k",))
            if files is None:
                raise SystemExit(f"{options.mnist} has no test images of MNIST")
            images, numbers = read_images(*files)
            backbone = Backbone.load("nano")
        labels = torch.as_tensor(numbers)
        print(name, plan)
        streams[name] = [
            play(backbone, images, labels, plan, seed, share, options.steps)
            for share in options.confirmed
            for seed in options.seeds
        ]
    return {"streams": streams, "circumstances": circumstances(torch.device("cpu"))}


def plot(figures: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    from protosteer.report.plots import png

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, (name, runs) in enumerate(figures["streams"].items()):
        for run in (run for run in runs if not run.get("confirmed")):
            counts, percent, _ = zip(*run["curve"], strict=True)
            axes.plot(counts, percent, color=f"C{i}", label=name if run is runs[0] else None)
    axes.set(xlabel="images corrected", ylabel="accuracy on other images, %")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    path.write_bytes(png(figure))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--mnist", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--seeds", type=lambda text: [int(word) for word in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--confirmed", type=float, nargs="+", default=[0.0, 0.3, 1.0], help="shares of right answers")
    parser.add_argument("--ends", dest="steps", action="store_false", help="test before and after alone")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("JSON", "PNG"))
    options = parser.parse_args(words)
    if options.plot:
        plot(json.loads(options.plot[0].read_text()), options.plot[1])
        return
    figures = measure(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
