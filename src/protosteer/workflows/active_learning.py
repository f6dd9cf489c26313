"""What to label next: of many images without labels, those that would teach a model most.

- An image is in doubt as far as its two likeliest classes are near each other. Whoever knows the class of one image
  knows something about images like it: how much, the kernel of the evidence says (`evidence.arc_cosine`), read as
  a covariance. So images are chosen one after the other, each time the one whose label leaves least variance over
  all images, weighed by their doubt (transductive experimental design, Yu, Bi and Tresp 2006, with weights). What
  is alone in its oddity teaches little, and so does the second of a kind.
- Images unlike everything known (`rejection`) are told: they may be of new classes, or of nothing. They are not kept
  from being chosen: on photographs that cost accuracy.
- The same picture saved again is told by its pixels, not by its embedding: to some networks a copy with the marks
  of JPEG on it is further away than other pictures are.
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
from protosteer.errors import DataError, SettingsError
from protosteer.evidence.kernel_ridge import RIDGE, arc_cosine
from protosteer.learner import Learner
from protosteer.prediction import Prediction
from protosteer.runtime.progress import OnStage, Stage
from protosteer.workflows.ood import Rejection, calibrated, check_fraction
from protosteer.workflows.prediction_table import Row

COUNT = 50
REJECT = 0.05  # the share of known images that may be called unlike everything
WEIGHED = (
    4096  # images that are weighed against one another, those most in doubt; the work grows as their square
)
SURE = 1e-6  # the least doubt, so that among images that are all sure the most typical ones are chosen
# Copies of a picture, made smaller or larger or saved as JPEG, differ by less than this, other pictures by more:
# docs/suggest.md has the figures.
THUMBNAIL = 16  # pixels a side
SAME = 5.0  # grey levels of 255, root mean square
SAME_SHARE = 0.2  # of a picture's own contrast: two that are nearly blank are not the same one
_BLOCK = 512  # thumbnails that are compared with all others at once
_ROUNDING = 1e-6  # of squared distances, so that a blank picture is a copy of itself


@dataclass(frozen=True)
class Suggestion:
    """An image to look at, and why."""

    path: Path
    why: str  # "label", "unknown", "duplicate" or "mislabelled"
    guess: str  # the likeliest class, ...
    probability: float  # ... and how likely it is
    other: str | None = None  # the picture that it is a copy of, or the class that it was filed under


@dataclass(frozen=True)
class Suggestions:
    """What was found among `images` that could be read; a table for `photos.tables`."""

    kind: ClassVar[str] = "suggestions"
    width: ClassVar[int] = 0
    images: int
    found: dict[str, int]  # how many there are for each reason, ...
    chosen: list[Suggestion]  # ... and at most as many of them as were asked for
    errors: dict[Path, str]  # of files that could not be read

    def rows(self) -> Iterator[Row]:
        """Yield a table row per suggestion, then one per unreadable file."""
        for one in self.chosen:
            yield {**vars(one), "path": str(one.path)}
        for path, error in self.errors.items():
            yield {"path": str(path), "error": error}


@dataclass(frozen=True)
class Seen:
    """What a model says of N images, as much as is needed here."""

    labels: list[str]
    probabilities: Tensor  # [N]: of the likeliest class
    doubt: Tensor  # [N]: from 0 to 1, two classes equally likely
    similarities: Tensor  # [N]: to the class most like it
    embeddings: Tensor  # [N, D]

    @classmethod
    def of(cls, parts: Sequence[Prediction]) -> Seen:
        """Collect parts of a prediction."""
        best = [F.pad(part.probabilities, (0, 1)).topk(2, dim=1).values for part in parts]
        first, second = torch.cat(best).double().unbind(dim=1)
        similarities = torch.cat([part.similarities.amax(dim=1) for part in parts])
        labels = [label for part in parts for label in part.labels]
        return cls(
            labels, first, 1 - (first - second), similarities, torch.cat([p.embeddings for p in parts])
        )

    def worth(self, rows: Sequence[int], count: int) -> list[int]:
        """Those of these rows whose labels would teach most, the most telling first."""
        chosen = torch.as_tensor(rows, dtype=torch.long)
        return chosen[most_telling(self.embeddings[chosen], self.doubt[chosen], count)].tolist()

    def strange(self, learner: Learner, fraction: float) -> list[int]:
        """Rows that are unlike everything known, the strangest first; none where the model cannot tell."""
        if not fraction or not calibrated(learner):
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
    """Of image files without labels: which to label next, which are unlike everything, which are copies.

    An image may be suggested for two reasons. Of copies the first may be chosen, the others are not.
    """
    check_count(count)
    check_fraction(reject)
    images = _Thumbnailed(paths, learner.backbone.preprocessing)
    parts: list[Prediction] = []
    done = 0
    for part in learner.stream(images):
        parts.append(part)
        done += len(part)
        if on_stage:
            on_stage(Stage("", "predicting", done, len(images)))
    read = readable_rows(images)
    seen = Seen.of(parts)
    copies = {read[i]: read[of] for i, of in repeats(images.thumbnails[read]).items()}
    left = [i for i in read if i not in copies]
    strange = [i for i in seen.strange(learner, reject) if i not in copies and i not in images.errors]
    rows = {"label": seen.worth(left, count), "unknown": strange, "duplicate": list(copies)}

    def told(i: int, why: str) -> Suggestion:
        other = str(images.paths[copies[i]]) if i in copies else None
        return Suggestion(images.paths[i], why, seen.labels[i], float(seen.probabilities[i]), other)

    chosen = [told(i, why) for why, some in rows.items() for i in some[:count]]
    return Suggestions(len(read), {w: len(r) for w, r in rows.items()}, chosen, errors_of(images))


def most_telling(embeddings: Tensor, doubt: Tensor, count: int) -> Tensor:
    """Rows of the `count` images, of embeddings [N, D] and doubt [N], that tell most about all, in their order.

    The variance of image j, once the label of image i is known, is less by K_ij² / (K_ii + noise); the noise is
    that of the evidence's ridge.
    """
    rows = doubt.argsort(descending=True, stable=True)[:WEIGHED].sort().values
    units = F.normalize(embeddings[rows].double(), dim=1)
    weights = doubt[rows].double().clamp(min=SURE)
    covariance = arc_cosine(units, units)  # [n, n]
    chosen: list[int] = []
    for _ in range(min(count, len(rows))):
        gain = torch.mv(covariance.square(), weights) / (covariance.diagonal() + RIDGE)
        gain[chosen] = -torch.inf
        best = int(gain.argmax())
        chosen.append(best)
        own = covariance[best].clone()
        covariance.addr_(own, own, alpha=-1 / (float(own[best]) + RIDGE))
    return rows[chosen]


def repeats(thumbnails: Tensor) -> dict[int, int]:
    """Rows of pictures [N, pixels] that are copies of an earlier one which is none, and that one."""
    points = thumbnails.double()
    squares = points.square().sum(dim=1)
    contrast = points.std(dim=1, correction=0)
    limits = (SAME_SHARE * contrast).clamp(max=SAME).square() * points.shape[1] + _ROUNDING
    found: dict[int, int] = {}
    for start in range(0, len(points), _BLOCK):
        some, before = slice(start, start + _BLOCK), slice(start + _BLOCK)
        apart = squares[some, None] + squares[before] - 2 * points[some] @ points[before].T
        near = apart <= torch.minimum(limits[some, None], limits[before])
        for row, other in near.tril(diagonal=start - 1).nonzero().tolist():
            if other not in found:
                found.setdefault(start + row, other)
    return found


def check_count(count: int) -> None:
    """Raise a SettingsError if no image is asked for."""
    if count < 1:
        raise SettingsError(f"count = {count}: ask for at least one image", code="bad-count", value=count)


def readable_rows(images: ForgivingFiles) -> list[int]:
    """Return the rows of files that could be read; a DataError if there are none."""
    rows = [i for i in range(len(images)) if i not in images.errors]
    if not rows:
        raise DataError(
            f"none of {len(images)} files could be read; the first: {images.errors[0]}", code="no-images"
        )
    return rows


def errors_of(images: ForgivingFiles) -> dict[Path, str]:
    """Return what is wrong with each unreadable file."""
    return {images.paths[i]: error for i, error in sorted(images.errors.items())}


class _Thumbnailed(ForgivingFiles):
    """Files that leave a small grey picture behind when they are read."""

    def __init__(self, paths: Sequence[str | Path], preprocessing: Preprocessing):
        super().__init__(paths, preprocessing)
        self.thumbnails = torch.zeros(len(self), THUMBNAIL**2)

    def pixels(self, rows: Sequence[int]) -> Tensor:
        found = super().pixels(rows)
        self.thumbnails[torch.as_tensor(rows)] = thumbnails(found)
        return found


def thumbnails(pixels: Tensor) -> Tensor:
    """[N, THUMBNAIL²]: grey levels of uint8 [N, 3, h, w]."""
    small = F.interpolate(pixels.float().mean(dim=1, keepdim=True), (THUMBNAIL, THUMBNAIL), mode="area")
    return small.flatten(1)
