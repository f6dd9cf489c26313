"""CPP from top to bottom: class folders -> tasks -> prompts and prototypes -> accuracy matrix.

    python examples/cpp_minimal.py                # scikit-learn's digits in 5 tasks; 20 seconds on a CPU
    python examples/cpp_minimal.py FOLDER         # your images: FOLDER/CLASS/IMAGE, or train/ and test/ with class folders

`protosteer.paper` has the frozen ViT, the training of one task (Algorithm 1) and inference (Algorithm 2). This file shows
what happens between tasks: which prompts and prototypes are kept, and how the result is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer import Backbone, Settings
from protosteer.data.augment import Augmentation, augmented
from protosteer.data.images import ImageSet
from protosteer.paper.inference import PrototypeIndex, match
from protosteer.paper.prompts import prompted_forward
from protosteer.paper.prototypes import Anchors, Centroids
from protosteer.paper.task import learn_task, task_seed
from protosteer.streams import Stream, StreamOptions, open_stream

CHUNK = 128  # images embedded and matched at once


class TaskImages:
    """The training images of one task, with the interface that `learn_task` expects."""

    def __init__(self, images: ImageSet, backbone: Backbone, settings: Settings):
        self.images, self.backbone, self.settings = images, backbone, settings
        self.augmentation = Augmentation(backbone.preprocessing, settings.augmentation)

    def embed(self, prompt: Tensor | None) -> Tensor:
        """Embed all n images under one prompt [S, L, D] or None: [n, D]."""
        return self.backbone.embed_set(self.images, prompt, self.settings.embed_batch_size)

    def views(self, batches: Sequence[Tensor], generator: torch.Generator) -> Iterator[Tensor]:
        """Augment the images of each batch of rows [N] and turn them into tokens [N, T, D]."""
        for images in augmented(self.images, batches, self.augmentation, self.backbone.device, generator=generator):
            yield self.backbone.trunk(images, self.settings.prompt_from_layer - 1)


class CPP:
    """Contrastive prototypical prompts: prompts and prototypes of all tasks learned so far."""

    def __init__(self, backbone: Backbone, settings: Settings):
        self.backbone, self.settings = backbone, settings
        self.classes: list[str] = []
        self.class_tasks: list[int] = []  # the task of each class
        self.keys: list[Centroids] = []  # U: key prototypes of each class
        self.values: list[Centroids] = []  # U hat: value prototypes of each class
        self.prompts: list[Tensor | None] = []  # P^t [S, L, D] of each task

    def learn(self, images: ImageSet, labels: Sequence[str]) -> None:
        """Learn one task of n images with labels [n]; the images are not needed afterwards."""
        classes = sorted(set(labels))
        task = learn_task(
            TaskImages(images, self.backbone, self.settings),
            torch.tensor([classes.index(label) for label in labels]),  # [n]
            self.backbone,
            self.settings,
            start=self.prompts[-1] if self.prompts else None,
            anchors=Anchors.of(self.values, range(len(self.values)), self.settings.noise),
            seed=task_seed(self.settings.seed, classes),
        )
        self.classes += classes
        self.class_tasks += [len(self.prompts)] * len(classes)
        self.keys += task.key_prototypes
        self.values += task.value_prototypes
        self.prompts.append(task.prompt)

    def index(self) -> PrototypeIndex:
        """Stack all prototypes, so that an image is compared with all of them in one product."""

        def stack(prototypes: Sequence[Centroids]) -> tuple[Tensor, Tensor]:  # [P, D], classes [P]
            sizes = torch.tensor([len(centroids.means) for centroids in prototypes])
            means = torch.cat([centroids.means for centroids in prototypes])
            return F.normalize(means, dim=1), torch.arange(len(prototypes)).repeat_interleave(sizes)

        keys, key_classes = stack(self.keys)
        values, value_classes = stack(self.values)
        key_tasks, prompt_tasks = torch.tensor(self.class_tasks)[key_classes], torch.arange(len(self.prompts))
        return PrototypeIndex(keys, key_tasks, values, value_classes, prompt_tasks, len(self.classes))

    def predict(self, images: ImageSet) -> list[str]:
        """Predict the class of each image, among all classes learned so far."""
        index, labels = self.index(), list[str]()
        for rows in torch.arange(len(images)).split(CHUNK):
            pixels = images.pixels(rows.tolist())  # uint8 [B, 3, h, w]
            tokens = self.backbone.trunk_pixels(pixels, 0)  # [B, N, D], before any layer
            embed = prompted_forward(self.backbone, self.prompts, tokens, 0, self.settings.embed_batch_size)
            scores = match(index, embed, len(rows), self.settings.neighbours).scores  # [B, C]
            labels += [self.classes[c] for c in scores.argmax(dim=1).tolist()]
        return labels


def run(stream: Stream, cpp: CPP) -> list[list[float]]:
    """Learn the tasks in order; return A[i][j], percent correct on task j's test images after task i."""
    matrix: list[list[float]] = []
    for i, task in enumerate(stream):
        cpp.learn(task.train, task.train_labels)
        matrix.append([])
        for known_task in stream.tasks[: i + 1]:
            hits = [a == b for a, b in zip(cpp.predict(known_task.test), known_task.test_labels, strict=True)]
            matrix[-1].append(100 * sum(hits) / len(hits))
        print(f"after {task.name}: " + " ".join(f"{accuracy:6.2f}" for accuracy in matrix[-1]), flush=True)
    return matrix


def summarise(matrix: list[list[float]]) -> dict[str, float]:
    """Compute accuracy and forgetting, after the last task and averaged over tasks, from the accuracy matrix."""
    accuracy = [sum(row) / len(row) for row in matrix]  # A_i
    forgetting = [  # F_i: best earlier accuracy less A[i][j], averaged over earlier tasks j
        sum(max(matrix[t][j] for t in range(j, i)) - matrix[i][j] for j in range(i)) / i for i in range(1, len(matrix))
    ] or [0.0]
    return {
        "last_accuracy": accuracy[-1],
        "avg_accuracy": sum(accuracy) / len(accuracy),
        "last_forgetting": forgetting[-1],
        "avg_forgetting": sum(forgetting) / len(forgetting),
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Parse the command line, run, and print the summary."""
    parser = argparse.ArgumentParser(description="CPP on the digits or on a folder of class folders.")
    parser.add_argument("folder", nargs="?", help="images in class folders; without it, the digits")
    parser.add_argument("--backbone", help="default: nano for digits, mini for a folder")
    parser.add_argument("--tasks", type=int, default=5)
    options = parser.parse_args(arguments)
    backbone = Backbone.load(options.backbone or ("mini" if options.folder else "nano"), precision="fp32")
    # The paper's settings, but shorter training on small batches; a mirrored digit is not a digit.
    settings = Settings.preset("paper", epochs=15, batch_size=30, neck_hidden=512)
    settings = settings if options.folder else settings.replace(augmentation="no-flip")
    name = f"folder:{options.folder}" if options.folder else "split-digits"
    stream = open_stream(name, StreamOptions(tasks=options.tasks), backbone.preprocessing)
    metrics = summarise(run(stream, CPP(backbone, settings)))
    print(" ".join(f"{name} {value:.2f}" for name, value in metrics.items()))
    return metrics


if __name__ == "__main__":
    main()
