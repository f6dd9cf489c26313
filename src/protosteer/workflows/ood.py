"""Unknown images: those that are less similar to every class than known images are.

Appendix B of the paper takes CPP as an energy-based model, E(x) = -tau log sum_y exp(s_y / tau). Rejection
uses its cold limit, -max_y s_y: docs/unknown.md says why. It does not change when classes are added that an
image is unlike, so that a threshold stays roughly right while the model grows.

How similar known images are is told by images that were not learned:

- By evidence, by those that can be left out of the records: what their similarity would be without them is
  known exactly, so that nothing need be held out. A class of a single image has none.
- By the paper's rule, by images that were held out when a class was learned. Each class carries their greatest
  similarities: scalars, no images. They depend on its own task alone, so that they come and go with it. A
  class from a handful of images has none to hold out: it carries the similarity of each image to the mean of
  the others, which lowers the threshold for this class alone.
"""

from __future__ import annotations

import torch

from protosteer.errors import LearnerError, SettingsError
from protosteer.learner import Learner


def calibrated(learner: Learner) -> bool:
    """Whether the model knows how similar images are that it has not learned."""
    return len(learner.reader.known_similarities()) > 0


def threshold(learner: Learner, fraction: float) -> float:
    """Return the similarity below which an image is unknown, so that at most this fraction of known ones is.

    That is so on average over the choice of images that were not learned; one choice may give more or less.
    Fewer than one of n + 1 cannot be asked for where there are n of them: then it is that one.
    """
    check_fraction(fraction)
    if not calibrated(learner):
        raise LearnerError(
            "this model cannot tell how similar known images are: learn at least one class from two images or "
            "more (by the paper's rule with a share held out, holdout=0.1), or predict without rejection",
            code="not-calibrated",
        )
    if not fraction:
        return -torch.inf
    ordered = learner.reader.known_similarities().sort().values
    # Of n such similarities and a new one, each is the k-th smallest with the same chance, 1 / (n + 1): below
    # the k-th, the new one is with k / (n + 1).
    rank = int(fraction * (len(ordered) + 1) + 1e-9)
    return float(ordered[max(rank, 1) - 1])


def check_fraction(fraction: float) -> None:
    """Raise a SettingsError for a share that cannot be rejected."""
    if not 0.0 <= fraction < 1.0:
        raise SettingsError(
            f"reject = {fraction}: give a fraction from 0 to below 1, such as 0.05",
            code="bad-reject",
            value=fraction,
        )


def own_thresholds(learner: Learner) -> dict[str, float]:
    """Return few-shot classes under CPP inference, and the similarity below which their images may be unknown."""
    return learner.reader.class_thresholds()


class Rejection:
    """Tells unknown images of a model, given the fraction of known ones that may be called so."""

    def __init__(self, learner: Learner, fraction: float):
        self.threshold = threshold(learner, fraction)
        self._own = own_thresholds(learner)

    def unknown(self, label: str, greatest: float) -> bool:
        """Of an image that was taken for this class; greatest: its similarity to the class most like it."""
        return greatest < min(self.threshold, self._own.get(label, self.threshold))
