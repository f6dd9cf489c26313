"""Unknown images: those that are less similar to every prototype than known images are.

Appendix B of the paper takes CPP as an energy-based model, E(x) = -tau log sum_y exp(s_y / tau). Rejection
uses its cold limit, -max_y s_y: docs/unknown.md says why. It does not change when classes are added that an
image is unlike, so that a threshold stays roughly right while the model grows.

Each class carries the greatest similarities of images that were held out when it was learned: scalars, no
images. They depend on its own task alone, so that they come and go with it. A class from a handful of images
has none to hold out: it carries the similarity of each image to the mean of the others, which lowers the
threshold for this class alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protosteer.errors import LearnerError, SettingsError
from protosteer.method.memory import ClassRecord, Memory


def calibrated(memory: Memory) -> bool:
    """Whether any class knows how similar images of its own are that it has not learned."""
    return any(len(_similarities(record)) for record in memory.records)


def threshold(memory: Memory, fraction: float) -> float:
    """The similarity below which an image counts as unknown, so that at most this fraction of the known ones
    does.

    That is so on average over the choice of held-out images; one choice may give more or less. Fewer than one
    of n + 1 cannot be asked for where n images were held out: then it is that one.
    """
    check_fraction(fraction)
    if not calibrated(memory):
        raise LearnerError(
            "this model has no held-out images to tell how similar known images are; learn with a share held "
            "out (holdout=0.1), or predict without rejection"
        )
    if not fraction:
        return -torch.inf
    few = {id(record) for record in _few(memory)}
    ordered = torch.cat([_similarities(r) for r in memory.records if id(r) not in few]).sort().values
    # Of n held-out similarities and a new one, each is the k-th smallest with the same chance, 1 / (n + 1):
    # below the k-th, the new one is with k / (n + 1).
    rank = int(fraction * (len(ordered) + 1) + 1e-9)
    return float(ordered[max(rank, 1) - 1])


def check_fraction(fraction: float) -> None:
    if not 0.0 <= fraction < 1.0:
        raise SettingsError(f"reject = {fraction}: give a fraction from 0 to below 1, such as 0.05")


def own_thresholds(memory: Memory) -> dict[str, float]:
    """Classes of a handful of images, and the similarity below which images taken for them may be unknown."""
    return {record.name: float(_similarities(record).min()) for record in _few(memory)}


class Rejection:
    """Tells unknown images of a model, given the fraction of known ones that may be called so."""

    def __init__(self, memory: Memory, fraction: float):
        self.threshold = threshold(memory, fraction)
        self._own = own_thresholds(memory)

    def unknown(self, label: str, similarity: float) -> bool:
        """Of an image that was taken for this class, at this similarity."""
        return similarity < min(self.threshold, self._own.get(label, self.threshold))


def _few(memory: Memory) -> list[ClassRecord]:
    """Classes that had no images to hold out; none of them if no other class has a threshold to offer."""
    tasks = [task for task in memory.tasks if not task.about.held_out]
    few = [r for task in tasks for r in task.classes if len(_similarities(r))]
    return few if len(few) < sum(len(_similarities(r)) > 0 for r in memory.records) else []


def _similarities(record: ClassRecord) -> Tensor:
    return torch.empty(0) if record.similarities is None else record.similarities
