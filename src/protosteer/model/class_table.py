"""Many classes as a few long tensors: what a file of a hundred thousand classes holds, and what reads it.

A record per class is what people and most of the code work with, but a hundred thousand of them are a million
small tensors, which take a minute to make and to check. So records of a stack are made when one of them is
looked at, task by task, and whoever needs all classes at once (`inference`, `evidence`) takes the long tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from protosteer.evidence.prototype_summary import (
    EXACT_PROTOTYPES,
    ClassSummary,
    half_if_lossless,
    pack_prototypes,
    unpack_prototypes,
)
from protosteer.model.records import ClassRecord, LazyClasses, TaskRecord, packed_centroids
from protosteer.paper.prototypes import Centroids

SKETCHES = ("plain", "domain")


@dataclass(frozen=True, eq=False)
class Stack:
    """C records of classes, one after the other, as a file has them.

    tensors: "values.means" and "values.deviations" [V, D], "values.counts" [V]; "plain.points" [P, D],
    "plain.steps" [P] where points have eight bits, "plain.counts" [P], "plain.deviations" [C, D], and the same of
    "domain"; "keys" [K, D] where there are no sketches; "held_out" [H]; "seen" [S]. starts: [C + 1], rows of each
    class in "values", "plain", "domain", "keys", "held_out" and "seen", whichever there are.
    """

    names: Sequence[str]
    tensors: Mapping[str, Tensor]
    starts: Mapping[str, Tensor]

    @classmethod
    def of(cls, tasks: Sequence[TaskRecord]) -> Stack | None:
        """All classes of these tasks; None where they are not alike, and have to be kept one by one."""
        names = [name for task in tasks for name in task.class_names]
        lengths = {"values": value_lengths_of(tasks), "held_out": held_out_lengths_of(tasks)}
        lengths["seen"] = seen_lengths_of(tasks)
        tensors = {f"values.{field}": t for field, t in packed_centroids(centroids_of(tasks)).items()}
        tensors |= {"held_out": held_out_of(tasks), "seen": seen_of(tasks)}
        for part in SKETCHES:
            bulk = sketches_of(tasks, part)
            if bulk is not None:
                tensors |= {f"{part}.{field}": t for field, t in bulk.packed().items()}
                lengths[part] = bulk.lengths
        if "plain" not in lengths:
            if any(record.plain is not None for task in tasks for record in task.classes):
                return None
            tensors["keys"], lengths["keys"] = keys_of(tasks), key_lengths_of(tasks)
        if "domain" not in lengths and any(task.shared_prompt is not None for task in tasks):
            return None
        zero = torch.zeros(1, dtype=torch.int64)
        starts = {part: torch.cat([zero, one.cumsum(0)]) for part, one in lengths.items()}
        return cls(names, tensors, starts)

    def rows(self, part: str, first: int, last: int) -> slice:
        starts = self.starts[part]
        return slice(int(starts[first]), int(starts[last]))

    def lengths(self, part: str, first: int, last: int) -> Tensor:
        return self.starts[part][first : last + 1].diff()

    def singles(self, part: str) -> Tensor:
        """[C]: how many points of each class are images as they are."""
        return _singles(self.tensors[f"{part}.counts"], self.starts[part].diff())

    def sketches(self, part: str, first: int, last: int) -> Bulk | None:
        """Of classes first to last - 1; None where they have none."""
        if part not in self.starts:
            return None
        rows, tensors = self.rows(part, first, last), self.tensors
        points, counts = (tensors[f"{part}.{name}"][rows] for name in ("points", "counts"))
        steps, deviations = tensors.get(f"{part}.steps"), tensors[f"{part}.deviations"][first:last]
        lengths = self.lengths(part, first, last)
        return Bulk(points, counts, deviations, lengths, None if steps is None else steps[rows])

    def centroids(self, first: int, last: int) -> Centroids:
        rows = self.rows("values", first, last)
        means, deviations = (self.tensors[f"values.{part}"][rows].float() for part in ("means", "deviations"))
        return Centroids(means, deviations, self.tensors["values.counts"][rows])


@dataclass(frozen=True)
class Bulk:
    """R sketches, one after the other, in as few bits as a file has them in: a million classes of five points and
    width 192 are four times as much in single precision, 4 GB.
    """

    points: Tensor  # [P, D]: see `decoded`
    counts: Tensor  # [P]
    deviations: Tensor  # [R, D]
    lengths: Tensor  # [R]: points of each
    steps: Tensor | None = None  # [P]: where points have eight bits

    @classmethod
    def of(cls, sketches: Sequence[ClassSummary]) -> Bulk:
        return cls(
            torch.cat([s.points for s in sketches]),
            torch.cat([s.counts for s in sketches]),
            torch.stack([s.deviations for s in sketches]),
            torch.tensor([len(s.points) for s in sketches]),
        )

    @classmethod
    def joined(cls, bulks: Sequence[Bulk]) -> Bulk:
        """One after the other; in eight bits, if one of them is and the others can be."""
        if any(bulk.steps is not None for bulk in bulks):
            bulks = [bulk._coded() for bulk in bulks]
        if any(bulk.steps is None for bulk in bulks):
            bulks = [dataclasses.replace(bulk, points=bulk.decoded(), steps=None) for bulk in bulks]
        steps = [bulk.steps for bulk in bulks if bulk.steps is not None]
        names = ("points", "counts", "deviations", "lengths")
        columns = {name: torch.cat([getattr(bulk, name) for bulk in bulks]) for name in names}
        return cls(**columns, steps=torch.cat(steps) if steps else None)

    def _coded(self) -> Bulk:
        """In eight bits, if they hold the points."""
        if self.steps is not None:
            return self
        return dataclasses.replace(self, **pack_prototypes(self.decoded()))

    def decoded(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """float32 [r, D]: points as they are."""
        return unpack_prototypes(self.points[rows], None if self.steps is None else self.steps[rows])

    @property
    def singles(self) -> Tensor:
        """[R]: how many points of each are images as they are."""
        return _singles(self.counts, self.lengths)

    @property
    def owners(self) -> Tensor:
        """[P]: sketches as numbers."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

    def ordered(self, order: Tensor) -> Bulk:
        """The sketches in another order [R]."""
        if torch.equal(order, torch.arange(len(order))):
            return self
        starts, lengths = (self.lengths.cumsum(0) - self.lengths)[order], self.lengths[order]
        within = torch.arange(len(self.points)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        rows = starts.repeat_interleave(lengths) + within
        steps = None if self.steps is None else self.steps[rows]
        return Bulk(self.points[rows], self.counts[rows], self.deviations[order], lengths, steps)

    def packed(self) -> dict[str, Tensor]:
        coded = self._coded()
        steps = {} if coded.steps is None else {"steps": coded.steps}
        return {
            "points": coded.points,
            **steps,
            "counts": self.counts,
            "deviations": half_if_lossless(self.deviations),
        }

    def sketches(self) -> list[ClassSummary]:
        parts = (x.split(self.lengths.tolist()) for x in (self.decoded(), self.counts))
        return [ClassSummary(*one) for one in zip(*parts, self.deviations.float().unbind(), strict=True)]


def _singles(counts: Tensor, lengths: Tensor) -> Tensor:
    """See `ClassSummary.num_exact`."""
    ends = lengths.cumsum(0)
    sums = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    images = sums[ends] - sums[ends - lengths]
    # Before the first point that stands for several images; behind the last point there is nobody's.
    several = torch.cat([(counts != 1).nonzero()[:, 0], ends[-1:]])
    leading = several[torch.searchsorted(several, ends - lengths).clamp(max=len(several) - 1)]
    leading = torch.minimum(leading - (ends - lengths), lengths)
    return torch.where(images == lengths, lengths, leading.clamp(max=EXACT_PROTOTYPES))


class Slices(LazyClasses):
    """Classes first to last - 1 of a stack."""

    def __init__(self, stack: Stack, first: int, last: int):
        super().__init__(stack.names[first:last])
        self.stack, self.first, self.last = stack, first, last

    def make(self) -> tuple[ClassRecord, ...]:
        stack, span = self.stack, (self.first, self.last)
        plain, domain = (stack.sketches(part, *span) for part in SKETCHES)
        none = [None] * len(self.names)
        sketches = [bulk.sketches() if bulk else none for bulk in (plain, domain)]
        keys = self.keys().split((plain.lengths if plain else stack.lengths("keys", *span)).tolist())
        held_out = self.held_out().split(stack.lengths("held_out", *span).tolist())
        seen = self.seen().split(stack.lengths("seen", *span).tolist())
        groups = vars(stack.centroids(*span)).values()
        lengths = stack.lengths("values", *span).tolist()
        values = [Centroids(*one) for one in zip(*(x.split(lengths) for x in groups), strict=True)]
        columns = zip(self.names, keys, values, held_out, *sketches, seen, strict=True)
        return tuple(
            ClassRecord(
                name, own.points if own else k, v, h if len(h) else None, own, other, s if len(s) else None
            )
            for name, k, v, h, own, other, s in columns
        )

    @property
    def evidence(self) -> bool:
        return "plain" in self.stack.starts

    def keys(self) -> Tensor:
        plain = self.stack.sketches("plain", self.first, self.last)
        if plain:
            return plain.decoded()
        return self.stack.tensors["keys"][self.stack.rows("keys", self.first, self.last)]

    def held_out(self) -> Tensor:
        return self.stack.tensors["held_out"][self.stack.rows("held_out", self.first, self.last)]

    def seen(self) -> Tensor:
        return self.stack.tensors["seen"][self.stack.rows("seen", self.first, self.last)]


def sketches_of(tasks: Sequence[TaskRecord], part: str) -> Bulk | None:
    """The sketches of all classes, in their order; None where one has none."""
    bulks = [_task_sketches(task.classes, part) for task in tasks]
    if not bulks or any(bulk is None for bulk in bulks):
        return None
    return Bulk.joined(cast(list[Bulk], bulks))


def _task_sketches(classes: Sequence[ClassRecord], part: str) -> Bulk | None:
    if isinstance(classes, Slices) and not classes.made:
        return classes.stack.sketches(part, classes.first, classes.last)
    found: list[ClassSummary | None] = [
        record.plain if part == "plain" else record.shared for record in classes
    ]
    if any(sketch is None for sketch in found):
        return None
    return Bulk.of(cast(list[ClassSummary], found))


def centroids_of(tasks: Sequence[TaskRecord]) -> Centroids:
    """The value centroids of all classes, in their order."""
    found = [_task_centroids(task.classes) for task in tasks]
    return Centroids(*(torch.cat(column) for column in zip(*(vars(c).values() for c in found), strict=True)))


def _task_centroids(classes: Sequence[ClassRecord]) -> Centroids:
    if isinstance(classes, Slices) and not classes.made:
        return classes.stack.centroids(classes.first, classes.last)
    columns = zip(*(vars(record.values).values() for record in classes), strict=True)
    return Centroids(*(torch.cat(column) for column in columns))


def keys_of(tasks: Sequence[TaskRecord]) -> Tensor:
    """[K, D]: the keys of all classes, in their order."""
    return _rows(tasks, Slices.keys, lambda record: record.keys)


def held_out_of(tasks: Sequence[TaskRecord]) -> Tensor:
    """[H]: the held-out similarities of all classes, in their order."""
    return _rows(tasks, Slices.held_out, _held_out)


def seen_of(tasks: Sequence[TaskRecord]) -> Tensor:
    """[S]: the digests of the files that all classes were learned from, in their order."""
    return _rows(tasks, Slices.seen, _seen)


def key_lengths_of(tasks: Sequence[TaskRecord]) -> Tensor:
    """[C]: how many keys each class has."""
    return _lengths(tasks, ("plain", "keys"), lambda record: record.keys)


def value_lengths_of(tasks: Sequence[TaskRecord]) -> Tensor:
    """[C]: how many value centroids each class has."""
    return _lengths(tasks, ("values",), lambda record: record.values.means)


def held_out_lengths_of(tasks: Sequence[TaskRecord]) -> Tensor:
    return _lengths(tasks, ("held_out",), _held_out)


def seen_lengths_of(tasks: Sequence[TaskRecord]) -> Tensor:
    return _lengths(tasks, ("seen",), _seen)


def _held_out(record: ClassRecord) -> Tensor:
    return torch.empty(0) if record.heldout_similarities is None else record.heldout_similarities


def _seen(record: ClassRecord) -> Tensor:
    return torch.empty(0, dtype=torch.int64) if record.file_digests is None else record.file_digests


def _rows(
    tasks: Sequence[TaskRecord], sliced: Callable[[Slices], Tensor], single: Callable[[ClassRecord], Tensor]
) -> Tensor:
    rows: list[Tensor] = []
    for classes in (task.classes for task in tasks):
        lazy = isinstance(classes, Slices) and not classes.made
        rows.extend([sliced(cast(Slices, classes))] if lazy else map(single, classes))
    return torch.cat(rows)


def _lengths(
    tasks: Sequence[TaskRecord], parts: tuple[str, ...], single: Callable[[ClassRecord], Tensor]
) -> Tensor:
    """parts: what a stack may call these rows; the first that it has counts."""
    found: list[Tensor] = []
    for classes in (task.classes for task in tasks):
        if isinstance(classes, Slices) and not classes.made:
            part = next(part for part in parts if part in classes.stack.starts)
            found.append(classes.stack.lengths(part, classes.first, classes.last))
        else:
            found.append(torch.tensor([len(single(record)) for record in classes]))
    return torch.cat(found)
