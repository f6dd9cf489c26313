"""Out-of-distribution images: those less similar to every class than known images are.

Appendix B of the paper takes CPP as an energy-based model, E(x) = -tau log sum_y exp(s_y / tau). Rejection uses its
cold limit, -max_y s_y: docs/explanation/unknown.md says why. Adding dissimilar classes does not change it, so a threshold stays
roughly right while the model grows.

The similarities of known images come from images that the model has not learned:

- Under the default classifier by leave-one-out, in closed form, so no image is held out. A class of a single image
  has none.
- Under CPP inference by held-out images. Each class stores their greatest similarities: scalars, no images. These
  depend on the class's own task alone. A few-shot class has no held-out images. It stores the similarity of each image
  to the mean of the others, which lowers the threshold for this class alone.
"""

from __future__ import annotations

import torch

from protosteer.errors import LearnerError, SettingsError
from protosteer.learner import Learner


def is_calibrated(learner: Learner) -> bool:
    """Return whether the model has similarities of known images, which a threshold needs."""
    return len(learner.reader.known_similarities()) > 0


def threshold(learner: Learner, fraction: float) -> float:
    """Return the similarity below which an image is unknown, so that at most this fraction of known ones is.

    This is the finite-sample rule of conformal prediction: of n similarities of known images and a new one, each is
    equally likely to be the k-th smallest, so the new one is below the k-th with probability k / (n + 1). It holds
    on average over the choice of the n; `rejected_share` says how far one choice may be off. Where n is too small
    for the fraction, no image is unknown.

    Args:
        learner: The model.
        fraction: Share of known images that may be called unknown, from 0 to below 1.

    Raises:
        LearnerError: The model is not calibrated.
        SettingsError: The fraction is out of range.
    """
    check_fraction(fraction)
    if not is_calibrated(learner):
        raise LearnerError(
            "this model cannot tell how similar known images are: learn at least one class from two images or "
            "more (under CPP inference with a share held out, holdout=0.1), or predict without rejection",
            code="not-calibrated",
        )
    ordered = learner.reader.known_similarities().sort().values
    rank = _rank(fraction, len(ordered))
    return float(ordered[rank - 1]) if rank else -torch.inf


def rejected_share(learner: Learner, fraction: float) -> tuple[float, float]:
    """Return the 95 % interval of the share of known images that a threshold calls unknown, in percent.

    Given the n similarities, that share has the distribution Beta(k, n + 1 - k) over their choice.
    """
    from scipy.stats import beta

    count = len(learner.reader.known_similarities())
    rank = _rank(fraction, count)
    if not rank:
        return 0.0, 0.0
    lower, upper = beta.ppf([0.025, 0.975], rank, count + 1 - rank)
    return 100.0 * float(lower), 100.0 * float(upper)


def _rank(fraction: float, count: int) -> int:
    return int(fraction * (count + 1) + 1e-9)


def check_fraction(fraction: float) -> None:
    """Raise a SettingsError if the fraction is not from 0 to below 1."""
    if not 0.0 <= fraction < 1.0:
        message = f"reject = {fraction}: give a fraction from 0 to below 1, such as 0.05"
        raise SettingsError(message, code="bad-reject", value=fraction)


def class_thresholds(learner: Learner) -> dict[str, float]:
    """Map few-shot classes under CPP inference to the similarity below which their images may be unknown."""
    return learner.reader.class_thresholds()


class Rejection:
    """Decides which images are unknown, given the fraction of known images that may be called so."""

    def __init__(self, learner: Learner, fraction: float):
        self.threshold = threshold(learner, fraction)
        self._class_thresholds = class_thresholds(learner)

    def unknown(self, label: str, greatest: float) -> bool:
        """Return whether an image is unknown, given its predicted class and greatest similarity to any class."""
        return greatest < min(self.threshold, self._class_thresholds.get(label, self.threshold))
