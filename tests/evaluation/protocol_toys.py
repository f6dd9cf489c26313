"""A small stream of easy images, some of them too noisy, and settings that learn it in seconds."""

import torch

from conftest import easy_task
from protosteer.data.images import ArrayImages
from protosteer.settings import Settings
from protosteer.streams.base import Stream, Task

QUICK = Settings.preset("paper", epochs=2, batch_size=8, neck_hidden=16, augmentation="crop", centroids=2)
GROUPS = [["ant", "bee"], ["cat", "dog", "eel"], ["fox"], ["gnu", "hen"]]


def stream(tasks: int = 4, noise: int = 60) -> Stream:
    """Unequal tasks; test images are noisier than training images, so that not all are classified."""
    made = []
    for classes in GROUPS[:tasks]:
        train, train_labels = easy_task(classes)
        test, test_labels = easy_task(classes, per_class=5, seed=70)
        added = torch.randint(-noise, noise, test.shape, generator=torch.Generator().manual_seed(len(made)))
        test = (test.int() + added).clamp(0, 255).to(torch.uint8)
        made.append(Task(classes[0], classes, ArrayImages(train), train_labels, ArrayImages(test), test_labels))
    return Stream("easy", made)


def blurred(tasks: Stream) -> Stream:
    """The same, but that of every other class each third image has gone to one of the next two tasks."""
    given: list[list[tuple[torch.Tensor, str]]] = [[] for _ in tasks]
    for j, task in enumerate(tasks):
        for row, label in enumerate(task.train_labels):
            away = 0 if row % 3 or label in task.classes[1::2] else 1 + row // 3 % 2
            given[(j + away) % len(tasks)].append((task.train.pixels([row]), label))
    made = []
    for task, images in zip(tasks, given, strict=True):
        pixels, labels = torch.cat([some for some, _ in images]), [label for _, label in images]
        visiting = sorted(set(labels) - set(task.classes))
        train = ArrayImages(pixels)
        made.append(Task(task.name, task.classes, train, labels, task.test, task.test_labels, visiting))
    return Stream("blurred", made)
