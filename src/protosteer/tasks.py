"""Learn one task, or one class of a few images, as a record of a model."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from protosteer.errors import ProtosteerWarning
from protosteer.evidence.prototype_summary import ClassSummary, round_to_half, summarise_class
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord, TaskMetadata, TaskRecord
from protosteer.paper import diagnostics
from protosteer.paper.encoder import Encoder
from protosteer.paper.inference import Index, nearest_task
from protosteer.paper.prototypes import Centroids, centroids
from protosteer.paper.task import Embedder, TrainingImages, task_seed
from protosteer.paper.trainer import Callback, Trained, train_prompt
from protosteer.settings import Settings

# A class of few images gets one centroid per so many of them.
_IMAGES_PER_CENTROID = 5


def learn_task(
    name: str,
    classes: Sequence[str],
    images: TrainingImages,
    labels: Tensor,
    encoder: Encoder,
    memory: Memory,
    settings: Settings,
    callbacks: Sequence[Callback] = (),
    domain: Tensor | None = None,
    on_usable: Callable[[TaskRecord], None] | None = None,
) -> TaskRecord:
    """The record of a task. labels: [n], places in `classes`. memory: what has been learned before.

    domain: a prompt for all classes. Without one, a first task that is read as evidence makes its own prompt
    that. on_usable: is given the record as it is before anything is trained.
    """
    earlier = Memory() if settings.independent else memory
    seed = task_seed(settings.seed, classes)
    trains = trains_prompt(settings, classes, memory, domain)
    seen = _Seen(images.embed(None), None if domain is None else images.embed(domain))
    _warn(diagnostics.near_chance(seen.plain, labels))

    def record(trained: Trained | None, values: Tensor, domain: Tensor | None) -> TaskRecord:
        count = settings.centroids if trained or settings.rule == "paper" else 1
        records = tuple(
            _class_record(label, seen.of(labels == i), values[labels == i], count, settings, seed)
            for i, label in enumerate(classes)
        )
        prompt, about = trained.prompt if trained else None, _about(settings, seen.plain, values, trained)
        return TaskRecord(name, records, prompt, settings.independent, about, shared_prompt=domain)

    if not trains:
        return record(None, seen.plain, domain)
    if on_usable:
        usable = record(None, seen.plain, domain)
        on_usable(dataclasses.replace(usable, metadata=dataclasses.replace(usable.metadata, unfinished=True)))
    start = earlier.tasks[-1].prompt if len(earlier) else None
    prototypes = earlier.prototypes(settings.noise, without=classes)  # its images are no strangers to a class
    trained = train_prompt(encoder, images.views, labels, settings, start, prototypes, seed, callbacks)
    values = images.embed(trained.prompt)
    _warn(diagnostics.collapse(seen.plain, values, labels))
    if makes_domain(settings, memory, domain):
        seen, domain = _Seen(seen.plain, values), trained.prompt
    return record(trained, values, domain)


def trains_prompt(
    settings: Settings, classes: Sequence[str], memory: Memory, domain: Tensor | None = None
) -> bool:
    """Whether a task of these classes gets a prompt.

    One class with nothing to be told from gets none: training would draw all its images together. Images of
    classes that are all known already join the evidence for them, which needs none.
    """
    earlier = set() if settings.independent else set(memory.classes)
    alone = len(classes) == 1 and not earlier - set(classes)
    grown = settings.rule == "evidence" and earlier >= set(classes)
    served = settings.prompt_tasks == "first" and (domain is not None or len(memory) > 0)
    return settings.prompts and not alone and not grown and not served


def makes_domain(settings: Settings, memory: Memory, domain: Tensor | None) -> bool:
    """Whether the prompt of the task that is learned now will serve all classes that come later too."""
    return settings.rule == "evidence" and domain is None and not len(memory) and not settings.independent


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Embeddings of images without a prompt, and under the one for all classes."""

    plain: Tensor
    domain: Tensor | None

    def of(self, rows: Tensor) -> _Seen:
        return _Seen(self.plain[rows], None if self.domain is None else self.domain[rows])


def learn_class(name: str, images: Embedder, memory: Memory, settings: Settings) -> TaskRecord:
    """The record of one class of a handful of images, a task of its own: prototypes alone, nothing is
    trained.

    By the paper's rule it gets a copy of the prompt of the task whose keys are nearest, and one centroid per
    five images, since fewer make none that is better than their common mean. Evidence needs no prompt.
    """
    evidence = settings.rule == "evidence"
    domain = memory.shared_prompt if evidence else None
    seen = _Seen(images.embed(None), None if domain is None else images.embed(domain))
    nearest = None
    if len(memory) and not evidence:
        nearest = memory.tasks[nearest_task(Index.build(memory), seen.plain)]
    prompt = nearest.prompt if nearest else None
    values = seen.plain if prompt is None else images.embed(prompt)
    count = 1 if evidence else min(settings.centroids, max(1, len(values) // _IMAGES_PER_CENTROID))
    seed = task_seed(settings.seed, [name])
    similarities = None if evidence else left_out_similarity(values)
    record = _class_record(name, seen, values, count, settings, seed, similarities)
    # What a copy of a prompt was trained with is what the prompt was trained with.
    independent = nearest is None or prompt is None or nearest.independent
    about = TaskMetadata(settings.to_dict(), len(values))
    return TaskRecord(
        memory.free_name(name), (record,), prompt, independent, about, few_shot=True, shared_prompt=domain
    )


def counted_as(record: TaskRecord, images: int) -> TaskRecord:
    """The same few images as if there were so many of each; by evidence alone."""

    def more(sketch: ClassSummary | None) -> ClassSummary | None:
        return sketch and dataclasses.replace(sketch, counts=images * sketch.counts)

    classes = tuple(
        dataclasses.replace(c, plain=more(c.plain), shared=more(c.shared)) for c in record.classes
    )
    return dataclasses.replace(record, classes=classes)


def _class_record(
    name: str,
    seen: _Seen,
    values: Tensor,
    count: int,
    settings: Settings,
    seed: int,
    similarities: Tensor | None = None,
) -> ClassRecord:
    def cluster(embeddings: Tensor) -> Centroids:
        return centroids(embeddings, count, settings.clustering, settings.assign_labels, seed % 2**32)

    if settings.rule == "paper":
        return ClassRecord(name, cluster(seen.plain).means, cluster(values), similarities)
    plain, groups = summarise_class(seen.plain, seed), cluster(values)
    domain = None if seen.domain is None else summarise_class(seen.domain, seed)
    groups = Centroids(round_to_half(groups.means), round_to_half(groups.deviations), groups.counts)
    return ClassRecord(name, plain.points, groups, similarities, plain, domain)


def _about(settings: Settings, keys: Tensor, values: Tensor, trained: Trained | None) -> TaskMetadata:
    return TaskMetadata(
        settings=settings.to_dict(),
        images=len(keys),
        key_spread=round(diagnostics.spread(keys), 6),
        value_spread=round(diagnostics.spread(values), 6),
        loss=trained.epochs[-1].loss if trained else None,
        accuracy=trained.epochs[-1].accuracy if trained else None,
        trained_parameters=trained.parameters if trained else None,
    )


def _warn(message: str | None) -> None:
    if message:
        warnings.warn(message, ProtosteerWarning, stacklevel=2)


def left_out_similarity(embeddings: Tensor) -> Tensor | None:
    """[n]: cosine of each embedding [n, D] of a class to the mean of the others; None of one alone."""
    if len(embeddings) < 2:
        return None
    return F.cosine_similarity(embeddings, embeddings.sum(dim=0) - embeddings, dim=1)
