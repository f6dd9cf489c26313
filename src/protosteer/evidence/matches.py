"""Matches of the default classifier, which extend those of the paper."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from protosteer.paper.inference import Matches


@dataclass(frozen=True)
class ClassifierMatches(Matches):
    """Matches whose scores are logits, [B, C] of all classes or [B, n] of candidates."""

    similarities: Tensor  # [B, C] or [B, n]: cosines, by which unknown images are rejected
    class_ids: Tensor | None = None  # [B, n]: the candidates; None: all classes, in their order
    log_other_mass: Tensor | None = None  # [B]: one logit for all other classes together
