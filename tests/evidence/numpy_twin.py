"""The default classifier a second time, from its description in docs/explanation/default-classifier.md, in NumPy and SciPy alone.

It is slow and plain: one image at a time, and an image is left out by computing everything again without it. It takes
what a model file holds, and a function that embeds images; nothing of it comes from the classifier under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special
from torch import Tensor

from protosteer.evidence.prototype_summary import ClassSummary
from protosteer.evidence.summary_table import SummaryTable
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Prototypes:
    """One class of one task under one prompt, in S layers, the last one first."""

    points: Array  # [k, S, D]
    counts: Array  # [k]: images behind each point
    deviations: Array  # [D]: root mean square between images and their points

    @property
    def kept_images(self) -> int:
        """How many points are images: all of a small class, else at most ten that come first."""
        if len(self.points) == self.counts.sum():
            return len(self.points)
        groups = np.flatnonzero(self.counts != 1)
        return min(10, int(groups[0]))


@dataclass(frozen=True)
class Record:
    name: str
    plain: Prototypes
    shared: Prototypes | None  # under the shared prompt
    values: Array  # [c, D]: centroids under the prompt of the task


@dataclass(frozen=True)
class Task:
    name: str
    records: Sequence[Record]
    prompt: Array | None
    correction: bool = False


@dataclass(frozen=True)
class Answers:
    """What is predicted for B images; columns are classes in the order in which they were learned."""

    scores: Array  # [B, C]
    similarities: Array  # [B, C]
    passes: list[int]
    tried: list[list[str]]  # tasks whose prompts were tried

    @property
    def probabilities(self) -> Array:
        return np.asarray(special.softmax(self.scores, axis=1))

    @property
    def energy(self) -> Array:
        return np.asarray(-special.logsumexp(self.scores, axis=1))


class FeatureSpace:
    """All prototypes of all classes in one layer: whitened cosine, kernel ridge, plain cosine."""

    def __init__(self, prototypes: Sequence[Prototypes], labels: Sequence[int], layer: int = 0, spread: bool = True):
        self.points = np.concatenate([one.points[:, layer] for one in prototypes])
        self.counts = np.concatenate([one.counts for one in prototypes])
        lengths = [len(one.points) for one in prototypes]
        self.starts = np.cumsum([0, *lengths])  # where the points of each record begin
        self.labels = np.repeat(labels, lengths)  # [P]
        self.classes = max(labels) + 1
        self.within = sum(one.counts.sum() * one.deviations**2 for one in prototypes) * spread  # [D]
        everything = np.ones(len(self.points), dtype=bool)
        self.means = self._means(everything)
        self.centre = self.means.mean(axis=0) if self.classes > 1 else np.zeros(self.points.shape[1])
        self.dof = max(self.counts.sum() - self.classes, 1.0)
        covariance = self._scatter(everything, self.means) / self.dof
        self.variance = np.trace(covariance) / len(covariance)
        self.shrinkage = self._shrinkage(covariance)

    def _means(self, keep: NDArray[np.bool_]) -> Array:
        def mean(label: int) -> Array:
            rows = keep & (self.labels == label)
            return np.average(self.points[rows], axis=0, weights=self.counts[rows])

        return np.stack([mean(label) for label in range(self.classes)])

    def _scatter(self, keep: NDArray[np.bool_], means: Array) -> Array:
        residuals = (self.points - means[self.labels])[keep]
        return np.asarray(residuals.T @ np.diag(self.counts[keep]) @ residuals + np.diag(self.within))

    def _shrinkage(self, covariance: Array) -> float:
        """Oracle approximating shrinkage (Chen et al. 2010), in the form that scikit-learn has."""
        squares, trace = (covariance**2).sum(), np.trace(covariance)
        excess = squares - trace**2 / len(covariance)
        if self.counts.sum() - self.classes < 1 or excess <= 0:
            return 1.0
        return float(min(1.0, (squares + trace**2) / ((self.dof + 1) * excess)))

    def _whitening(self, keep: NDArray[np.bool_], means: Array) -> Array:
        """S^(-1/2): shrinkage, its target and the degrees of freedom are those of all images."""
        if self.variance <= 1e-12:
            return np.eye(len(self.centre))
        covariance = self._scatter(keep, means) / self.dof
        shrunk = (1 - self.shrinkage) * covariance + self.shrinkage * self.variance * np.eye(len(covariance))
        values, vectors = np.linalg.eigh(shrunk)
        return np.asarray(vectors @ np.diag(values**-0.5) @ vectors.T)

    def whitened(self, image: Array, keep: NDArray[np.bool_]) -> Array:
        """[C]: whitened cosines of one embedding [D]. keep: points [P] to learn from."""
        means = self._means(keep)
        whitening = self._whitening(keep, means)
        return cosines((image - self.centre) @ whitening, (means - self.centre) @ whitening)

    def plain(self, image: Array, keep: NDArray[np.bool_]) -> Array:
        """[C]: cosines to the class means."""
        return cosines(image, self._means(keep))


class Layers:
    """All prototypes under one prompt in S layers: a whitened cosine each, one kernel ridge over all."""

    def __init__(self, prototypes: Sequence[Prototypes], labels: Sequence[int]):
        self.count = prototypes[0].points.shape[1]
        several = self.count > 1
        self.layers = [FeatureSpace(prototypes, labels, layer, spread=not several) for layer in range(self.count)]
        self.first = self.layers[0]
        self.classes, self.strength, self.floor = self.first.classes, *((0.05, 0.02) if several else (0.03, 0.05))
        self.centres = np.stack([layer.centre * several for layer in self.layers])  # [S, D]
        self.points = np.stack([layer.points for layer in self.layers], axis=1)  # [P, S, D]
        self.shares = np.array([1.0, 0.3])  # of several layers: found by `fit_shares`
        if several:
            weights = np.array([0.4, *[0.16] * (self.count - 1), 0.3])
            self.shares = weights / weights.sum()

    def parts(self, image: Array, keep: NDArray[np.bool_] | None = None) -> tuple[Array, Array]:
        """[C, S + 1] scores of one embedding [S, D], and [C] similarities. keep: points [P] to learn from."""
        keep = np.ones(len(self.points), dtype=bool) if keep is None else keep
        whitened = [layer.whitened(image[s], keep) for s, layer in enumerate(self.layers)]
        points, targets = self.points[keep], np.eye(self.classes)[self.first.labels[keep]]
        kernel = self._kernel(points, points) + self.strength * np.diag(1 / self.first.counts[keep])
        ridge = (self._kernel(image[None], points) @ np.linalg.solve(kernel, targets))[0]
        similarities = (whitened[0] + self.first.plain(image[0], keep)) / 2
        return np.stack([*whitened, np.log(np.maximum(ridge, self.floor))], axis=-1), similarities

    def _kernel(self, a: Array, b: Array) -> Array:
        """Arc-cosine kernel whose cosine is the mean over layers of the cosines about the centres."""
        pairs = [cosines(a[:, s] - self.centres[s], b[:, s] - self.centres[s]) for s in range(self.count)]
        return arc_cosine(np.mean(pairs, axis=0))

    def scores(self, image: Array) -> tuple[Array, Array]:
        """[C] scores and [C] similarities of one embedding [S, D]."""
        parts, similarities = self.parts(image)
        return parts @ self.shares, similarities

    def without(self, record: int, place: int) -> Array:
        """[C, S + 1]: scores of the image that is this point of this record, had it not been learned."""
        row = self.first.starts[record] + place
        return self.parts(self.points[row], np.arange(len(self.points)) != row)[0]

    def fit_shares(self, left_out: Array, truth: Sequence[int]) -> None:
        """Minimise the squared Hellinger distance of left-out scores [m, C, S + 1], and a prior worth 20 images."""
        if self.count == 1 or not len(truth):
            return
        prior, true_scores = self.shares, left_out[np.arange(len(truth)), truth]  # [m, S + 1]

        def loss(logs: Array) -> tuple[float, Array]:
            weights = np.exp(logs)
            probabilities = special.softmax(left_out @ weights, axis=1)
            root = np.sqrt(probabilities[np.arange(len(truth)), truth])
            slopes = true_scores - np.einsum("mc,mck->mk", probabilities, left_out)
            value = 2 * (1 - root).sum() - 20 * prior @ (logs - special.logsumexp(logs))
            gradient = -(root @ slopes) * weights - 20 * (prior - special.softmax(logs))
            return float(value) / len(truth), gradient / len(truth)

        options = {"ftol": 1e-16, "gtol": 1e-12, "maxiter": 10_000}
        found = optimize.minimize(loss, np.log(10 * prior), jac=True, method="L-BFGS-B", options=options)
        self.shares = special.softmax(found.x)


class Twin:
    """The classifier."""

    def __init__(self, tasks: Sequence[Task], shared_prompt: Array | None, worth: float = 0.2, enough: int = 50):
        """worth: share of the weight that a space needs. enough: images not used to train the shared prompt."""
        self.tasks, self.shared_prompt = tasks, shared_prompt
        self.classes = list(dict.fromkeys(record.name for task in tasks for record in task.records))
        # Classes by name, and records of a class by the name of their task: rounding must not depend on their order.
        pairs = sorted(((r, t) for t in tasks for r in t.records), key=lambda pair: (pair[0].name, pair[1].name))
        labels = [self.classes.index(record.name) for record, _ in pairs]
        self.spaces = {"plain": Layers([record.plain for record, _ in pairs], labels)}
        if shared_prompt is not None:
            shared = [record.shared for record, _ in pairs if record.shared is not None]
            self.spaces["shared"] = Layers(shared, labels)
        images = list(self._kept_images([record.plain for record, _ in pairs], labels))
        usual = [image for image in images if not pairs[image[0]][1].correction] or images
        unseen = [image for image in usual if not self._made_shared_prompt(pairs[image[0]][1])]
        self.images = unseen if len(unseen) >= enough else usual
        self.truth = [labels[record] for record, _ in self.images]
        self.left_out = dict[str, Array]()
        for name, space in self.spaces.items():
            parts = np.array([space.without(*image) for image in self.images])
            parts = parts.reshape(-1, len(self.classes), len(space.shares))
            space.fit_shares(parts, self.truth)
            self.left_out[name] = parts @ space.shares
        both = self._weights(list(self.spaces))
        self.order = [name for name in self.spaces if both[name] >= worth * sum(both.values())]
        self.order.sort(key=lambda name: -both[name])
        self.single_pass = any(space.count > 1 for space in self.spaces.values())
        if self.single_pass:
            self.order = [max(self.spaces, key=self._likelihood)]
        self.alone = self._weights(self.order[:1])[self.order[0]]
        self.weights = self._weights(self.order)

    def _kept_images(self, prototypes: Sequence[Prototypes], labels: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Records and places of points that are images, of classes that have other images."""
        first = self.spaces["plain"].first
        sizes = np.bincount(first.labels, weights=first.counts)
        for record, one in enumerate(prototypes):
            if sizes[labels[record]] > 1:
                yield from ((record, place) for place in range(one.kept_images))

    def _made_shared_prompt(self, task: Task) -> bool:
        return (
            self.shared_prompt is not None
            and task.prompt is not None
            and np.array_equal(task.prompt, self.shared_prompt)
        )

    def _weights(self, names: Sequence[str]) -> dict[str, float]:
        """Weights of spaces under which the true classes of the images left out are likeliest.

        One image more counts as one for which all classes are as likely.
        """
        count = len(self.images)
        if not count:
            return {name: 10 / len(names) for name in names}
        scores = np.stack([self.left_out[name] for name in names], axis=-1)  # [m, C, k]
        smoothing = 1 / (count + 1)
        targets = np.full((count, len(self.classes)), smoothing / len(self.classes))
        targets[np.arange(count), self.truth] += 1 - smoothing

        def loss(weights: Array) -> tuple[float, Array]:
            logits = scores @ weights
            error = special.softmax(logits, axis=1) - targets
            value = (special.logsumexp(logits, axis=1) - (targets * logits).sum(axis=1)).mean()
            return float(value), np.einsum("mc,mck->k", error, scores) / count

        start, bounds = np.full(len(names), 10 / len(names)), [(0, None)] * len(names)
        options = {"ftol": 1e-16, "gtol": 1e-12, "maxiter": 10_000}
        found = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        return dict(zip(names, found.x.tolist(), strict=True))

    def _likelihood(self, name: str) -> float:
        """Mean log probability of the true classes of the images left out, by one pass alone."""
        if not self.images:
            return 0.0
        logits = self._weights([name])[name] * self.left_out[name]
        return float(special.log_softmax(logits, axis=1)[np.arange(len(self.truth)), self.truth].mean())

    def checked(self) -> tuple[list[float], list[int]]:
        """Of each image left out: the greatest probability without task prompts, and the class that has it."""
        confidence, top = [], []
        for i in range(len(self.truth)):
            logits = self.alone * self.left_out[self.order[0]][i]
            if special.softmax(logits).max() < 0.8 and len(self.order) > 1:
                logits = sum(self.weights[name] * self.left_out[name][i] for name in self.order)
            confidence.append(float(special.softmax(logits).max()))
            top.append(int(logits.argmax()))
        return confidence, top

    def predict(self, embed: Callable[[Array | None], Array]) -> Answers:
        """embed: embeddings [B, S * D] of all images under a prompt, or without one; D would do for one layer."""
        prompts = {"plain": None, "shared": self.shared_prompt}
        seen = {name: embed(prompts[name]) for name in self.order}
        own = [embed(task.prompt) if task.prompt is not None else None for task in self.tasks]
        answers = [self._predict(i, seen, own) for i in range(len(seen[self.order[0]]))]
        logits, similarities, passes, tried = zip(*answers, strict=True)
        return Answers(np.stack(logits), np.stack(similarities), list(passes), list(tried))

    def _units(self, name: str, embedding: Array) -> Array:
        """[S, D]: an embedding as unit vectors in the layers of a pass; it may have more layers."""
        vectors = embedding.reshape(-1, self.spaces[name].points.shape[2])[: self.spaces[name].count]
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))

    def _predict(
        self, i: int, seen: dict[str, Array], own: Sequence[Array | None]
    ) -> tuple[Array, Array, int, list[str]]:
        """Scores, similarities, forward passes and tried tasks of image i."""
        first = self.order[0]
        scores, similarities = self.spaces[first].scores(self._units(first, seen[first][i]))
        logits, passes = self.alone * scores, 1
        if special.softmax(logits).max() < 0.8 and len(self.order) > 1:
            second = self.order[1]
            others, _ = self.spaces[second].scores(self._units(second, seen[second][i]))
            logits, passes = self.weights[first] * scores + self.weights[second] * others, 2
        posterior = special.softmax(logits)
        if posterior.max() >= 0.8:
            return logits, similarities, passes, []
        shares = {
            t: sum(posterior[self.classes.index(record.name)] for record in task.records)
            for t, task in enumerate(self.tasks)
            if task.prompt is not None and not (self.single_pass and self._made_shared_prompt(task))
        }
        likely = sorted((t for t in shares if shares[t] >= 0.1), key=lambda t: -shares[t])
        tried = sorted(likely[: 3 - len(self.order)])
        best: dict[str, float] = {}
        for t in tried:
            passes += not ("shared" in self.order and self._made_shared_prompt(self.tasks[t]))
            embeddings = own[t]
            assert embeddings is not None
            for record in self.tasks[t].records:
                similar = float(cosines(embeddings[i, : record.values.shape[1]], record.values).max())
                best[record.name] = max(similar, best.get(record.name, similar))
        if best:
            fine = np.array([best.get(name, max(best.values())) for name in self.classes])
            logits = logits + 0.5 * sum(self.weights.values()) * fine
        return logits, similarities, passes, [self.tasks[t].name for t in tried]


def cosines(a: Array, b: Array) -> Array:
    """Cosines between vectors [D] or [A, D] and vectors [B, D]; 0 where one of the two has no length."""
    lengths = np.linalg.norm(a, axis=-1, keepdims=True) * np.linalg.norm(b, axis=-1)
    return np.where(lengths > 1e-12, a @ b.T / np.maximum(lengths, 1e-12), 0.0)


def arc_cosine(cosine: Array) -> Array:
    """The kernel of Cho and Saul (2009), from cosines."""
    angles = np.arccos(np.clip(cosine, -1, 1))
    return np.asarray((np.sin(angles) + (np.pi - angles) * np.cos(angles)) / np.pi)


def as_tasks(memory: Memory) -> tuple[list[Task], Array | None]:
    """The records of a memory and its shared prompt as plain arrays."""

    def array(tensor: Tensor) -> Array:
        return tensor.double().numpy()

    def prototypes(summary: ClassSummary, last_alone: bool) -> Prototypes:
        table = SummaryTable.of([summary])
        table = table.last_layer() if last_alone else table
        points = np.stack([array(table.decoded(space=layer)) for layer in range(table.spaces)], axis=1)
        return Prototypes(points, array(summary.counts), array(summary.deviations))

    def record(one: ClassRecord) -> Record:
        assert one.plain is not None
        shared = None if one.shared is None else prototypes(one.shared, narrow[1])
        return Record(one.name, prototypes(one.plain, narrow[0]), shared, array(one.values.means))

    # A layer that some classes lack is not read.
    parts = [
        [summary for one in memory.records if (summary := getattr(one, name)) is not None]
        for name in ("plain", "shared")
    ]
    narrow = [any(summary.layers is None for summary in part) for part in parts]

    tasks = [
        Task(
            task.name,
            [record(one) for one in task.classes],
            None if task.prompt is None else array(task.prompt),
            task.corrected_from is not None,
        )
        for task in memory.tasks
    ]
    return tasks, None if memory.shared_prompt is None else array(memory.shared_prompt)
