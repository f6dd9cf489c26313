"""Active learning: of many images without labels, suggest those whose labels help a model most.

- An image is uncertain if its two most probable classes have similar probabilities. The label of one image is
  informative about similar images: the kernel of the default classifier (`arc_cosine`) is used as their covariance.
  Images are chosen one after the other, each time the one whose label leaves least variance over all images, weighted
  by their uncertainty (transductive experimental design, Yu, Bi and Tresp 2006, with weights). So an isolated outlier
  helps little, and so does the second of two similar images.
- Out-of-distribution images (`ood`) are listed: they may be of new classes, or of nothing. They may be chosen as
  well: excluding them cost accuracy on photographs.
- Near-duplicates are listed (`duplicates`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.data.images import ForgivingFiles
from protosteer.data.transforms import Preprocessing
from protosteer.errors import SettingsError
from protosteer.evidence.kernel_ridge import RIDGE, arc_cosine
from protosteer.learner import Learner
from protosteer.prediction import Prediction
from protosteer.runtime.progress import OnStage, counting
from protosteer.workflows.duplicates import THUMBNAIL, find_near_duplicates, thumbnails
from protosteer.workflows.ood import Rejection, check_fraction, is_calibrated
from protosteer.workflows.prediction_table import Row

COUNT = 50
REJECT = 0.05  # the share of known images that may be called out-of-distribution
MAX_CANDIDATES = 4096  # the most uncertain images are compared; the work grows as their number squared
MIN_UNCERTAINTY = 1e-6  # among images that are all certain, the most typical ones are chosen


@dataclass(frozen=True)
class Suggestion:
    """An image to look at.

    Attributes:
        path: The file.
        why: "label", "unknown", "duplicate" or "mislabelled".
        guess: The top-1 class.
        probability: Its probability.
        other: The image that it is a copy of, or its given label.
    """

    path: Path
    why: str
    guess: str
    probability: float
    other: str | None = None


@dataclass(frozen=True)
class Suggestions:
    """Suggestions among images: a table for `prediction_table.write_table`.

    Attributes:
        images: How many images could be read.
        found: How many there are for each reason.
        chosen: The suggestions, at most the requested number for each reason.
        errors: What is wrong with each unreadable file.
    """

    kind: ClassVar[str] = "suggestions"
    width: ClassVar[int] = 0
    images: int
    found: dict[str, int]
    chosen: list[Suggestion]
    errors: dict[Path, str]

    def rows(self) -> Iterator[Row]:
        """Yield a table row per suggestion, then one per unreadable file."""
        for suggestion in self.chosen:
            yield {**vars(suggestion), "path": str(suggestion.path)}
        for path, error in self.errors.items():
            yield {"path": str(path), "error": error}


@dataclass(frozen=True)
class Pool:
    """Predictions of N images without labels, reduced to what active learning uses."""

    labels: list[str]
    probabilities: Tensor  # [N]: of the top-1 class
    uncertainty: Tensor  # [N]: from 0 to 1, two classes equally probable
    similarities: Tensor  # [N]: to the most similar class
    embeddings: Tensor  # [N, D]

    @classmethod
    def of(cls, parts: Sequence[Prediction]) -> Pool:
        """Collect parts of a prediction."""
        pairs = [F.pad(part.probabilities, (0, 1)).topk(2, dim=1).values for part in parts]
        top1, top2 = torch.cat(pairs).double().unbind(dim=1)
        similarities = torch.cat([part.similarities.amax(dim=1) for part in parts])
        labels = [label for part in parts for label in part.labels]
        return cls(labels, top1, 1 - (top1 - top2), similarities, torch.cat([p.embeddings for p in parts]))

    def informative_rows(self, rows: Sequence[int], count: int) -> list[int]:
        """Return at most `count` of the rows, those whose labels help most, the most informative first."""
        candidates = torch.as_tensor(rows, dtype=torch.long)
        return candidates[select_informative(self.embeddings[candidates], self.uncertainty[candidates], count)].tolist()

    def ood_rows(self, learner: Learner, fraction: float) -> list[int]:
        """Return out-of-distribution rows, the least similar first; none if the model is not calibrated."""
        if not fraction or not is_calibrated(learner):
            return []
        rejection = Rejection(learner, fraction)
        order = self.similarities.argsort(stable=True).tolist()
        return [i for i in order if rejection.unknown(self.labels[i], float(self.similarities[i]))]


def suggest(
    learner: Learner,
    paths: Sequence[str | Path],
    count: int = COUNT,
    reject: float = REJECT,
    on_stage: OnStage | None = None,
) -> Suggestions:
    """Suggest which image files to label next, which are out-of-distribution, and which are near-duplicates.

    An image may be suggested for two reasons. Of near-duplicates only the first may be chosen for labelling.

    Args:
        learner: The model.
        paths: Image files without labels.
        count: At most this many images for each reason.
        reject: Share of known images that may be called out-of-distribution.
        on_stage: Is given the progress.

    Returns:
        The suggestions.

    Raises:
        SettingsError: The count or share cannot be used.
        DataError: No file can be read.
    """
    check_count(count)
    check_fraction(reject)
    images = _Thumbnailed(paths, learner.backbone.preprocessing)
    parts: list[Prediction] = []
    report = counting(on_stage, "", "predicting", len(images))
    for part in learner.stream(images):
        parts.append(part)
        report(sum(map(len, parts)))
    readable = images.readable_rows()
    pool = Pool.of(parts)
    copies = {readable[i]: readable[of] for i, of in find_near_duplicates(images.thumbnails[readable]).items()}
    originals = [i for i in readable if i not in copies]
    ood = [i for i in pool.ood_rows(learner, reject) if i not in copies and i not in images.errors]
    rows = {"label": pool.informative_rows(originals, count), "unknown": ood, "duplicate": list(copies)}

    def suggestion(i: int, reason: str) -> Suggestion:
        original = str(images.paths[copies[i]]) if i in copies else None
        return Suggestion(images.paths[i], reason, pool.labels[i], float(pool.probabilities[i]), original)

    suggestions = [suggestion(i, reason) for reason, group in rows.items() for i in group[:count]]
    return Suggestions(len(readable), {w: len(r) for w, r in rows.items()}, suggestions, images.errors_by_path())


def select_informative(embeddings: Tensor, uncertainty: Tensor, count: int) -> Tensor:
    """Return the rows [count] of the images whose labels help most, in the order in which they are chosen.

    Once the label of image i is known, the variance of image j falls by K_ij² / (K_ii + noise); the noise is that
    of the default classifier's kernel ridge. Embeddings are [N, D], uncertainty is [N], from 0 to 1.
    """
    rows = uncertainty.argsort(descending=True, stable=True)[:MAX_CANDIDATES].sort().values
    units = F.normalize(embeddings[rows].double(), dim=1)
    weights = uncertainty[rows].double().clamp(min=MIN_UNCERTAINTY)
    covariance = arc_cosine(units, units)  # [n, n]
    picks: list[int] = []
    for _ in range(min(count, len(rows))):
        gain = torch.mv(covariance.square(), weights) / (covariance.diagonal() + RIDGE)
        gain[picks] = -torch.inf
        pick = int(gain.argmax())
        picks.append(pick)
        column = covariance[pick].clone()
        covariance.addr_(column, column, alpha=-1 / (float(column[pick]) + RIDGE))
    return rows[picks]


def check_count(count: int) -> None:
    """Raise a SettingsError if the count is below 1."""
    if count < 1:
        raise SettingsError(f"count = {count}: ask for at least one image", code="bad-count", value=count)


class _Thumbnailed(ForgivingFiles):
    """Files that leave a thumbnail behind when they are read."""

    def __init__(self, paths: Sequence[str | Path], preprocessing: Preprocessing):
        super().__init__(paths, preprocessing)
        self.thumbnails = torch.zeros(len(self), THUMBNAIL**2)

    def pixels(self, rows: Sequence[int]) -> Tensor:
        pixels = super().pixels(rows)
        self.thumbnails[torch.as_tensor(rows)] = thumbnails(pixels)
        return pixels
