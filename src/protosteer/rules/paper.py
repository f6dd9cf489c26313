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

# A few-shot class gets one prototype per so many images: fewer make none that is better than their mean.
_IMAGES_PER_PROTOTYPE = 5


class PaperReader(Reader):
    """Retrieves tasks by key prototypes and classifies by value prototypes."""

    rule = "paper"
    calibrated_probabilities = False
    retrieves_tasks = True
    needs_heldout = True
    layers = "last"
    max_cosines = 2**27  # of images and value prototypes in memory at once

    def __init__(self, memory: Memory, settings: Settings):
        self.memory = Memory(memory.tasks)  # a list of its own, which does not change
        self.index = Index.build(self.memory)
        self.temperature, self.neighbours = settings.temperature, settings.neighbours
        self._settings = settings

    def match(self, embed: Embed, count: int, exhaustive: bool = True) -> ClassifierMatches:
        """See `Reader.match`. All classes are always scored; images in parts where prototypes are very many."""
        prototypes, parts = self.index.prototypes, []
        size = max(1, self.max_cosines // len(prototypes.values))
        for rows in torch.arange(count).split(size):

            def embed_part(part: Tensor, prompts: Tensor | None, rows: Tensor = rows) -> Tensor:
                return embed(rows[part], prompts)

            parts.append(inference.match(prototypes, embed_part, len(rows), self.neighbours))
        found = parts[0] if len(parts) == 1 else inference.Matches.join(parts)
        return ClassifierMatches(**vars(found), similarities=found.scores)

    def with_image(self, memory: Memory, weight: int = 1) -> PaperReader:
        """See `Reader.with_image`: building it takes little time, and the weight of an image changes nothing."""
        return PaperReader(memory, self._settings)

    def release(self) -> None:
        """See `Reader.release`: there is nothing."""

    def known_similarities(self) -> Tensor:
        """See `Reader.known_similarities`: of held-out images, but those of few-shot classes."""
        table = self.memory.table
        return table.heldout_similarities[(~self._few_shot).repeat_interleave(table.lengths("held_out"))]

    def class_thresholds(self) -> dict[str, float]:
        """See `Reader.class_thresholds`: the least similarity of few-shot classes."""
        least: dict[str, float] = {}
        table = self.memory.table.take(self._few_shot.nonzero()[:, 0])
        parts = table.heldout_similarities.split(table.lengths("held_out").tolist())
        for name, similarities in zip(table.names, parts, strict=True):  # a class may have been extended
            least[name] = min(least.get(name, math.inf), float(similarities.min()))
        return least

    @cached_property
    def _few_shot(self) -> Tensor:
        """Find the records, bool [R], that had no images to hold out; none if no other has held-out similarities."""
        known = self.memory.table.lengths("held_out") > 0
        none_held = [not task.metadata.held_out for task in self.memory.tasks]
        few = known & torch.tensor(none_held, dtype=torch.bool)[self.index.record_tasks]
        return few if int(few.sum()) < int(known.sum()) else torch.zeros_like(few)

    def class_directions(self) -> Tensor:
        """See `Reader.class_directions`: mean value prototypes, weighted by their images."""
        index, stored = self.index, self.memory.table.values
        values, counts = F.normalize(stored.means.double(), dim=1), stored.counts.double()
        sums = values.new_zeros(len(index.classes), values.shape[1])
        return F.normalize(sums.index_add_(0, index.value_classes, values * counts[:, None]), dim=1)

    def explain(self, prediction: Prediction) -> list[dict[str, Any]]:
        """See `Reader.explain`: the tasks retrieved, the prototype that won, and the runner-up."""
        return [self._explain(prediction, i, row) for i, row in enumerate(prediction.ranked(2))]

    def _explain(self, prediction: Prediction, i: int, ranking: list[tuple[str, float, float]]) -> dict[str, Any]:
        index, (winner, *others) = self.index, ranking
        own = (index.value_classes == prediction.classes.index(winner[0])).nonzero()[:, 0]
        similarity = F.normalize(prediction.embeddings[i], dim=0) @ index.values[own].T
        second = others[0] if others else None
        best = prediction.scores[i, prediction.column(i, winner[0])]
        return {
            "candidates": prediction.candidates[i],
            "centroid": int(similarity.argmax()) + 1,
            "centroids": len(own),
            "centroid_similarity": float(similarity.max()),
            "runner_up": second and second[0],
            "runner_up_similarity": second and second[2],
            "margin": second and float(best - prediction.scores[i, prediction.column(i, second[0])]),
        }

    def diagnose(self, embed: Embed, truth: Tensor, task: int, own: Tensor) -> dict[str, float]:
        """See `Reader.diagnose`: errors of retrieval, of a wrong prompt, and inside the right one.

        Tasks that brought images of an image's class are its tasks; where classes come once, that is `task` alone.
        """
        index, record = self.index, self.memory.tasks[task]
        matches = self.match(embed, len(truth))
        wrong = matches.scores.argmax(dim=1) != truth
        own_tasks = index.class_task_mask[truth]  # [B, T]
        retrieved = (matches.candidates & own_tasks).any(dim=1)
        # Without prompts there is one embedding, and no match can be another prompt's.
        right_prompt = own_tasks.gather(1, matches.winners[:, None])[:, 0]
        right_prompt |= ~(own_tasks & index.prompted).any(dim=1)
        rows = torch.arange(len(truth))
        stored = {record.name: record for record in record.classes}
        classes = [stored[index.classes[c]] for c in own.tolist()]
        position = (own == truth[:, None]).int().argmax(dim=1)
        plain = embed(rows, None)
        prompted = plain if record.prompt is None else embed(rows, torch.full_like(rows, task))
        with_prompt = _nearest(prompted, [c.values.means for c in classes]) == position
        without = _nearest(plain, [c.keys for c in classes]) == position
        spreads = record.metadata.key_spread, record.metadata.value_spread
        return {
            "accuracy": percent(~wrong),
            "not_retrieved": percent(wrong & ~retrieved),
            "wrong_prompt_won": percent(wrong & retrieved & ~right_prompt),
            "wrong_class": percent(wrong & retrieved & right_prompt),
            # Among the task's own classes: did the prompt help?
            "true_task_with_prompt": percent(with_prompt),
            "true_task_without_prompt": percent(without),
            # Mean cosine of the task's training embeddings to their common mean.
            "key_spread": math.nan if spreads[0] is None else spreads[0],
            "value_spread": math.nan if spreads[1] is None else spreads[1],
        }

    def describe(self) -> dict[str, Any]:
        """See `Reader.describe`."""
        return {"rule": self.rule, "evidence": None}

    def advice(self) -> list[str]:
        """See `Reader.advice`."""
        better = "learn its folders again into a new model for calibrated probabilities and higher accuracy"
        return [f"this model uses CPP inference; {better}"] if self.index.classes else []

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
        """See `Rule.summarise_few_shot`. Similarities to the mean of the others stand for held-out ones."""
        values = embeddings.values
        count = min(settings.centroids, max(1, len(values) // _IMAGES_PER_PROTOTYPE))
        record = _prototypes(name, embeddings, count, settings, seed)
        if len(values) < 2:
            return record
        similarities = F.cosine_similarity(values, values.sum(dim=0) - values, dim=1)
        return dataclasses.replace(record, heldout_similarities=similarities)

    def stored(self, classes: ClassTable) -> bool:
        """See `Rule.stored`."""
        return not bool((classes.lengths("plain") > 0).any())

    def reader(self, memory: Memory, settings: Settings) -> PaperReader:
        """See `Rule.reader`."""
        return PaperReader(memory, settings)


def _prototypes(name: str, embeddings: Embeddings, count: int, settings: Settings, seed: int) -> ClassRecord:
    groups = (embeddings.plain[:, 0], embeddings.values)
    keys, values = (class_prototypes(group, count, settings, seed) for group in groups)
    return ClassRecord(name, keys.means, values)


def _nearest(embeddings: Tensor, groups: list[Tensor]) -> Tensor:
    """[B]: the group that holds the prototype most similar to each embedding [B, D]."""
    owners = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(g) for g in groups]))
    similarity = F.normalize(embeddings, dim=1) @ F.normalize(torch.cat(groups), dim=1).T
    return owners[similarity.argmax(dim=1)]
