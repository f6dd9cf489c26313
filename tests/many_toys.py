"""A learner of a few hundred classes that nobody had to teach, each a small cloud of points."""

import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import tiny_backbone
from protosteer.evidence.prototype_summary import ClassSummary
from protosteer.learner import Learner
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord, TaskRecord
from protosteer.paper.prototypes import Centroids
from protosteer.settings import Settings

POINTS = 2
DIM = tiny_backbone().dim


def cloud(name: str, seed: int, dim: int = DIM) -> ClassRecord:
    generator = torch.Generator().manual_seed(seed)
    noise = 0.12 * torch.randn(POINTS, dim, generator=generator)
    points = F.normalize(F.normalize(torch.randn(dim, generator=generator), dim=0) + noise, dim=1)
    ones = torch.ones(POINTS, dtype=torch.int64)
    values = Centroids(points[:1] + 0.1, torch.zeros(1, dim), ones[:1] * POINTS)
    return ClassRecord(name, points, values, plain=ClassSummary(points, ones, torch.zeros(dim)))


def many(tasks: int = 20, classes: int = 10) -> Learner:
    learner = Learner(tiny_backbone(), Settings(rule="evidence"))
    prompts = torch.randn(tasks, *learner.backbone.prompt_shape(1), generator=torch.Generator().manual_seed(0))
    learner.memory = Memory(
        TaskRecord(
            f"task-{t}", ClassTable.of(cloud(f"class-{t}-{k}", t * classes + k) for k in range(classes)), prompts[t]
        )
        for t in range(tasks)
    )
    return learner


def near(learner: Learner, spread: float = 1.0, images: int = 40) -> Tensor:
    """Images like those of some classes [B, D], so far off that not all are sure."""
    records = learner.memory.records
    points = torch.stack([record.keys[0] for record in records[:: len(records) // images][:images]])
    noise = torch.randn(points.shape, generator=torch.Generator().manual_seed(7))
    return F.normalize(points + spread * torch.linspace(0, 1, len(points))[:, None] * F.normalize(noise, dim=1), dim=1)
