"""Say how accurate a measured accuracy is."""

from __future__ import annotations

import math
from dataclasses import dataclass

Z = 1.959964  # of a two-sided interval of 95 %
MIN_PERCENT_IMAGES = 20  # of fewer images, a count says more than a percentage


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
        low, high = 100.0 * (centre - half) / scale, 100.0 * (centre + half) / scale
        return max(low, 0.0) if self.right else 0.0, min(high, 100.0) if self.right < n else 100.0

    def __str__(self) -> str:
        """Return "83 % (75 to 90)", or of few images "9 of 12 (47 to 91 %)": never a bare percentage."""
        low, high = self.interval
        if self.images < MIN_PERCENT_IMAGES:
            return f"{self.right} of {self.images} ({low:.0f} to {high:.0f} %)"
        return f"{self.percent:.0f} % ({low:.0f} to {high:.0f})"
