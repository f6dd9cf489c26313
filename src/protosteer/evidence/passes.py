"""Calibrate the passes of the default classifier: which are worth making, and how much each counts.

All weights come from leave-one-out scores of stored images, so that probabilities are calibrated and no image is held
out.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from protosteer.evidence.calibration import ImageWeights, LooScores, Selection
from protosteer.evidence.scorer import CoarseScorer
from protosteer.model.memory import Memory
from protosteer.model.records import SELECTIONS

CONFIDENT = 0.8  # probability of a class from which on no further pass is made


@dataclass(frozen=True)
class Pass:
    """A forward pass that all classes are stored under."""

    prompt: int | None  # its number in the index; None: no prompt
    scorer: CoarseScorer
    weight: float  # together with the other pass
    solo_weight: float  # by itself
    loo_max_similarity: Tensor  # [n]: greatest similarities of leave-one-out images


@dataclass(frozen=True)
class LooPredictions:
    """How confident the passes of all classes are of m stored images by leave-one-out, and whether they are correct."""

    confidence: Tensor  # [m]: probability of the top-1 class
    correct: Tensor  # bool [m]
    labels: Tensor  # int64 [m]: the true classes, by their places in the index
    predicted: Tensor | None  # int64 [m]: the top-1 classes; None if there are too many classes to look at each


@dataclass(frozen=True)
class Calibrated:
    """The passes worth making, the one with the greatest weight first, and their leave-one-out predictions."""

    passes: list[Pass]
    loo_predictions: LooPredictions
    single_pass: bool  # the first one alone is made, since it reads several layers


def calibrate(
    memory: Memory,
    class_order: Tensor,
    shared_prompt_task: Tensor,
    last_layer: bool,
    min_pass_weight: float,
    min_unbiased: int,
) -> Calibrated:
    """Find the passes worth making, and their weights, by leave-one-out.

    Args:
        memory: Its classes all have summaries. Those of one class are ordered by the names of their tasks.
        class_order: [C], the classes of the memory as scores have them.
        shared_prompt_task: bool [T], the task whose prompt became the shared one.
        last_layer: Read the last layer alone.
        min_pass_weight: Share of all weight from which on a second pass is worth it.
        min_unbiased: Images that the shared prompt was not trained with, to calibrate by them alone.
    """
    scorers, tasks = _scorers(memory, class_order, last_layer)
    # Images that the shared prompt was trained with are easier under it than others.
    chosen_as = _selection(memory, tasks)
    known = chosen_as.known
    unbiased = known & ~shared_prompt_task[tasks]
    unbiased = unbiased if int(unbiased.sum()) >= min_unbiased else known
    several = any(len(scorer.spaces) > 1 for scorer in scorers.values())
    each = list(scorers.values())
    parts = [LooScores.of_parts(scorer) for scorer in each] if several else []
    loo = parts[0].weighted(each[0].shares) if several else LooScores.of(each)
    counted = chosen_as.weights(loo)
    counted = ImageWeights(torch.where(known & ~unbiased, 0.0, counted.weights))
    if several:
        loo = LooScores.join([_with_shares(scorer, part, counted) for scorer, part in zip(each, parts, strict=True)])
    columns = {prompt: column for column, prompt in enumerate(scorers)}

    @functools.cache  # the weight of one pass by itself is asked for three times
    def weights(*prompts: int | None) -> list[float]:
        return loo.weights([columns[p] for p in prompts], counted)

    together = dict(zip(scorers, weights(*scorers), strict=True))
    worth = [p for p in scorers if together[p] >= min_pass_weight * sum(together.values())]
    worth.sort(key=lambda p: -together[p])
    if several:  # then a single pass is made, the best one
        worth = [max(scorers, key=lambda p: loo.log_likelihood(columns[p], weights(p)[0], counted))]
    together = dict(zip(worth, weights(*worth), strict=True))

    def chosen(prompt: int | None) -> Pass:
        images = known if prompt is None else unbiased
        similarity = loo.max_similarity[:, columns[prompt]][images]
        return Pass(prompt, scorers[prompt], together[prompt], weights(prompt)[0], similarity)

    passes = [chosen(prompt) for prompt in worth]
    left_out = [columns[p] for p in worth], unbiased, scorers[None].statistics.loo_labels
    return Calibrated(passes, _loo_predictions(passes, loo, *left_out, class_order), several)


def _scorers(memory: Memory, class_order: Tensor, last_layer: bool) -> tuple[dict[int | None, CoarseScorer], Tensor]:
    """Return the scorer of each pass, by its prompt's number, and the tasks [m] of leave-one-out images."""
    labels, record_tasks = class_order.argsort()[memory.record_classes], memory.record_tasks
    by_name = torch.tensor(sorted(range(len(memory)), key=memory.task_names.__getitem__)).argsort()
    order = (labels * len(memory) + by_name[record_tasks]).argsort()
    scorers: dict[int | None, CoarseScorer] = {}
    for prompt, part in ((None, "plain"), (len(memory), "domain")):
        if part == "plain" or memory.shared_prompt is not None:
            table = memory.table.summaries(part)
            assert table is not None
            scorers[prompt] = CoarseScorer((table.last_layer() if last_layer else table).take(order), labels[order])
    statistics = scorers[None].statistics  # the same images are left out in every pass
    return scorers, record_tasks[order][statistics.summaries[statistics.loo_rows]]


def _with_shares(scorer: CoarseScorer, parts: LooScores, images: ImageWeights) -> LooScores:
    """Leave-one-out scores of one pass; images decide on the shares of several feature spaces."""
    if len(scorer.spaces) > 1:
        scorer.shares = parts.shares(scorer.shares, images)
    return parts.weighted(scorer.shares)


def _selection(memory: Memory, tasks: Tensor) -> Selection:
    """How images of the tasks [m] were chosen."""
    kinds = [task.selection for task in memory.tasks]
    learned, corrected, confirmed = (torch.tensor([own == kind for own in kinds])[tasks] for kind in SELECTIONS)
    _, errors, right = (sum(t.images for t in memory.tasks if t.selection == kind) for kind in SELECTIONS)
    return Selection(learned, corrected, confirmed, errors, right)


def _loo_predictions(
    passes: list[Pass], loo: LooScores, columns: list[int], images: Tensor, labels: Tensor, class_order: Tensor
) -> LooPredictions:
    """The passes of all classes on leave-one-out images, bool [m]; columns: their places in `loo`."""
    scores, true_class = (x[images][..., columns] for x in (loo.scores, loo.true_class))
    log_count, labels = loo.log_count[images], labels[images]

    def predict(weights: list[float]) -> tuple[Tensor, Tensor, Tensor]:
        weight = torch.tensor(weights, dtype=torch.double)
        logits, own = scores @ weight, true_class @ weight
        best = logits.amax(dim=1)
        correct = own >= best - 1e-9  # but for rounding
        return (best - (logits + log_count).logsumexp(dim=1)).exp(), correct, logits.argmax(dim=1)

    found = predict([passes[0].solo_weight, *(0.0 for _ in passes[1:])])
    if len(passes) > 1:
        confident = found[0] >= CONFIDENT
        later = predict([each.weight for each in passes])
        found = (found[0].where(confident, later[0]), found[1].where(confident, later[1]),
                 found[2].where(confident, later[2]))  # fmt: skip
    confidence, correct, top = found
    every = loo.scores.shape[1] == len(class_order)  # a column is a class
    predicted = class_order[labels.where(correct, top)] if every else None
    return LooPredictions(confidence, correct, class_order[labels], predicted)
