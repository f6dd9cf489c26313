"""The contracts of rules and readers: a `Rule` summarises classes and builds a `Reader`, which predicts from a memory.

No code outside this package depends on a model's rule. To add a rule, write one module and enter it in `RULES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from protosteer.evidence.matches import ClassifierMatches
from protosteer.evidence.passes import LooPredictions
from protosteer.model.class_table import ClassTable
from protosteer.model.index import Index
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord
from protosteer.paper.prompts import Embed
from protosteer.prediction import Prediction
from protosteer.settings import Settings


@dataclass(frozen=True)
class Exported:
    """What a program without torch needs to predict by a rule."""

    arrays: dict[str, np.ndarray]
    header: dict[str, Any]  # plain data; a prompt is its number in the index, or None


class Reader(Protocol):
    """Predicts from one memory of C classes and T tasks. Immutable: a changed memory gets a new reader."""

    rule: str
    """The rule's name."""
    index: Index
    """Names and prompts of the memory."""
    temperature: float
    """Scores divided by it are logits."""
    calibrated_probabilities: bool
    """Whether probabilities are calibrated; else they are nearly flat, and similarities are more useful."""
    retrieves_tasks: bool
    """Whether `Matches.candidates` are the tasks retrieved for an image; else they are those whose prompts were tried."""
    layers: str
    """Layers that images are embedded in: the "last" one, or "several"."""
    needs_heldout: bool
    """Whether rejection needs similarities of images that were held out when a class was learned."""

    def match(self, embed: Embed, count: int, exhaustive: bool = True) -> ClassifierMatches:
        """Classify `count` images.

        Args:
            embed: Embeds images by rows [m], each under a prompt of the index, by number [m], or none: [m, D], or
                [m, S * D] of several layers.
            count: B, the number of images; rows are 0 to B - 1.
            exhaustive: Score all classes. Else, if they are very many, score only the candidates of each image.

        Returns:
            Scores [B, C], or [B, n] of candidates, and how they came about.
        """

    def with_image(self, memory: Memory, weight: int = 1) -> Reader:
        """Return a reader of a memory that has one more task than this reader's: one image that counts as `weight` images.

        It is quick and may keep values that were fitted to all images; a new reader fits them again.
        """

    def release(self) -> None:
        """Free the memory that only `with_image` needs."""

    def known_similarities(self) -> Tensor:
        """Return the greatest similarity to a class, [n], of images of known classes that were not learned themselves."""

    def class_thresholds(self) -> dict[str, float]:
        """Return the similarity below which images of a class may be unknown, for classes that have one."""
        return {}

    def class_directions(self) -> Tensor:
        """Return one unit vector per class, [C, D], in the space of `Matches.embeddings`."""

    def explain(self, prediction: Prediction) -> list[dict[str, Any]]:
        """Return for each image what led to its label, as plain data for JSON."""

    def diagnose(self, embed: Embed, truth: Tensor, task: int, classes: Tensor) -> dict[str, float]:
        """Analyse the errors on test images of one task.

        Args:
            embed: As for `match`.
            truth: int64 [B], the true classes.
            task: The number of the images' task.
            classes: int64 [k], all classes of that task.

        Returns:
            Percentages of the images; "accuracy" and the kinds of errors after it add up to 100.
        """

    def loo_predictions(self) -> LooPredictions | None:
        """Return leave-one-out predictions of stored images; None if the rule has none."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return a report of the rule: "rule", its name, and "evidence", with its feature spaces or None."""

    def advice(self) -> list[str]:
        """Return sentences on what the user could do for better predictions."""
        return []

    def export(self) -> Exported:
        """Return what a program without torch needs to predict by this rule."""


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of n images without and under prompts, in S feature spaces: layers, the last one first."""

    plain: Tensor  # [n, S, D]: without a prompt
    values: Tensor  # [n, D]: under their task's prompt, if it has one; the last layer only
    shared: Tensor | None = None  # [n, S, D]: under the shared prompt

    def of_class(self, rows: Tensor) -> Embeddings:
        """Select the images of a mask [n]."""
        shared = None if self.shared is None else self.shared[rows]
        return Embeddings(self.plain[rows], self.values[rows], shared)


class Rule(Protocol):
    """How classes are stored and predicted; a value of the setting `rule`."""

    uses_shared_prompt: bool
    """Whether classes are also stored under the shared prompt."""
    trains_known_classes: bool
    """Whether further images of known classes get a prompt."""
    copies_nearest_prompt: bool
    """Whether a few-shot class gets a copy of the prompt of the task with the nearest keys."""

    def layers(self, settings: Settings) -> str:
        """Return the layers that new images are embedded in: the "last" one, or "several"."""
        return "last"

    def summarise(
        self, name: str, embeddings: Embeddings, settings: Settings, seed: int, prompted: bool
    ) -> ClassRecord:
        """Summarise a class as the record that is stored.

        Args:
            name: The class's name.
            embeddings: Those of its images.
            settings: How to cluster them.
            seed: The same seed gives the same record.
            prompted: Whether its task has a prompt.
        """

    def summarise_few_shot(self, name: str, embeddings: Embeddings, settings: Settings, seed: int) -> ClassRecord:
        """Summarise a class of a few images, none of which is held out."""
        return self.summarise(name, embeddings, settings, seed, prompted=False)

    def has_stored(self, classes: ClassTable) -> bool:
        """Tell whether all these classes were stored by this rule."""

    def reader(self, memory: Memory, settings: Settings) -> Reader:
        """Build the reader of a memory."""


def percent(mask: Tensor) -> float:
    """Return the share of a mask [B] that is true, in percent."""
    return 100.0 * int(mask.sum()) / len(mask)
