"""The default classifier: calibrated scores from one forward pass, then under a few tasks' prompts if there are any.

1. Embed an image as all classes are stored: without a prompt, or under the shared prompt. Scores in several layers
   give a posterior. A confident image is done after this single pass.
2. Embed those still uncertain under the prompts of the tasks that the posterior leaves open. The similarity to a
   class's value prototypes, each under its own task's prompt, is added to its score.

A model that stores the last layer alone, as those of earlier versions do, has a step between: uncertain images are
embedded both without and under the shared prompt, if the second pass is worth it.

All weights come from leave-one-out scores of stored images, so that probabilities are calibrated and no image is held
out.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.evidence.matches import ClassifierMatches
from protosteer.evidence.passes import CONFIDENT, Pass, calibrate
from protosteer.model.index import Index
from protosteer.model.memory import Memory
from protosteer.paper.prompts import Embed
from protosteer.search.candidates import CandidateOptions, CandidateSearch, ScoredClasses

MIN_TASK_PROB = 0.1  # probability of a task from which on its prompt is tried
MAX_EXTRA_PASSES = 2  # after the first: the second of all classes, and under prompts of the most probable tasks
MIN_PASS_WEIGHT = 0.2  # share of all weight from which on a second pass is worth it
MIN_UNBIASED = 50  # images that the shared prompt was not trained with, to calibrate by them alone
TASK_PROMPT_WEIGHT = 0.5  # of similarities under tasks' prompts, as a share of the weight of all classes' passes


class EvidenceClassifier:
    """Classifies by the summaries of all records of a memory.

    Inside, classes are sorted by name, so that no bit depends on the order in which tasks were learned or merged.
    """

    def __init__(
        self,
        memory: Memory,
        index: Index,
        options: CandidateOptions | None = None,
        min_pass_weight: float = MIN_PASS_WEIGHT,
        min_unbiased: int = MIN_UNBIASED,
    ):
        """Compute all that prediction needs from a memory whose classes all have summaries, and its index."""
        self.options = options or CandidateOptions()
        self._set_index(memory, index)
        # Of very many classes, the last layer alone is read.
        last_layer = len(self.order) >= self.options.min_classes
        found = calibrate(memory, self.order, self._shared_prompt_task, last_layer, min_pass_weight, min_unbiased)
        self.passes, self.loo_predictions, self._single_pass = found.passes, found.loo_predictions, found.single_pass
        self._set_prompts()

    def _set_index(self, memory: Memory, index: Index) -> None:
        self.index = index
        self.order = torch.tensor(sorted(range(len(index.classes)), key=index.classes.__getitem__))
        self.sorted_position = self.order.argsort()  # [C]: where the classes of the index are inside
        self.class_tasks = index.class_tasks[self.order]
        self._shared_prompt_task = _shared_prompt_task(memory)  # bool [T]

    def _set_prompts(self) -> None:
        index = self.index
        if self._single_pass:  # what the shared prompt tells of its own task's classes, it tells of all
            self.index = replace(index, prompted=index.prompted & ~self._shared_prompt_task)
        self._prompted_tasks = _prompted_tasks(self.index, self.sorted_position)
        self.max_task_prompts = MAX_EXTRA_PASSES - len(self.passes[1:])
        # Value prototypes are stored task by task: where each begins.
        self._starts = torch.searchsorted(index.value_tasks, torch.arange(len(index.tasks) + 1)).tolist()

    def with_image(self, memory: Memory, index: Index, weight: int = 1) -> EvidenceClassifier:
        """Return a classifier of a memory that has one task more, of one image without a prompt, by closed forms.

        The image counts as `weight` images.

        What leave-one-out decided stays: the weights of passes and feature spaces. So does the centre of the regression.
        """
        updated, (record,) = copy.copy(self), memory.tasks[-1].classes
        updated.__dict__.pop("candidate_search", None)
        updated._set_index(memory, index)
        label = int(updated.sorted_position[index.classes.index(record.name)])
        new = len(index.classes) > len(self.index.classes)

        def follow(one: Pass) -> Pass:
            table = memory.tasks[-1].classes.summaries("plain" if one.prompt is None else "domain")
            assert table is not None
            points = [table.decoded(space=space)[0].double() for space in range(len(one.scorer.spaces))]
            scorer = one.scorer.with_image(points, float(weight * table.counts[0]), label, new)
            return replace(one, prompt=None if one.prompt is None else len(memory), scorer=scorer)

        updated.passes = [follow(one) for one in self.passes]
        updated._set_prompts()
        return updated

    def release(self) -> None:
        """Free the memory that only `with_image` needs."""
        for one in self.passes:
            if one.scorer.ridge:
                one.scorer.ridge.release()

    @property
    def released(self) -> bool:
        """Whether `with_image` lacks what it needs."""
        return any(one.scorer.ridge is not None and one.scorer.ridge.factor is None for one in self.passes)

    @property
    def dim(self) -> int:
        """D: the width of an embedding of the last layer."""
        return self.passes[0].scorer.statistics.means.shape[1]

    @property
    def layers(self) -> str:
        """What images must be embedded by: the "last" layer, or "several"."""
        return "several" if len(self.passes[0].scorer.spaces) > 1 else "last"

    @cached_property
    def candidate_search(self) -> CandidateSearch | None:
        """Search among the whitened class means; None where classes are so few that all are scored."""
        if len(self.order) < self.options.min_classes:
            return None
        scorer = self.passes[0].scorer
        return CandidateSearch(scorer.whitened[0].units(scorer.statistics.means), self.options)

    def match(self, embed: Embed, count: int, exhaustive: bool = True, task_prompts: bool = True) -> ClassifierMatches:
        """Classify B images by `embed`, which takes rows [m] and numbers of prompts [m] or none: logits [B, C] or [B, n].

        Without `exhaustive`, only candidates are scored where classes are very many. `task_prompts`: do step 2.
        """
        first = self.passes[0]
        shown = embed(torch.arange(count), _number(first.prompt, count))
        scored = ScoredClasses() if exhaustive else self._candidates(shown)
        scores, similarities = scored.scores(first.scorer, shown)
        logits, passes = first.solo_weight * scores, torch.ones(count, dtype=torch.int64)
        under_shared = shown if first.prompt is not None else None
        for later in self.passes[1:]:
            rows = _uncertain(scored.posterior(logits))
            second = torch.full_like(shown, torch.nan)
            if len(rows):
                second[rows] = embed(rows, _number(later.prompt, len(rows)))
                other, _ = scored.rows(rows).scores(later.scorer, second[rows])
                logits[rows] = first.weight * scores[rows] + later.weight * other
                passes[rows] += 1
            under_shared = under_shared if later.prompt is None else second
        tried = self._open_tasks(scored.posterior(logits), scored.class_ids) & task_prompts
        images, tasks = tried.nonzero().T
        if len(images):
            embeddings, embedded = self._embed_prompted(embed, under_shared, images, tasks)
            similar = self._task_similarities(embeddings, images, tasks, scored.class_ids, logits.shape)
            logits += TASK_PROMPT_WEIGHT * sum(each.weight for each in self.passes) * similar
            passes += torch.bincount(embedded, minlength=count)
        return self._matches(scored, logits, similarities, tried, shown[:, : self.dim], passes)

    def _candidates(self, embeddings: Tensor) -> ScoredClasses:
        search = self.candidate_search
        if search is None:
            return ScoredClasses()
        units = F.normalize(embeddings.double(), dim=1)
        return search.find(self.passes[0].scorer.whitened[0].units(units))

    def _matches(
        self,
        scored: ScoredClasses,
        logits: Tensor,
        similarities: Tensor,
        tried: Tensor,
        embeddings: Tensor,
        passes: Tensor,
    ) -> ClassifierMatches:
        """Matches in the order of the index."""
        rest, logits = scored.log_rest(logits), scored.without_sample(logits)
        best = logits.argmax(dim=1, keepdim=True)
        if scored.class_ids is None or rest is None:
            logits, similarities = self._in_index_order(logits), self._in_index_order(similarities)
            winners = self.class_tasks[best[:, 0]]
            return ClassifierMatches(logits, tried, winners, embeddings, passes, similarities)
        winners = self.class_tasks[scored.class_ids.gather(1, best)[:, 0]]
        logits, similarities = logits.float(), scored.without_sample(similarities).float()
        others = {"class_ids": self.order[scored.class_ids], "log_other_mass": rest.float()}
        return ClassifierMatches(logits, tried, winners, embeddings, passes, similarities, **others)

    def _in_index_order(self, columns: Tensor) -> Tensor:
        """float32 [B, C]."""
        ordered = torch.empty_like(columns, dtype=torch.float32)
        ordered[:, self.order] = columns.float()
        return ordered

    def _open_tasks(self, posterior: Tensor, class_ids: Tensor | None) -> Tensor:
        """Find the tasks, bool [B, T], whose prompts are worth trying. A class counts for each of its tasks."""
        count, tasks = len(posterior), len(self.index.tasks)
        shares = posterior.new_zeros(count, tasks + 1)  # the last stands for no task
        for own in self._prompted_tasks:
            shares.scatter_add_(1, own.expand(count, -1) if class_ids is None else own[class_ids], posterior)
        shares = shares[:, :tasks]
        uncertain = torch.zeros_like(shares, dtype=torch.bool)
        uncertain[_uncertain(posterior)] = True
        worth = shares * (uncertain & (shares >= MIN_TASK_PROB))
        leading = worth.topk(min(self.max_task_prompts, tasks), dim=1).indices
        return torch.zeros_like(uncertain).scatter_(1, leading, True) & (worth > 0)

    def _embed_prompted(
        self, embed: Embed, under_shared: Tensor | None, images: Tensor, tasks: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Embed images [m] under the prompts of tasks [m]: unit vectors [m, D], and the images that took a pass.

        under_shared: images [B, S * D] under the shared prompt; the task that it comes from needs no other pass.
        """
        known = torch.zeros_like(tasks, dtype=torch.bool)
        if under_shared is not None:
            known = self._shared_prompt_task[tasks]
        embeddings = torch.empty(len(images), self.dim)
        embeddings[~known] = embed(images[~known], tasks[~known])[:, : self.dim]
        if under_shared is not None:
            embeddings[known] = under_shared[images[known], : self.dim]
        return F.normalize(embeddings, dim=1), images[~known]

    def _task_similarities(
        self, units: Tensor, images: Tensor, tasks: Tensor, class_ids: Tensor | None, shape: torch.Size
    ) -> Tensor:
        """[B, C], or of candidates and sample: greatest cosine to a class's value prototypes under a task's prompt.

        A class that was not tried gets the best of those that were: it is neither helped nor hurt.
        """
        index = self.index
        similar = torch.full(shape, -torch.inf, dtype=torch.double)
        for t in tasks.unique().tolist():
            own, here = slice(self._starts[t], self._starts[t + 1]), tasks == t
            classes, owners = index.value_classes[own].unique(return_inverse=True)
            cosines = units[here] @ index.values[own].T
            best = torch.full((len(cosines), len(classes)), -torch.inf)
            best.scatter_reduce_(1, owners.expand(len(cosines), -1), cosines, "amax")
            rows = images[here]
            if class_ids is None:
                cells = (rows[:, None], self.sorted_position[classes])
                similar[cells] = torch.maximum(similar[cells], best.double())
                continue
            numbers, width = self.order[class_ids[rows]], class_ids.shape[1]  # [m, n]
            place = torch.searchsorted(classes, numbers).clamp(max=len(classes) - 1)
            mine = best.gather(1, place).double().masked_fill(classes[place] != numbers, -torch.inf)
            similar[rows, :width] = torch.maximum(similar[rows, :width], mine)
        highest = similar.amax(dim=1, keepdim=True).nan_to_num(neginf=0.0)
        return torch.where(similar.isinf(), highest, similar)


def _prompted_tasks(index: Index, sorted_position: Tensor) -> list[Tensor]:
    """Tasks with a prompt of each class: [C] the first of each, [C] the second, and so on; T where there is none."""
    records = index.prompted[index.record_tasks].nonzero()[:, 0]
    classes, tasks = sorted_position[index.record_classes[records]], index.record_tasks[records]
    order = classes.argsort(stable=True)
    classes, tasks = classes[order], tasks[order]
    which = torch.arange(len(classes)) - torch.searchsorted(classes, classes)
    found = []
    for number in range(int(which.max()) + 1 if len(which) else 0):
        own = torch.full((len(index.classes),), len(index.tasks))
        own[classes[which == number]] = tasks[which == number]
        found.append(own)
    return found


def _shared_prompt_task(memory: Memory) -> Tensor:
    """Find the task, bool [T], if it is there, whose prompt is the shared one."""
    shared = memory.shared_prompt
    prompts = [task.prompt for task in memory.tasks]
    return torch.tensor([shared is not None and p is not None and torch.equal(p, shared) for p in prompts])


def _number(prompt: int | None, count: int) -> Tensor | None:
    return None if prompt is None else torch.full((count,), prompt)


def _uncertain(posterior: Tensor) -> Tensor:
    """Rows [m] whose top-1 class is not probable enough."""
    return (posterior.amax(dim=1) < CONFIDENT).nonzero()[:, 0]
