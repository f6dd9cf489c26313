"""The default rule: the evidence classifier as a `Reader`."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protosteer.evidence import classifier
from protosteer.evidence.classifier import EvidenceClassifier
from protosteer.evidence.matches import ClassifierMatches
from protosteer.evidence.passes import CONFIDENT, LooPredictions
from protosteer.evidence.prototype_summary import MAX_PAIRED_PROTOTYPES, round_to_half, summarise_class
from protosteer.model.class_table import ClassTable
from protosteer.model.index import Index
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord
from protosteer.paper.prompts import Embed
from protosteer.paper.prototypes import Centroids
from protosteer.paper.task import class_prototypes
from protosteer.prediction import Prediction
from protosteer.rules.base import Embeddings, Exported, Reader, Rule, percent
from protosteer.rules.paper import PaperReader
from protosteer.search.candidates import CandidateOptions
from protosteer.settings import Settings


class EvidenceReader(Reader):
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
        min_pass_weight: float = classifier.MIN_PASS_WEIGHT,
    ):
        self._options = options, min_pass_weight
        self.classifier = EvidenceClassifier(memory, Index.build(memory), *self._options)
        self.index, self.layers = self.classifier.index, self.classifier.layers
        self._shared_prompt = memory.shared_prompt
        self._indexed: tuple[Memory, Index] | None = None

    def match(self, embed: Embed, count: int, exhaustive: bool = True) -> ClassifierMatches:
        """See `Reader.match`. Scores are logits."""
        return self.classifier.match(embed, count, exhaustive)

    def with_image(self, memory: Memory, weight: int = 1) -> EvidenceReader:
        """See `Reader.with_image`: by closed forms; shares and weights stay as they were fitted."""
        if self.classifier.is_released:
            *tasks, image_task = memory.tasks
            weighted = dataclasses.replace(image_task, classes=image_task.classes.with_image_weight(weight))
            return EvidenceReader(Memory([*tasks, weighted]), *self._options)
        if self._indexed is None or self._indexed[0] is not memory:  # callers try several weights with the same memory
            self._indexed = memory, Index.build(memory)
        updated = copy.copy(self)
        updated._indexed = None
        updated.classifier = self.classifier.with_image(*self._indexed, weight)
        updated.index = updated.classifier.index
        return updated

    def release(self) -> None:
        """See `Reader.release`."""
        self.classifier.release()

    def known_similarities(self) -> Tensor:
        """See `Reader.known_similarities`: by leave-one-out."""
        return self.classifier.passes[0].loo_max_similarity

    def class_directions(self) -> Tensor:
        """See `Reader.class_directions`: class means in the first feature space."""
        return self.classifier.passes[0].scorer.directions[self.classifier.sorted_position]

    def explain(self, prediction: Prediction) -> list[dict[str, Any]]:
        """See `Reader.explain`: the tasks whose prompts were tried, and the runner-up."""
        return [
            {
                "candidates": candidates,
                "runner_up": losers[0][0] if losers else None,
                "runner_up_probability": losers[0][1] if losers else None,
                "runner_up_similarity": losers[0][2] if losers else None,
            }
            for candidates, (_, *losers) in zip(prediction.candidates, prediction.ranked(2), strict=True)
        ]

    def diagnose(self, embed: Embed, truth: Tensor, task: int, classes: Tensor) -> dict[str, float]:
        """See `Reader.diagnose`: errors before and after prompts of tasks were tried.

        If a prompt of a task with the image's class was tried, the error is "fine_wrong". If there is such a prompt and
        the image was uncertain, it is "task_not_tried"; else "coarse_wrong".
        """
        index = self.index
        shared_matches = self.classifier.match(embed, len(truth), task_prompts=False)
        matches = self.match(embed, len(truth))
        is_error = matches.scores.argmax(dim=1) != truth
        is_confident = shared_matches.scores.softmax(dim=1).amax(dim=1) >= CONFIDENT
        class_tasks = index.class_task_mask[truth]  # [B, T]
        is_tried = (matches.candidates & class_tasks).any(dim=1)
        is_to_try = is_tried | ((class_tasks & index.prompted).any(dim=1) & ~is_confident)
        is_elsewhere = torch.ones(len(index.classes), dtype=torch.bool).index_fill_(0, classes, False)
        labels_in_task = matches.scores.masked_fill(is_elsewhere, -torch.inf).argmax(dim=1)
        return {
            "accuracy": percent(~is_error),
            "task_not_tried": percent(is_error & is_to_try & ~is_tried),
            "coarse_wrong": percent(is_error & ~is_to_try),  # confident, or of a task without a prompt
            "fine_wrong": percent(is_error & is_tried),
            "coarse_accuracy": percent(shared_matches.scores.argmax(dim=1) == truth),  # without prompts of tasks
            "true_task_accuracy": percent(labels_in_task == truth),  # among the task's classes, same scores
            "confidence": 100.0 * float(matches.scores.softmax(dim=1).amax(dim=1).double().mean()),
            "passes": float(matches.passes.double().mean()),  # per image
        }

    def loo_predictions(self) -> LooPredictions:
        """See `Reader.loo_predictions`."""
        return self.classifier.loo_predictions

    def describe(self) -> dict[str, Any]:
        """See `Reader.describe`: the shared prompt, the passes with their weights, the shares of the layers."""
        passes, prompt = self.classifier.passes, self._shared_prompt
        shared = None
        if prompt is not None:
            shared = {"layers": prompt.shape[0], "length": prompt.shape[1], "bytes": prompt.nbytes}
        summary = {
            "domain_prompt": shared,
            "views": [{"prompt": p.prompt is not None, "weight": p.weight} for p in passes],
            "shares": passes[0].scorer.shares.tolist(),  # of the layers, the last one first, and of the ridge
            "left_out": len(self.known_similarities()),
        }
        return {"rule": self.rule, "evidence": summary}

    def export(self) -> Exported:
        """See `Reader.export`: in double precision, as scores are computed."""
        passes, order = self.classifier.passes, self.classifier.sorted_position
        arrays: dict[str, np.ndarray] = {}
        for number, scorer in enumerate(p.scorer for p in passes):
            parts = {
                "centre": torch.stack([space.centre for space in scorer.whitened]),
                "precision": torch.stack([space.precision for space in scorer.whitened]),
                "whitened": torch.stack([space.directions[order] for space in scorer.whitened]),
                "lengths": torch.stack([space.squared_lengths[order] for space in scorer.whitened]),
                "means": scorer.directions[order],
                "shares": scorer.shares,
            }
            if scorer.ridge:
                parts |= {"points": scorer.ridge.points, "weights": scorer.ridge.weights[:, order]}
                parts |= {"ridge_centre": scorer.ridge.centre.unflatten(0, (len(scorer.spaces), -1))}
            arrays |= {f"view{number}_{name}": tensor.numpy() for name, tensor in parts.items()}
        header = {
            "views": [{"prompt": p.prompt, "weight": p.weight, "alone": p.solo_weight} for p in passes],
            "sure": CONFIDENT,
            "open": classifier.MIN_TASK_PROB,
            "most": self.classifier.max_task_prompts,
            "fine": classifier.TASK_PROMPT_WEIGHT,
            "ridge_floor": passes[0].scorer.ridge_floor,
            "temperature": self.temperature,
        }
        return Exported(arrays, header)


@dataclass(frozen=True)
class EvidenceRule(Rule):
    """Stores class summaries; predicts by the evidence classifier.

    A memory with a class without a summary is predicted by CPP inference.
    """

    candidates: CandidateOptions = field(default_factory=CandidateOptions)
    min_pass_weight: float = classifier.MIN_PASS_WEIGHT
    uses_shared_prompt = True
    trains_known_classes = False
    copies_nearest_prompt = False

    def summarise(
        self, name: str, embeddings: Embeddings, settings: Settings, seed: int, prompted: bool
    ) -> ClassRecord:
        """See `Rule.summarise`: a summary without a prompt, and one under the shared prompt.

        If there are both, earlier layers are stored only under the shared prompt. Without a task-specific prompt, a class
        has one value prototype.
        """
        values = class_prototypes(embeddings.values, settings.centroids if prompted else 1, settings, seed)
        if embeddings.shared is None:
            plain, shared = summarise_class(embeddings.plain, seed), None
        else:
            pair = embeddings.plain[:, :1], embeddings.shared
            plain, shared = (summarise_class(vectors, seed, MAX_PAIRED_PROTOTYPES) for vectors in pair)
        values = Centroids(round_to_half(values.means), round_to_half(values.deviations), values.counts)
        return ClassRecord(name, plain.points, values, plain=plain, shared=shared)

    def layers(self, settings: Settings) -> str:
        """See `Rule.layers`."""
        return settings.feature_layers

    def has_stored(self, classes: ClassTable) -> bool:
        """See `Rule.has_stored`."""
        return classes.summarised

    def reader(self, memory: Memory, settings: Settings) -> Reader:
        """See `Rule.reader`."""
        if not memory.evidence:
            return PaperReader(memory, settings)
        return EvidenceReader(memory, self.candidates, self.min_pass_weight)
