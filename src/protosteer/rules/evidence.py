"""The default rule: the evidence classifier as a `Reader`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protosteer.evidence import classifier
from protosteer.evidence.classifier import EvidenceClassifier, LooPredictions
from protosteer.evidence.matches import ClassifierMatches
from protosteer.evidence.prototype_summary import round_to_half, summarise_class
from protosteer.evidence.scorer import RIDGE_FLOOR, RIDGE_SHARE
from protosteer.model.class_table import ClassTable
from protosteer.model.index import Index
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord
from protosteer.paper.prompts import Embed
from protosteer.paper.prototypes import Centroids
from protosteer.paper.task import class_prototypes
from protosteer.prediction import Prediction
from protosteer.rules.base import Embeddings, Exported, Reader, percent
from protosteer.rules.paper import PaperReader
from protosteer.search.candidates import CandidateOptions
from protosteer.settings import Settings


class EvidenceReader:
    """Classifies by class summaries, with calibrated probabilities."""

    rule = "evidence"
    temperature = 1.0
    calibrated_probabilities = True
    retrieves_tasks = False
    needs_heldout = False

    def __init__(
        self,
        memory: Memory,
        options: CandidateOptions | None = None,
        min_space_weight: float = classifier.MIN_SPACE_WEIGHT,
    ):
        self.index = Index.build(memory)
        self.classifier = EvidenceClassifier(memory, self.index, options, min_space_weight)
        self._shared_prompt = memory.shared_prompt

    def match(self, embed: Embed, count: int, exhaustive: bool = True) -> ClassifierMatches:
        """See `Reader.match`. Scores are logits."""
        return self.classifier.match(embed, count, exhaustive)

    def known_similarities(self) -> Tensor:
        """See `Reader.known_similarities`: by leave-one-out."""
        return self.classifier.spaces[0].loo_max_similarity

    def class_thresholds(self) -> dict[str, float]:
        """See `Reader.class_thresholds`: few-shot classes are classes like any other."""
        return {}

    def class_directions(self) -> Tensor:
        """See `Reader.class_directions`: class means in the first feature space."""
        return self.classifier.spaces[0].scorer.directions[self.classifier.sorted_position]

    def explain(self, prediction: Prediction) -> list[dict[str, Any]]:
        """See `Reader.explain`: the tasks whose prompts were tried, and the runner-up."""
        return [
            {
                "candidates": candidates,
                "runner_up": others[0][0] if others else None,
                "runner_up_probability": others[0][1] if others else None,
                "runner_up_similarity": others[0][2] if others else None,
            }
            for candidates, (_, *others) in zip(prediction.candidates, prediction.ranked(2), strict=True)
        ]

    def diagnose(self, embed: Embed, truth: Tensor, task: int, own: Tensor) -> dict[str, float]:
        """See `Reader.diagnose`: errors before and after prompts of tasks were tried.

        Where a prompt of a task that brought the image's class was tried, the error is "fine_wrong". Where there
        is such a prompt and the image was uncertain, it is "task_not_tried"; else "coarse_wrong".
        """
        index = self.index
        coarse = self.classifier.match(embed, len(truth), task_prompts=False)
        matches = self.match(embed, len(truth))
        wrong = matches.scores.argmax(dim=1) != truth
        confident = coarse.scores.softmax(dim=1).amax(dim=1) >= classifier.CONFIDENT
        own_tasks = index.class_task_mask[truth]  # [B, T]
        tried = (matches.candidates & own_tasks).any(dim=1)
        to_try = tried | ((own_tasks & index.prompted).any(dim=1) & ~confident)
        others = torch.ones(len(index.classes), dtype=torch.bool).index_fill_(0, own, False)
        inside = matches.scores.masked_fill(others, -torch.inf).argmax(dim=1)
        return {
            "accuracy": percent(~wrong),
            "task_not_tried": percent(wrong & to_try & ~tried),
            "coarse_wrong": percent(wrong & ~to_try),  # confident, or of a task without a prompt
            "fine_wrong": percent(wrong & tried),
            "coarse_accuracy": percent(coarse.scores.argmax(dim=1) == truth),  # had no prompt been tried
            "true_task_accuracy": percent(inside == truth),  # among the task's own classes, same scores
            "confidence": 100.0 * float(matches.scores.softmax(dim=1).amax(dim=1).double().mean()),
            "passes": float(matches.passes.double().mean()),  # per image
        }

    def loo_predictions(self) -> LooPredictions:
        """See `Reader.loo_predictions`."""
        return self.classifier.loo_predictions

    def describe(self) -> dict[str, Any]:
        """See `Reader.describe`: the shared prompt, and the feature spaces with their weights."""
        spaces, prompt = self.classifier.spaces, self._shared_prompt
        shared = None
        if prompt is not None:
            shared = {"layers": prompt.shape[0], "length": prompt.shape[1], "bytes": prompt.nbytes}
        about = {
            "domain_prompt": shared,
            "views": [{"prompt": space.prompt is not None, "weight": space.weight} for space in spaces],
            "left_out": len(self.known_similarities()),
        }
        return {"rule": self.rule, "evidence": about}

    def advice(self) -> list[str]:
        """See `Reader.advice`."""
        return []

    def export(self) -> Exported:
        """See `Reader.export`: in double precision, as scores are computed."""
        spaces, order = self.classifier.spaces, self.classifier.sorted_position
        arrays: dict[str, np.ndarray] = {}
        for number, scorer in enumerate(space.scorer for space in spaces):
            parts = {
                "centre": scorer.whitened.centre,
                "precision": scorer.whitened.precision,
                "whitened": scorer.whitened.directions[order],
                "lengths": scorer.whitened.squared_lengths[order],
                "means": scorer.directions[order],
            }
            if scorer.ridge:
                parts |= {"points": scorer.ridge.points, "weights": scorer.ridge.weights[:, order]}
            arrays |= {f"view{number}_{name}": tensor.numpy() for name, tensor in parts.items()}
        header = {
            "views": [{"prompt": s.prompt, "weight": s.weight, "alone": s.solo_weight} for s in spaces],
            "sure": classifier.CONFIDENT,
            "open": classifier.MIN_TASK_PROB,
            "most": self.classifier.max_task_prompts,
            "fine": classifier.TASK_PROMPT_WEIGHT,
            "ridge_share": RIDGE_SHARE,
            "ridge_floor": RIDGE_FLOOR,
            "temperature": self.temperature,
        }
        return Exported(arrays, header)


@dataclass(frozen=True)
class EvidenceRule:
    """Stores class summaries; predicts by the evidence classifier.

    A memory with a class that has no summary is read by CPP inference.
    """

    candidates: CandidateOptions = field(default_factory=CandidateOptions)
    min_space_weight: float = classifier.MIN_SPACE_WEIGHT
    uses_shared_prompt = True
    trains_known_classes = False
    copies_nearest_prompt = False

    def summarise(
        self, name: str, embeddings: Embeddings, settings: Settings, seed: int, prompted: bool
    ) -> ClassRecord:
        """See `Rule.summarise`: a summary per feature space; without a prompt, one value prototype."""
        values = class_prototypes(embeddings.values, settings.centroids if prompted else 1, settings, seed)
        plain = summarise_class(embeddings.plain, seed)
        shared = None if embeddings.shared is None else summarise_class(embeddings.shared, seed)
        values = Centroids(round_to_half(values.means), round_to_half(values.deviations), values.counts)
        return ClassRecord(name, plain.points, values, plain=plain, shared=shared)

    def summarise_few_shot(self, name: str, embeddings: Embeddings, settings: Settings, seed: int) -> ClassRecord:
        """See `Rule.summarise_few_shot`."""
        return self.summarise(name, embeddings, settings, seed, prompted=False)

    def stored(self, classes: ClassTable) -> bool:
        """See `Rule.stored`."""
        return classes.summarised

    def reader(self, memory: Memory, settings: Settings) -> Reader:
        """See `Rule.reader`."""
        if not memory.evidence:
            return PaperReader(memory, settings)
        return EvidenceReader(memory, self.candidates, self.min_space_weight)
