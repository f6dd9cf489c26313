"""CPP inference, the paper's rule, as a `Reader`."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.evidence.matches import ClassifierMatches
from protosteer.model.class_table import ClassTable
from protosteer.model.index import Index
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord
from protosteer.paper import inference
from protosteer.paper.prompts import Embed
from protosteer.paper.task import class_prototypes
from protosteer.prediction import Prediction
from protosteer.rules.base import Embeddings, Exported, Reader, Rule, percent
from protosteer.settings import Settings

# Images per prototype of a few-shot class: a prototype of fewer is no better than the class mean.
_IMAGES_PER_PROTOTYPE = 5


class PaperReader(Reader):
    """Retrieves tasks by key prototypes and classifies by value prototypes."""

    rule = "paper"
    calibrated_probabilities = False
    retrieves_tasks = True
    needs_heldout = True
    layers = "last"
    max_cosines = 2**27  # in memory at once, between images and value prototypes

    def __init__(self, memory: Memory, settings: Settings):
        self.memory = Memory(memory.tasks)  # a copy of the list, which does not change
        self.index = Index.build(self.memory)
        self.temperature, self.neighbours = settings.temperature, settings.neighbours
        self._settings = settings

    def match(self, embed: Embed, count: int, exhaustive: bool = True) -> ClassifierMatches:
        """See `Reader.match`. All classes are always scored; with very many prototypes, images are matched in parts."""
        prototypes, parts = self.index.prototypes, []
        size = max(1, self.max_cosines // len(prototypes.values))
        for rows in torch.arange(count).split(size):

            def embed_part(part: Tensor, prompts: Tensor | None, rows: Tensor = rows) -> Tensor:
                return embed(rows[part], prompts)

            parts.append(inference.match(prototypes, embed_part, len(rows), self.neighbours))
        matches = parts[0] if len(parts) == 1 else inference.Matches.join(parts)
        return ClassifierMatches(**vars(matches), similarities=matches.scores)

    def with_image(self, memory: Memory, weight: int = 1) -> PaperReader:
        """See `Reader.with_image`: a new reader is built quickly, and the weight of an image changes nothing."""
        return PaperReader(memory, self._settings)

    def release(self) -> None:
        """See `Reader.release`: there is nothing to free."""

    def known_similarities(self) -> Tensor:
        """See `Reader.known_similarities`: of held-out images, without those of few-shot classes."""
        table = self.memory.table
        return table.heldout_similarities[(~self._few_shot).repeat_interleave(table.lengths("held_out"))]

    def class_thresholds(self) -> dict[str, float]:
        """See `Reader.class_thresholds`: the least similarity of few-shot classes."""
        thresholds: dict[str, float] = {}
        table = self.memory.table.take(self._few_shot.nonzero()[:, 0])
        parts = table.heldout_similarities.split(table.lengths("held_out").tolist())
        for name, similarities in zip(table.names, parts, strict=True):  # a class may have several records
            thresholds[name] = min(thresholds.get(name, math.inf), float(similarities.min()))
        return thresholds

    @cached_property
    def _few_shot(self) -> Tensor:
        """Bool [R]: which records had no images to hold out; none if no other record has held-out similarities."""
        has_similarities = self.memory.table.lengths("held_out") > 0
        without_heldout = [not task.metadata.held_out for task in self.memory.tasks]
        mask = has_similarities & torch.tensor(without_heldout, dtype=torch.bool)[self.index.record_tasks]
        return mask if int(mask.sum()) < int(has_similarities.sum()) else torch.zeros_like(mask)

    def class_directions(self) -> Tensor:
        """See `Reader.class_directions`: mean value prototypes, weighted by their images."""
        index, prototypes = self.index, self.memory.table.values
        values, counts = F.normalize(prototypes.means.double(), dim=1), prototypes.counts.double()
        sums = values.new_zeros(len(index.classes), values.shape[1])
        return F.normalize(sums.index_add_(0, index.value_classes, values * counts[:, None]), dim=1)

    def explain(self, prediction: Prediction) -> list[dict[str, Any]]:
        """See `Reader.explain`: the tasks retrieved, the prototype that won, and the runner-up."""
        return [self._explain(prediction, i, row) for i, row in enumerate(prediction.ranked(2))]

    def _explain(self, prediction: Prediction, i: int, ranking: list[tuple[str, float, float]]) -> dict[str, Any]:
        index, (winner, *losers) = self.index, ranking
        rows = (index.value_classes == prediction.classes.index(winner[0])).nonzero()[:, 0]
        similarity = F.normalize(prediction.embeddings[i], dim=0) @ index.values[rows].T
        runner_up = losers[0] if losers else None
        score = prediction.scores[i, prediction.column(i, winner[0])]
        return {
            "candidates": prediction.candidates[i],
            "centroid": int(similarity.argmax()) + 1,
            "centroids": len(rows),
            "centroid_similarity": float(similarity.max()),
            "runner_up": runner_up and runner_up[0],
            "runner_up_similarity": runner_up and runner_up[2],
            "margin": runner_up and float(score - prediction.scores[i, prediction.column(i, runner_up[0])]),
        }

    def diagnose(self, embed: Embed, truth: Tensor, task: int, classes: Tensor) -> dict[str, float]:
        """See `Reader.diagnose`: errors of retrieval, of a wrong prompt, and under the right prompt.

        The tasks of an image are all tasks with images of its class; if each class came once, that is only `task`.
        """
        index, record = self.index, self.memory.tasks[task]
        matches = self.match(embed, len(truth))
        is_error = matches.scores.argmax(dim=1) != truth
        class_tasks = index.class_task_mask[truth]  # [B, T]
        is_retrieved = (matches.candidates & class_tasks).any(dim=1)
        # Without prompts there is one embedding, and no match can be under another prompt.
        right_prompt = class_tasks.gather(1, matches.winners[:, None])[:, 0]
        right_prompt |= ~(class_tasks & index.prompted).any(dim=1)
        rows = torch.arange(len(truth))
        class_records = {record.name: record for record in record.classes}
        records = [class_records[index.classes[c]] for c in classes.tolist()]
        position = (classes == truth[:, None]).int().argmax(dim=1)
        embeddings = embed(rows, None)
        prompted = embeddings if record.prompt is None else embed(rows, torch.full_like(rows, task))
        correct_with_prompt = _nearest(prompted, [r.values.means for r in records]) == position
        correct_without = _nearest(embeddings, [r.keys for r in records]) == position
        spreads = record.metadata.key_spread, record.metadata.value_spread
        return {
            "accuracy": percent(~is_error),
            "not_retrieved": percent(is_error & ~is_retrieved),
            "wrong_prompt_won": percent(is_error & is_retrieved & ~right_prompt),
            "wrong_class": percent(is_error & is_retrieved & right_prompt),
            # Among the task's classes: did the prompt help?
            "true_task_with_prompt": percent(correct_with_prompt),
            "true_task_without_prompt": percent(correct_without),
            # Mean cosine of the task's training embeddings to their common mean.
            "key_spread": math.nan if spreads[0] is None else spreads[0],
            "value_spread": math.nan if spreads[1] is None else spreads[1],
        }

    def describe(self) -> dict[str, Any]:
        """See `Reader.describe`."""
        return {"rule": self.rule, "evidence": None}

    def advice(self) -> list[str]:
        """See `Reader.advice`."""
        advice = "learn its folders again into a new model for calibrated probabilities and higher accuracy"
        return [f"this model uses CPP inference; {advice}"] if self.index.classes else []

    def export(self) -> Exported:
        """See `Reader.export`."""
        prototypes = self.index.prototypes
        arrays = {"keys": prototypes.keys.numpy(), "key_tasks": prototypes.key_tasks.numpy()}
        return Exported(arrays, {"neighbours": self.neighbours, "temperature": self.temperature})


class PaperRule(Rule):
    """Stores key and value prototypes per class; predicts by CPP inference."""

    uses_shared_prompt = False
    trains_known_classes = True
    copies_nearest_prompt = True

    def summarise(
        self, name: str, embeddings: Embeddings, settings: Settings, seed: int, prompted: bool
    ) -> ClassRecord:
        """See `Rule.summarise`: as many key and value prototypes as the settings say."""
        return _prototypes(name, embeddings, settings.centroids, settings, seed)

    def summarise_few_shot(self, name: str, embeddings: Embeddings, settings: Settings, seed: int) -> ClassRecord:
        """See `Rule.summarise_few_shot`. Leave-one-out similarities to the mean replace held-out ones."""
        values = embeddings.values
        count = min(settings.centroids, max(1, len(values) // _IMAGES_PER_PROTOTYPE))
        record = _prototypes(name, embeddings, count, settings, seed)
        if len(values) < 2:
            return record
        similarities = F.cosine_similarity(values, values.sum(dim=0) - values, dim=1)
        return dataclasses.replace(record, heldout_similarities=similarities)

    def has_stored(self, classes: ClassTable) -> bool:
        """See `Rule.has_stored`."""
        return not bool((classes.lengths("plain") > 0).any())

    def reader(self, memory: Memory, settings: Settings) -> PaperReader:
        """See `Rule.reader`."""
        return PaperReader(memory, settings)


def _prototypes(name: str, embeddings: Embeddings, count: int, settings: Settings, seed: int) -> ClassRecord:
    groups = (embeddings.plain[:, 0], embeddings.values)
    keys, values = (class_prototypes(group, count, settings, seed) for group in groups)
    return ClassRecord(name, keys.means, values)


def _nearest(embeddings: Tensor, groups: list[Tensor]) -> Tensor:
    """Return the group [B] with the prototype most similar to each embedding [B, D]."""
    owners = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(g) for g in groups]))
    similarity = F.normalize(embeddings, dim=1) @ F.normalize(torch.cat(groups), dim=1).T
    return owners[similarity.argmax(dim=1)]
