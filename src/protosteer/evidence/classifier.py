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
MIN_UNBIASED = 50  # images from which on only those calibrate that the shared prompt was not trained with
TASK_PROMPT_WEIGHT = 0.5  # of similarities under tasks' prompts, as a share of the weight of all classes' passes


class EvidenceClassifier:
    """Classifies by the summaries of all records of a memory.

    Inside, classes are sorted by name, so that results are bit-identical in any order of learning or merging.
    """

    def __init__(
        self,
        memory: Memory,
        index: Index,
        options: CandidateOptions | None = None,
        min_pass_weight: float = MIN_PASS_WEIGHT,
        min_unbiased: int = MIN_UNBIASED,
    ):
        """Fit the classifier to a memory, whose classes all have summaries, and its index."""
        self.options = options or CandidateOptions()
        self._set_index(memory, index)
        # With very many classes, only the last layer is read.
        last_layer = len(self.order) >= self.options.min_classes
        calibrated = calibrate(memory, self.order, self._shared_prompt_task, last_layer, min_pass_weight, min_unbiased)
        self.passes, self.loo_predictions = calibrated.passes, calibrated.loo_predictions
        self._single_pass = calibrated.single_pass
        self._set_prompts()

    def _set_index(self, memory: Memory, index: Index) -> None:
        self.index = index
        self.order = torch.tensor(sorted(range(len(index.classes)), key=index.classes.__getitem__))
        self.sorted_position = self.order.argsort()  # [C]: where the classes of the index are inside
        self.class_tasks = index.class_tasks[self.order]
        self._shared_prompt_task = _shared_prompt_task(memory)  # bool [T]

    def _set_prompts(self) -> None:
        index = self.index
        if self._single_pass:  # the shared prompt is used for all classes already, so not as its task's
            self.index = replace(index, prompted=index.prompted & ~self._shared_prompt_task)
        self._prompted_tasks = _prompted_tasks(self.index, self.sorted_position)
        self.max_task_prompts = MAX_EXTRA_PASSES - len(self.passes[1:])
        # Value prototypes are stored task by task: where each begins.
        self._starts = torch.searchsorted(index.value_tasks, torch.arange(len(index.tasks) + 1)).tolist()

    def with_image(self, memory: Memory, index: Index, weight: int = 1) -> EvidenceClassifier:
        """Return a classifier of a memory that has one more task, of one image without a prompt, by closed forms.

        The image counts as `weight` images. Weights of passes and feature spaces, fitted by leave-one-out, stay the
        same, and so does the centre of the regression.
        """
        updated, (record,) = copy.copy(self), memory.tasks[-1].classes
        updated.__dict__.pop("candidate_search", None)
        updated._set_index(memory, index)
        label = int(updated.sorted_position[index.classes.index(record.name)])
        is_new = len(index.classes) > len(self.index.classes)

        def update(old_pass: Pass) -> Pass:
            prompt, scorer = old_pass.prompt, old_pass.scorer
            table = memory.tasks[-1].classes.summaries("plain" if prompt is None else "domain")
            assert table is not None
            points = [table.decoded(space=space)[0].double() for space in range(len(scorer.spaces))]
            scorer = scorer.with_image(points, float(weight * table.counts[0]), label, is_new)
            return replace(old_pass, prompt=None if prompt is None else len(memory), scorer=scorer)

        updated.passes = [update(old_pass) for old_pass in self.passes]
        updated._set_prompts()
        return updated

    def release(self) -> None:
        """Free the memory that only `with_image` needs."""
        for ridge in (each_pass.scorer.ridge for each_pass in self.passes):
            if ridge:
                ridge.release()

    @property
    def is_released(self) -> bool:
        """Tell whether `release` was called, so that `with_image` does not work."""
        return any(p.scorer.ridge is not None and p.scorer.ridge.factor is None for p in self.passes)

    @property
    def dim(self) -> int:
        """D: the width of an embedding of the last layer."""
        return self.passes[0].scorer.statistics.means.shape[1]

    @property
    def layers(self) -> str:
        """Layers that images must be embedded in: the "last" one, or "several"."""
        return "several" if len(self.passes[0].scorer.spaces) > 1 else "last"

    @cached_property
    def candidate_search(self) -> CandidateSearch | None:
        """The search among whitened class means; None if classes are so few that all are scored."""
        if len(self.order) < self.options.min_classes:
            return None
        scorer = self.passes[0].scorer
        return CandidateSearch(scorer.whitened[0].units(scorer.statistics.means), self.options)

    def match(self, embed: Embed, count: int, exhaustive: bool = True, task_prompts: bool = True) -> ClassifierMatches:
        """Classify B = `count` images: logits [B, C] of all classes, or [B, n] of candidates.

        `embed` takes rows [m] of images and numbers of prompts [m] or None. Without `exhaustive`, only candidates are
        scored if classes are very many. `task_prompts`: do step 2.
        """
        first_pass = self.passes[0]
        embeddings = embed(torch.arange(count), _number(first_pass.prompt, count))
        scored = ScoredClasses() if exhaustive else self._candidates(embeddings)
        scores, similarities = scored.scores(first_pass.scorer, embeddings)
        logits, passes = first_pass.solo_weight * scores, torch.ones(count, dtype=torch.int64)
        under_shared = embeddings if first_pass.prompt is not None else None
        for next_pass in self.passes[1:]:
            rows = _uncertain(scored.posterior(logits))
            next_embeddings = torch.full_like(embeddings, torch.nan)
            if len(rows):
                next_embeddings[rows] = embed(rows, _number(next_pass.prompt, len(rows)))
                next_scores, _ = scored.rows(rows).scores(next_pass.scorer, next_embeddings[rows])
                logits[rows] = first_pass.weight * scores[rows] + next_pass.weight * next_scores
                passes[rows] += 1
            under_shared = under_shared if next_pass.prompt is None else next_embeddings
        candidates = self._open_tasks(scored.posterior(logits), scored.class_ids) & task_prompts
        images, tasks = candidates.nonzero().T
        if len(images):
            units, embedded = self._embed_prompted(embed, under_shared, images, tasks)
            cosines = self._task_similarities(units, images, tasks, scored.class_ids, logits.shape)
            logits += TASK_PROMPT_WEIGHT * sum(each_pass.weight for each_pass in self.passes) * cosines
            passes += torch.bincount(embedded, minlength=count)
        return self._matches(scored, logits, similarities, candidates, embeddings[:, : self.dim], passes)

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
        candidates: Tensor,
        embeddings: Tensor,
        passes: Tensor,
    ) -> ClassifierMatches:
        """Return the matches, with classes in the order of the index."""
        log_other_mass, logits = scored.log_other_mass(logits), scored.without_sample(logits)
        columns = logits.argmax(dim=1, keepdim=True)
        if scored.class_ids is None or log_other_mass is None:
            logits, similarities = self._in_index_order(logits), self._in_index_order(similarities)
            winners = self.class_tasks[columns[:, 0]]
            return ClassifierMatches(logits, candidates, winners, embeddings, passes, similarities)
        winners = self.class_tasks[scored.class_ids.gather(1, columns)[:, 0]]
        logits, similarities = logits.float(), scored.without_sample(similarities).float()
        candidate_columns = {"class_ids": self.order[scored.class_ids], "log_other_mass": log_other_mass.float()}
        return ClassifierMatches(logits, candidates, winners, embeddings, passes, similarities, **candidate_columns)

    def _in_index_order(self, columns: Tensor) -> Tensor:
        """Return columns [B, C] in the order of the index, in float32."""
        ordered = torch.empty_like(columns, dtype=torch.float32)
        ordered[:, self.order] = columns.float()
        return ordered

    def _open_tasks(self, posterior: Tensor, class_ids: Tensor | None) -> Tensor:
        """Find the tasks, bool [B, T], whose prompts are worth trying. A class counts for each of its tasks."""
        count, tasks = len(posterior), len(self.index.tasks)
        shares = posterior.new_zeros(count, tasks + 1)  # the last column: no task
        for column in self._prompted_tasks:
            columns = column.expand(count, -1) if class_ids is None else column[class_ids]
            shares.scatter_add_(1, columns, posterior)
        shares = shares[:, :tasks]
        is_uncertain = torch.zeros_like(shares, dtype=torch.bool)
        is_uncertain[_uncertain(posterior)] = True
        open_shares = shares * (is_uncertain & (shares >= MIN_TASK_PROB))
        columns = open_shares.topk(min(self.max_task_prompts, tasks), dim=1).indices
        return torch.zeros_like(is_uncertain).scatter_(1, columns, True) & (open_shares > 0)

    def _embed_prompted(
        self, embed: Embed, under_shared: Tensor | None, images: Tensor, tasks: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Embed images [m] under the prompts of tasks [m]: unit vectors [m, D], and the images that took a pass.

        under_shared: images [B, S * D] under the shared prompt; the task that it comes from needs no other pass.
        """
        is_embedded = torch.zeros_like(tasks, dtype=torch.bool)
        if under_shared is not None:
            is_embedded = self._shared_prompt_task[tasks]
        embeddings = torch.empty(len(images), self.dim)
        embeddings[~is_embedded] = embed(images[~is_embedded], tasks[~is_embedded])[:, : self.dim]
        if under_shared is not None:
            embeddings[is_embedded] = under_shared[images[is_embedded], : self.dim]
        return F.normalize(embeddings, dim=1), images[~is_embedded]

    def _task_similarities(
        self, units: Tensor, images: Tensor, tasks: Tensor, class_ids: Tensor | None, shape: torch.Size
    ) -> Tensor:
        """Return greatest cosines to each class's value prototypes under tasks' prompts; the shape is that of logits.

        A class without one gets the greatest of the others: it is neither helped nor hurt.
        """
        index = self.index
        maxima = torch.full(shape, -torch.inf, dtype=torch.double)
        for t in tasks.unique().tolist():
            values, pairs = slice(self._starts[t], self._starts[t + 1]), tasks == t
            classes, owners = index.value_classes[values].unique(return_inverse=True)
            cosines = units[pairs] @ index.values[values].T
            class_maxima = torch.full((len(cosines), len(classes)), -torch.inf)
            class_maxima.scatter_reduce_(1, owners.expand(len(cosines), -1), cosines, "amax")
            rows = images[pairs]
            if class_ids is None:
                cells = (rows[:, None], self.sorted_position[classes])
                maxima[cells] = torch.maximum(maxima[cells], class_maxima.double())
                continue
            numbers, width = self.order[class_ids[rows]], class_ids.shape[1]  # [m, n]
            places = torch.searchsorted(classes, numbers).clamp(max=len(classes) - 1)
            gathered = class_maxima.gather(1, places).double().masked_fill(classes[places] != numbers, -torch.inf)
            maxima[rows, :width] = torch.maximum(maxima[rows, :width], gathered)
        highest = maxima.amax(dim=1, keepdim=True).nan_to_num(neginf=0.0)
        return torch.where(maxima.isinf(), highest, maxima)


def _prompted_tasks(index: Index, sorted_position: Tensor) -> list[Tensor]:
    """List the tasks with a prompt of each class: [C] the first of each, [C] the second, and so on; T if there is none."""
    records = index.prompted[index.record_tasks].nonzero()[:, 0]
    classes, tasks = sorted_position[index.record_classes[records]], index.record_tasks[records]
    order = classes.argsort(stable=True)
    classes, tasks = classes[order], tasks[order]
    positions = torch.arange(len(classes)) - torch.searchsorted(classes, classes)
    columns = []
    for number in range(int(positions.max()) + 1 if len(positions) else 0):
        column = torch.full((len(index.classes),), len(index.tasks))
        column[classes[positions == number]] = tasks[positions == number]
        columns.append(column)
    return columns


def _shared_prompt_task(memory: Memory) -> Tensor:
    """Mark the task, bool [T], whose prompt is the shared one, if the memory has it."""
    shared = memory.shared_prompt
    prompts = [task.prompt for task in memory.tasks]
    return torch.tensor([shared is not None and p is not None and torch.equal(p, shared) for p in prompts])


def _number(prompt: int | None, count: int) -> Tensor | None:
    return None if prompt is None else torch.full((count,), prompt)


def _uncertain(posterior: Tensor) -> Tensor:
    """Return the rows [m] whose top-1 class is not probable enough."""
    return (posterior.amax(dim=1) < CONFIDENT).nonzero()[:, 0]
