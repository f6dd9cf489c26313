"""Prediction by evidence: coarse over all classes, fine inside the tasks that it leaves open.

1. An image is embedded in the best view of all classes, without a prompt or under the prompt for all classes,
   whichever tells images apart better that were left out. Coarse evidence makes a posterior of it. Whoever is
   sure then is done, after a single pass.
2. The others are seen in the second view, if that is worth its pass, ...
3. ... and those still open under the prompts of the tasks that the posterior leaves open. How similar the
   image is to a class's value centroids, each under its own task's prompt, is fine evidence for the class.

Weights of the views come from the images that can be left out of the records, so that probabilities mean what
they say; nothing is held out for that.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.evidence.calibration import LeftOut
from protosteer.evidence.matches import ClassifierMatches
from protosteer.evidence.scorer import Coarse
from protosteer.evidence.summary_table import SummaryTable
from protosteer.model.index import Index
from protosteer.model.memory import Memory
from protosteer.paper.prompts import Embed
from protosteer.search.candidates import CandidateOptions, CandidateSearch, ScoredClasses
from protosteer.settings import Settings

CANDIDATES = CandidateOptions()
SURE = 0.8  # the probability of a class from which on no further pass is made
OPEN = 0.1  # the probability of a task from which on its prompt is tried
MOST = 2  # passes after the first: in the second view, and under the prompts of the likeliest tasks
WORTH = 0.2  # the share of all weight from which on a second view is worth a pass
ENOUGH = 50  # images that the prompt for all classes was not trained with, to be judged by them alone
FINE = 0.5  # the weight of fine evidence, as a share of the weight of coarse evidence


@dataclass(frozen=True)
class View:
    """One space that all classes are known in."""

    prompt: int | None  # its number in the index
    coarse: Coarse
    weight: float  # together with the other views
    alone: float  # by itself
    familiar: Tensor  # [m]: greatest similarities of images that were left out


@dataclass(frozen=True)
class Checked:
    """How sure steps 1 and 2 are of m images, each as if it had not been learned, and whether they are right."""

    confidence: Tensor  # [m]: the probability of the likeliest class
    right: Tensor  # bool [m]


class Fusion:
    """What prediction by evidence needs of all records, computed once.

    Inside, classes stand in the order of their names, so that no bit depends on the order in which tasks were
    learned or merged.
    """

    def __init__(self, memory: Memory, index: Index):
        self.index = index
        self.order = torch.tensor(sorted(range(len(index.classes)), key=index.classes.__getitem__))
        self.places = self.order.argsort()  # where the classes of the memory stand inside
        self.class_tasks = index.class_tasks[self.order]
        self.prompted_tasks = _prompted_tasks(index, self.places)
        self.views, self.checked = _views(memory, index, self.places)
        self.most = MOST - len(self.views[1:])  # own prompts that are tried
        self.domain = _trained_domain(memory)  # bool [T]
        # Value centroids stand task by task: where each begins.
        self.starts = torch.searchsorted(index.value_tasks, torch.arange(len(index.tasks) + 1)).tolist()

    def match(
        self, embed: Embed, count: int, fine: bool = True, shortlist: CandidateSearch | None = None
    ) -> ClassifierMatches:
        """Steps 1 to 3 for `count` images that `embed` knows by their rows; without `fine`, steps 1 and 2.

        Scores are logits. shortlist: of the first view, where not all classes are to be scored.
        """
        first = self.views[0]
        seen = {first.prompt: embed(torch.arange(count), _number(first.prompt, count))}
        scored = ScoredClasses()
        if shortlist:
            scored = shortlist.find(first.coarse.whitened.units(_unit(seen[first.prompt])))
        coarse, similarities = scored.scores(first.coarse, seen[first.prompt])
        logits, passes = first.alone * coarse, torch.ones(count, dtype=torch.int64)
        for view in self.views[1:]:
            rows = _unsure(scored.posterior(logits))
            seen[view.prompt] = torch.full_like(seen[first.prompt], torch.nan)
            if len(rows):
                seen[view.prompt][rows] = embed(rows, _number(view.prompt, len(rows)))
                other, _ = scored.rows(rows).scores(view.coarse, seen[view.prompt][rows])
                logits[rows] = first.weight * coarse[rows] + view.weight * other
                passes[rows] += 1
        tried = self._open(scored.posterior(logits), scored.class_ids) & fine
        images, tasks = tried.nonzero().T
        if len(images):
            embeddings, own = self._embedded(embed, seen.get(len(self.index.tasks)), images, tasks)
            similar = self._fine(embeddings, images, tasks, scored.class_ids, logits.shape)
            logits += FINE * sum(view.weight for view in self.views) * similar
            passes += torch.bincount(own, minlength=count)
        return self._matches(scored, logits, similarities, tried, seen[first.prompt], passes)

    def _matches(
        self,
        scored: ScoredClasses,
        logits: Tensor,
        similarities: Tensor,
        tried: Tensor,
        seen: Tensor,
        passes: Tensor,
    ) -> ClassifierMatches:
        """As the memory has its classes."""
        rest, logits = scored.log_rest(logits), scored.without_sample(logits)
        best = logits.argmax(dim=1, keepdim=True)
        if scored.class_ids is None or rest is None:
            scores, shown = self._in_order(logits), self._in_order(similarities)
            return ClassifierMatches(scores, tried, self.class_tasks[best[:, 0]], seen, passes, shown)
        winners = self.class_tasks[scored.class_ids.gather(1, best)[:, 0]]
        scores, shown = logits.float(), scored.without_sample(similarities).float()
        class_ids = self.order[scored.class_ids]
        return ClassifierMatches(scores, tried, winners, seen, passes, shown, class_ids, rest.float())

    def _in_order(self, columns: Tensor) -> Tensor:
        """[B, C]: as the memory has its classes."""
        turned = torch.empty_like(columns, dtype=torch.float32)
        turned[:, self.order] = columns.float()
        return turned

    def _open(self, posterior: Tensor, columns: Tensor | None) -> Tensor:
        """bool [B, T]: the tasks whose own prompts are worth trying. A class speaks for each of its tasks."""
        count, tasks = len(posterior), len(self.index.tasks)
        shares = posterior.new_zeros(count, tasks + 1)  # the last stands for none
        for own in self.prompted_tasks:
            shares.scatter_add_(1, own.expand(count, -1) if columns is None else own[columns], posterior)
        shares = shares[:, :tasks]
        unsure = torch.zeros_like(shares, dtype=torch.bool)
        unsure[_unsure(posterior)] = True
        worth = shares * (unsure & (shares >= OPEN))
        leading = worth.topk(min(self.most, tasks), dim=1).indices
        return torch.zeros_like(unsure).scatter_(1, leading, True) & (worth > 0)

    def _embedded(
        self, embed: Embed, domain: Tensor | None, images: Tensor, tasks: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Images [m] under the prompts of tasks [m], as unit vectors [m, D]; and the images that took a pass.

        domain: images [B, D] under the prompt for all classes; the task that it comes from needs no other pass.
        """
        known = self.domain[tasks] if domain is not None else torch.zeros_like(tasks, dtype=torch.bool)
        embeddings = torch.empty(len(images), self.index.values.shape[1])
        embeddings[~known] = embed(images[~known], tasks[~known])
        if domain is not None:
            embeddings[known] = domain[images[known]]
        return F.normalize(embeddings, dim=1), images[~known]

    def _fine(
        self, units: Tensor, images: Tensor, tasks: Tensor, columns: Tensor | None, shape: torch.Size
    ) -> Tensor:
        """[B, C], or of candidates and sample: greatest cosine to a class's value centroids under a task's prompt.

        What was not tried is neither helped nor hurt against the best of what was.
        """
        index = self.index
        fine = torch.full(shape, -torch.inf, dtype=torch.double)
        for t in tasks.unique().tolist():
            own, some = slice(self.starts[t], self.starts[t + 1]), tasks == t
            classes, owners = index.value_classes[own].unique(return_inverse=True)
            similarity = units[some] @ index.values[own].T
            best = torch.full((len(similarity), len(classes)), -torch.inf)
            best.scatter_reduce_(1, owners.expand(len(similarity), -1), similarity, "amax")
            rows = images[some]
            if columns is None:
                here = (rows[:, None], self.places[classes])
                fine[here] = torch.maximum(fine[here], best.double())
                continue
            numbers, width = self.order[columns[rows]], columns.shape[1]  # [m, n]
            place = torch.searchsorted(classes, numbers).clamp(max=len(classes) - 1)
            mine = best.gather(1, place).double().masked_fill(classes[place] != numbers, -torch.inf)
            fine[rows, :width] = torch.maximum(fine[rows, :width], mine)
        usual = fine.amax(dim=1, keepdim=True).nan_to_num(neginf=0.0)
        return torch.where(fine.isinf(), usual, fine)

    def shortlist(self) -> CandidateSearch | None:
        """None where classes are so few that all are scored."""
        if len(self.order) < CANDIDATES.min_classes:
            return None
        coarse = self.views[0].coarse
        return CandidateSearch(coarse.whitened.units(coarse.space.means), CANDIDATES)


def fusion_of(memory: Memory, settings: Settings, index: Index | None = None) -> Fusion | None:
    """None where the paper's rule is the one: by the settings, or because a class has no sketch."""
    if settings.rule == "paper" or not memory.evidence:
        return None
    return Fusion(memory, index or Index.build(memory))


def _prompted_tasks(index: Index, places: Tensor) -> list[Tensor]:
    """Tasks of each class that have a prompt: [C] the first of each, [C] the second ...; T where there is none.

    places: where the classes of the index stand.
    """
    records = index.prompted[index.record_tasks].nonzero()[:, 0]
    classes, tasks = places[index.record_classes[records]], index.record_tasks[records]
    order = classes.argsort(stable=True)
    classes, tasks = classes[order], tasks[order]
    which = torch.arange(len(classes)) - torch.searchsorted(classes, classes)
    found = []
    for number in range(int(which.max()) + 1 if len(which) else 0):
        own = torch.full((len(index.classes),), len(index.tasks))
        own[classes[which == number]] = tasks[which == number]
        found.append(own)
    return found


def _views(memory: Memory, index: Index, places: Tensor) -> tuple[list[View], Checked]:
    """The views of all classes, the one that weighs most first; those not worth a pass are left out. And what they
    say of images that were left out.

    places: where the classes of the index stand. Records of one class stand by the names of their tasks.
    """
    labels = places[index.record_classes]
    names = torch.tensor(sorted(range(len(memory)), key=memory.task_names.__getitem__)).argsort()
    order = (labels * len(memory) + names[index.record_tasks]).argsort()
    prompts: dict[int | None, str] = {None: "plain"}
    if memory.shared_prompt is not None:
        prompts[len(memory)] = "domain"
    coarse = {
        prompt: Coarse(_known(memory, part).take(order), labels[order]) for prompt, part in prompts.items()
    }
    space = coarse[None].space
    rows = space.left_out  # the same images in every view
    left_out = LeftOut.of(list(coarse.values()))
    columns = {prompt: column for column, prompt in enumerate(coarse)}
    tasks = index.record_tasks[order][space.parts[rows]]
    # Images that were learned because they had been taken for something else are harder than images are.
    usual = torch.tensor([task.corrected_from is None for task in memory.tasks])[tasks]
    usual = usual if usual.any() else torch.ones_like(usual)
    # To images that the prompt for all classes was trained with, it does more justice than to others.
    fair = usual & ~_trained_domain(memory)[tasks]
    fair = fair if int(fair.sum()) >= ENOUGH else usual

    @functools.cache  # of one view alone the weights are asked for three times
    def weights(*prompts: int | None) -> list[float]:
        return left_out.weights([columns[p] for p in prompts], fair)

    both = dict(zip(coarse, weights(*coarse), strict=True))
    worth = [p for p in coarse if both[p] >= WORTH * sum(both.values())]
    kept = sorted(worth, key=lambda p: -both[p])
    together = dict(zip(kept, weights(*kept), strict=True))

    def familiar(prompt: int | None) -> Tensor:
        similarity = left_out.similar[:, columns[prompt]]
        return similarity[usual if prompt is None else fair]

    views = [View(p, coarse[p], together[p], weights(p)[0], familiar(p)) for p in kept]
    return views, _checked(views, left_out, [columns[p] for p in kept], fair)


def _checked(views: list[View], left_out: LeftOut, kinds: list[int], images: Tensor) -> Checked:
    """kinds: places of the views in what is left out; images: bool [m], which of it count."""
    evidence, own = (x[images][..., kinds] for x in (left_out.evidence, left_out.own))
    many = left_out.many[images]

    def answers(weights: list[float]) -> tuple[Tensor, Tensor]:
        numbers = torch.tensor(weights, dtype=torch.double)
        logits, mine = evidence @ numbers, own @ numbers
        best = logits.amax(dim=1)
        return (best - (logits + many).logsumexp(dim=1)).exp(), mine >= best - 1e-9  # but for rounding

    confidence, right = answers([views[0].alone, *(0.0 for _ in views[1:])])
    if len(views) > 1:
        sure = confidence >= SURE
        then, later = answers([view.weight for view in views])
        confidence, right = confidence.where(sure, then), right.where(sure, later)
    return Checked(confidence, right)


def _trained_domain(memory: Memory) -> Tensor:
    """bool [T]: the task, if it is there, whose own prompt is the one for all classes."""
    domain = memory.shared_prompt
    same = [
        domain is not None and t.prompt is not None and torch.equal(t.prompt, domain) for t in memory.tasks
    ]
    return torch.tensor(same)


def _known(memory: Memory, part: str) -> SummaryTable:
    summaries = memory.table.summaries(part)
    assert summaries is not None
    return summaries


def _unit(embeddings: Tensor) -> Tensor:
    return F.normalize(embeddings.double(), dim=1)


def _number(prompt: int | None, count: int) -> Tensor | None:
    return None if prompt is None else torch.full((count,), prompt)


def _unsure(posterior: Tensor) -> Tensor:
    """Rows [m] whose likeliest class is not likely enough."""
    return (posterior.amax(dim=1) < SURE).nonzero()[:, 0]
