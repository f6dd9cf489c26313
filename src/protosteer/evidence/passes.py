"""Select the forward passes of the default classifier and calibrate their weights.

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

CONFIDENT = 0.8  # probability of the top-1 class from which on no further pass is made


@dataclass(frozen=True)
class Pass:
    """A forward pass that all classes are stored under."""

    prompt: int | None  # its number in the index; None: no prompt
    scorer: CoarseScorer
    weight: float  # in the sum with the other pass
    solo_weight: float  # without the other pass
    loo_max_similarity: Tensor  # [n]: greatest similarities of leave-one-out images


@dataclass(frozen=True)
class LooPredictions:
    """Leave-one-out predictions of m stored images, without task-specific prompts."""

    confidence: Tensor  # [m]: probability of the top-1 class
    correct: Tensor  # bool [m]
    labels: Tensor  # int64 [m]: the true classes, by their places in the index
    predicted: Tensor | None  # int64 [m]: the top-1 classes; None if there are too many classes


@dataclass(frozen=True)
class Calibrated:
    """The passes worth making, the one with the greatest weight first, and their leave-one-out predictions."""

    passes: list[Pass]
    loo_predictions: LooPredictions
    single_pass: bool  # only the first one is made, since it reads several layers


def calibrate(
    memory: Memory,
    class_order: Tensor,
    shared_prompt_task: Tensor,
    last_layer: bool,
    min_pass_weight: float,
    min_unbiased: int,
) -> Calibrated:
    """Select the passes of a memory and fit their weights by leave-one-out.

    Args:
        memory: The model; all its classes have summaries.
        class_order: [C], the classes of the memory as scores have them.
        shared_prompt_task: bool [T], the task whose prompt became the shared one.
        last_layer: Read the last layer alone.
        min_pass_weight: Share of all weight from which on a second pass is worth it.
        min_unbiased: Number of images from which on only those calibrate that the shared prompt was not trained with.
    """
    scorers, tasks = _scorers(memory, class_order, last_layer)
    # Images that the shared prompt was trained with are easier under it than others.
    selection = _selection(memory, tasks)
    unselected = selection.representative
    unbiased = unselected & ~shared_prompt_task[tasks]
    unbiased = unbiased if int(unbiased.sum()) >= min_unbiased else unselected
    several = any(len(scorer.spaces) > 1 for scorer in scorers.values())
    pass_scorers = list(scorers.values())
    parts = [LooScores.of_parts(scorer) for scorer in pass_scorers] if several else []
    loo = parts[0].weighted(pass_scorers[0].shares) if several else LooScores.of(pass_scorers)
    images = ImageWeights(torch.where(unselected & ~unbiased, 0.0, selection.weights(loo).weights))
    if several:
        loo = LooScores.join([_fit_shares(*pair, images) for pair in zip(pass_scorers, parts, strict=True)])
    columns = {prompt: column for column, prompt in enumerate(scorers)}

    @functools.cache  # the weight of a single pass is used three times
    def weights(*prompts: int | None) -> list[float]:
        return loo.weights([columns[p] for p in prompts], images)

    pass_weights = dict(zip(scorers, weights(*scorers), strict=True))
    prompts = [p for p in scorers if pass_weights[p] >= min_pass_weight * sum(pass_weights.values())]
    prompts.sort(key=lambda p: -pass_weights[p])
    if several:  # then only the best pass is made
        prompts = [max(scorers, key=lambda p: loo.log_likelihood(columns[p], weights(p)[0], images))]
    pass_weights = dict(zip(prompts, weights(*prompts), strict=True))

    def calibrated_pass(prompt: int | None) -> Pass:
        mask = unselected if prompt is None else unbiased
        similarity = loo.max_similarity[:, columns[prompt]][mask]
        return Pass(prompt, scorers[prompt], pass_weights[prompt], weights(prompt)[0], similarity)

    passes = [calibrated_pass(prompt) for prompt in prompts]
    labels = scorers[None].statistics.loo_labels
    predictions = _loo_predictions(passes, loo, [columns[p] for p in prompts], unbiased, labels, class_order)
    return Calibrated(passes, predictions, several)


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
    statistics = scorers[None].statistics  # leave-one-out images are the same in every pass
    return scorers, record_tasks[order][statistics.summaries[statistics.loo_rows]]


def _fit_shares(scorer: CoarseScorer, parts: LooScores, images: ImageWeights) -> LooScores:
    """Set the shares of a scorer's feature spaces by images; return the weighted leave-one-out scores of its pass."""
    if len(scorer.spaces) > 1:
        scorer.shares = parts.shares(scorer.shares, images)
    return parts.weighted(scorer.shares)


def _selection(memory: Memory, tasks: Tensor) -> Selection:
    """Return how images of the tasks [m] were chosen."""
    kinds = [task.selection for task in memory.tasks]
    learned, corrected, confirmed = (torch.tensor([kind == name for kind in kinds])[tasks] for name in SELECTIONS)
    counts = [sum(task.images for task in memory.tasks if task.selection == name) for name in SELECTIONS]
    return Selection(learned, corrected, confirmed, counts[1], counts[2])


def _loo_predictions(
    passes: list[Pass], loo: LooScores, columns: list[int], images: Tensor, labels: Tensor, class_order: Tensor
) -> LooPredictions:
    """Predict leave-one-out images, bool [m], by the passes; `columns` are the places of the passes in `loo`."""
    scores, true_class = (x[images][..., columns] for x in (loo.scores, loo.true_class))
    log_count, labels = loo.log_count[images], labels[images]

    def predict(weights: list[float]) -> tuple[Tensor, Tensor, Tensor]:
        weight = torch.tensor(weights, dtype=torch.double)
        logits, true_logits = scores @ weight, true_class @ weight
        top_logits = logits.amax(dim=1)
        correct = true_logits >= top_logits - 1e-9  # up to rounding
        return (top_logits - (logits + log_count).logsumexp(dim=1)).exp(), correct, logits.argmax(dim=1)

    confidence, correct, top = single = predict([passes[0].solo_weight, *(0.0 for _ in passes[1:])])
    if len(passes) > 1:
        is_confident = confidence >= CONFIDENT
        combined = predict([loo_pass.weight for loo_pass in passes])
        confidence, correct, top = (a.where(is_confident, b) for a, b in zip(single, combined, strict=True))
    has_all_classes = loo.scores.shape[1] == len(class_order)
    predicted = class_order[labels.where(correct, top)] if has_all_classes else None
    return LooPredictions(confidence, correct, class_order[labels], predicted)
