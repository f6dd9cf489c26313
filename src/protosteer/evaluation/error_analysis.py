"""Error analysis of a run: which kinds of errors its accuracy consists of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from protosteer.methods.base import Images, Method
from protosteer.streams.base import Task


def diagnose(method: Method, tests: Sequence[tuple[Task, Images]]) -> dict[str, Any]:
    """Analyse the errors on the test images of every task learned; returns metrics per task, and their mean."""
    number = {name: k for k, name in enumerate(method.classes)}
    tasks = []
    for j, (task, images) in enumerate(tests):
        truth = torch.tensor([number[label] for label in task.test_labels])
        own = torch.tensor([number[name] for name in task.classes])
        tasks.append(method.diagnose(images, truth, j, own))
    named = [{"task": task.name, **figures} for (task, _), figures in zip(tests, tasks, strict=True)]
    return {"mean": {name: sum(t[name] for t in tasks) / len(tasks) for name in tasks[0]}, "tasks": named}
