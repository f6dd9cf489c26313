"""Confidence intervals of an accuracy, and calibration: how well confidence predicts accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Z = 1.959964  # of a two-sided interval of 95 %
BINS = 15  # of equal width, by confidence
MIN_PERCENT_IMAGES = 20  # of fewer images, a count says more than a percentage

Bins = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Accuracy:
    """How many of some images were classified correctly."""

    right: int
    images: int

    @property
    def percent(self) -> float:
        """The share in percent; NaN without images."""
        return 100.0 * self.right / self.images if self.images else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end of Wilson's 95 % interval, in percent."""
        if not self.images:
            return 0.0, 100.0
        n, share = self.images, self.right / self.images
        centre, scale = share + Z**2 / (2 * n), 1 + Z**2 / n
        half = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
        lower, upper = 100.0 * (centre - half) / scale, 100.0 * (centre + half) / scale
        return max(lower, 0.0) if self.right else 0.0, min(upper, 100.0) if self.right < n else 100.0

    def __str__(self) -> str:
        """Return "83 % (75 to 90)", or of few images "9 of 12 (47 to 91 %)": never a bare percentage."""
        lower, upper = self.interval
        if self.images < MIN_PERCENT_IMAGES:
            return f"{self.right} of {self.images} ({lower:.0f} to {upper:.0f} %)"
        return f"{self.percent:.0f} % ({lower:.0f} to {upper:.0f})"


def reliability(confidence: Tensor, right: Tensor) -> list[dict[str, Any]]:
    """Group images by confidence [B] into bins of equal width, given whether each is right, bool [B].

    A bin has the number of images, and their mean confidence and accuracy in percent; None without images.
    """
    bins = (confidence.double() * BINS).long().clamp(0, BINS - 1)  # a bin includes its lower edge, the last both
    counts = bins.bincount(minlength=BINS).tolist()
    confidence_sums, correct_counts = (
        torch.zeros(BINS, dtype=torch.double).index_add_(0, bins, values.double()).tolist()
        for values in (confidence, right)
    )
    return [
        {"images": n, "confidence": 100 * c / n if n else None, "accuracy": 100 * h / n if n else None}
        for n, c, h in zip(counts, confidence_sums, correct_counts, strict=True)
    ]


def calibration_error(bins: Bins) -> float:
    """Compute the expected calibration error in percent: |confidence - accuracy| of bins, mean over images."""
    errors = [b["images"] * abs(b["confidence"] - b["accuracy"]) for b in bins if b["images"]]
    return sum(errors) / sum(b["images"] for b in bins)
