"""How good a backbone is while `mini` is being made, on images that it is not trained on and that no score is from.

CIFAR-100's held-out training images (mini_data.py) and photographs in folders of classes, 20 per class to learn from
and 10 to judge by; and of MNIST's training images 20 and 50. Percent right by class means, as they are and whitened.

    python tools/mini_validation.py --backbone nano --cifar DIR --mnist DIR --folders pets caltech101
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_data import held_out, read_photo
from pretrain_nano import read_mnist, split_per_class
from protosteer.backbones import Backbone
from protosteer.data.datasets.cifar import read_cifar100

LEARNED, JUDGED, DIGITS = 20, 10, 50  # per class; of digits more are judged
SHRINKAGE = 0.2  # of the covariance within classes, towards a multiple of the identity


class Validation:
    """Of each set the images [C, LEARNED + JUDGED, 3, h, w]."""

    def __init__(self, cifar: Path, mnist: Path, folders: Sequence[Path]):
        pixels, labels, _ = read_cifar100(cifar, "train")
        digit_images, names = split_per_class(*read_mnist(mnist, "train"), LEARNED + DIGITS)[0]
        digits = torch.tensor([int(name) for name in names])
        self.sets = {
            "cifar": pixels[held_out(labels)[:, : LEARNED + JUDGED]],
            "mnist": torch.stack([digit_images[digits == digit] for digit in range(10)]),
        }
        self.sets |= {folder.name: read_classes(folder) for folder in folders}

    def scores(self, backbone: Backbone) -> dict[str, float]:
        accuracies = {}
        for name, images in self.sets.items():
            embeddings = backbone.embed_pixels(images.flatten(0, 1).contiguous(), batch_size=32)
            points = embeddings.unflatten(0, images.shape[:2])
            accuracies[name] = by_class_means(points)
            accuracies[f"{name}_white"] = by_class_means(whitened(points))
        return {name: round(score, 1) for name, score in accuracies.items()}


def read_classes(folder: Path) -> Tensor:
    """The first photographs, by name, of every class that has enough."""
    classes = (sorted(c.iterdir())[: LEARNED + JUDGED] for c in sorted(folder.iterdir()) if c.is_dir())
    pixels = [np.stack([read_photo(file) for file in files]) for files in classes if len(files) == LEARNED + JUDGED]
    return torch.from_numpy(np.stack(pixels))


def by_class_means(points: Tensor) -> float:
    """Percent of points [C, LEARNED:, D] that are nearest, by cosine, to the mean of their class's [C, :LEARNED, D]."""
    means = F.normalize(points[:, :LEARNED].mean(dim=1), dim=1)
    nearest = (F.normalize(points[:, LEARNED:], dim=2) @ means.T).argmax(dim=2)  # [C, JUDGED]
    return 100 * float((nearest == torch.arange(len(points))[:, None]).double().mean())


def whitened(points: Tensor) -> Tensor:
    """Centred, and turned so that learned points scatter alike in all directions around the means of their classes."""
    learned_points = points[:, :LEARNED]
    around = (learned_points - learned_points.mean(dim=1, keepdim=True)).flatten(0, 1)
    scatter = around.T @ around / len(around)
    round_one = torch.eye(len(scatter)) * scatter.diagonal().mean()
    precision = torch.linalg.inv((1 - SHRINKAGE) * scatter + SHRINKAGE * round_one)
    return (points - learned_points.mean(dim=(0, 1))) @ torch.linalg.cholesky(precision)


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge a backbone as mini is judged while it is being made.")
    parser.add_argument("--backbone", default="mini")
    parser.add_argument("--weights", type=Path, metavar="FILE")
    parser.add_argument("--cifar", type=Path, required=True, metavar="DIR", help="cifar-100-python")
    parser.add_argument("--mnist", type=Path, required=True, metavar="DIR", help="MNIST's .gz files")
    parser.add_argument("--folders", type=Path, nargs="*", default=[], metavar="DIR", help="with a folder per class")
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbone = Backbone.load(args.backbone, weights=args.weights, crop=1.0, precision="bf16")
    print(json.dumps(Validation(args.cifar, args.mnist, args.folders).scores(backbone)))


if __name__ == "__main__":
    main()
