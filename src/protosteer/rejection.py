"""Unknown images: those that are less similar to every prototype than known images are.

Appendix B of the paper takes CPP as an energy-based model, E(x) = -tau log sum_y exp(s_y / tau), low for images like those
learned. At the temperature of training the sum runs over every class alike and says little; "given an appropriate
temperature", as the paper has it, the greatest similarity dominates. Rejection therefore uses the cold limit,
E(x) -> -max_y s_y. docs/unknown.md has the measurements. The limit also does not change when classes are added that an
image is unlike, so that a threshold stays right while the model grows.

Each class carries the greatest similarities of images that were held out when it was learned: scalars, no images. They
depend on its own task alone, so that they come and go with it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.errors import LearnerError, SettingsError
from protosteer.memory import Memory


def calibrated(memory: Memory) -> bool:
    """Whether any class knows how similar images of its own are that it has not learned."""
    return any(len(similarities) for similarities in _held_out(memory))


def threshold(memory: Memory, fraction: float) -> float:
    """The similarity below which an image counts as unknown, so that at most this fraction of the known ones does."""
    if not 0.0 <= fraction < 1.0:
        raise SettingsError(f"reject = {fraction}: give a fraction from 0 to below 1, such as 0.05")
    if not calibrated(memory):
        raise LearnerError(
            "this model has no held-out images to tell how similar known images are; learn with a share held "
            "out (protosteer learn --holdout 0.1), or predict without rejection"
        )
    if not fraction:
        return -torch.inf
    ordered = torch.cat(_held_out(memory)).sort().values
    # Of n held-out similarities and a new one, each is the k-th smallest with the same chance, 1 / (n + 1): below the
    # k-th, the new one is with k / (n + 1). So few held-out images make rejection careful, not rash.
    rank = int(fraction * (len(ordered) + 1) + 1e-9)
    return float(ordered[max(rank, 1) - 1])


def left_out_similarity(embeddings: Tensor) -> Tensor | None:
    """[n]: cosine of each embedding [n, D] of a class to the mean of the others; None if there are no others."""
    if len(embeddings) < 2:
        return None
    return F.cosine_similarity(embeddings, embeddings.sum(dim=0) - embeddings, dim=1)


def _held_out(memory: Memory) -> list[Tensor]:
    records = [record for task in memory.tasks for record in task.classes]
    return [record.held_out for record in records if record.held_out is not None]
