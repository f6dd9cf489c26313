"""Keep the number of corrections bounded: older ones become one record per class, with at most as many prototypes.

The latest `MIN_SINGLE` corrections stay tasks of their own, which `undo` can take back. When there are `MAX_SINGLE`, the
older ones join two tasks, one of corrected and one of confirmed images. There a class keeps the sum of its images, up to
the rounding of eight bits, but no more prototypes than any class summary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protosteer.evidence.prototype_summary import (
    EXACT_PROTOTYPES,
    MAX_PAIRED_PROTOTYPES,
    MAX_PROTOTYPES,
    ClassSummary,
    LayerCodes,
    decode_layers,
    encode_layers,
    quantize_int8,
    round_to_half,
)
from protosteer.evidence.summary_table import SummaryTable
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord, TaskMetadata, TaskRecord, equal_prompts
from protosteer.paper.prototypes import Centroids

MIN_SINGLE, MAX_SINGLE = 64, 128  # corrections that are tasks of their own
MAX_DIGESTS = 4096  # digests that a class keeps of the files of compacted corrections
NAMES = {False: "corrections", True: "confirmations"}  # by whether they are confirmed


def compact(memory: Memory) -> Memory:
    """Return a memory in which the older corrections are one record per class, once there are `MAX_SINGLE`."""
    corrections = memory.corrections
    if len(corrections) >= MAX_SINGLE:
        corrections = [task for task in corrections if _can_join(task, memory)]
    if len(corrections) < MAX_SINGLE:
        return memory
    batch = corrections[:-MIN_SINGLE]
    for confirmed, name in NAMES.items():
        peers = [task for task in memory.tasks if task.confirmed == confirmed]
        records = [task for task in peers if task.compacted and _can_join(task, memory)]
        additions = [task for task in batch if task.confirmed == confirmed]
        if additions:
            parts = {*records, *additions}
            base = Memory(task for task in memory.tasks if task not in parts)
            record = _join([*records, *additions], records[0].name if records else base.free_name(name), confirmed)
            memory = Memory([*base.tasks[: _place(base)], record, *base.tasks[_place(base) :]])
    return memory


def _can_join(task: TaskRecord, memory: Memory) -> bool:
    """Return whether a task has no prompt, only class summaries, and the same shared prompt as the first task."""
    shared, first_prompt = task.shared_prompt, memory.tasks[0].shared_prompt
    has_same_prompt = shared is first_prompt or equal_prompts(shared, first_prompt)
    return task.prompt is None and task.classes.summarised and has_same_prompt


def _place(memory: Memory) -> int:
    """Return the position of the first single correction, so that the last task stays the last correction."""
    return next((i for i, task in enumerate(memory.tasks) if task.corrected_from is not None), len(memory))


def _join(tasks: Sequence[TaskRecord], name: str, confirmed: bool) -> TaskRecord:
    by_class: dict[str, list[ClassRecord]] = {}
    for record in (record for task in tasks for record in task.classes):
        by_class.setdefault(record.name, []).append(record)
    classes, last_task = ClassTable.of(_join_records(parts) for parts in by_class.values()), tasks[-1]
    source, images = last_task.metadata, sum(task.images for task in tasks)
    metadata = TaskMetadata(source.settings, images, learned=source.learned, precision=source.precision)
    return TaskRecord(
        name=name,
        classes=classes,
        prompt=None,
        independent=True,
        metadata=metadata,
        few_shot=True,
        shared_prompt=last_task.shared_prompt,
        confirmed=confirmed,
        compacted=True,
    )


def _join_records(parts: Sequence[ClassRecord]) -> ClassRecord:
    """Join several records of one class, the oldest first."""
    plain_summaries = [part.plain for part in parts if part.plain is not None]
    shared_summaries = [part.shared for part in parts if part.shared is not None]
    summaries = join_summaries([plain_summaries, shared_summaries] if shared_summaries else [plain_summaries])
    counts = torch.cat([part.values.counts for part in parts])
    weights = (counts / counts.sum())[:, None]
    means, deviations = (
        torch.cat([getattr(part.values, field) for part in parts]) for field in ("means", "deviations")
    )
    centre = (weights * means).sum(dim=0, keepdim=True)
    spread = (weights * (deviations.square() + (means - centre).square())).sum(dim=0, keepdim=True).sqrt()
    values = Centroids(round_to_half(centre), round_to_half(spread), counts.sum()[None])
    digests = [part.file_digests for part in parts if part.file_digests is not None]
    return ClassRecord(
        parts[0].name,
        summaries[0].points,
        values,
        plain=summaries[0],
        shared=summaries[1] if shared_summaries else None,
        file_digests=torch.cat(digests)[-MAX_DIGESTS:] if digests else None,
    )


def join_summaries(kinds: Sequence[Sequence[ClassSummary]]) -> list[ClassSummary]:
    """Join summaries of one class, without and under the shared prompt, or the former alone, each to one.

    The images that are stored as they are stay the first ones; the same prototypes are merged in both kinds.
    """
    parts = [_Prototypes.of(summaries) for summaries in kinds]
    counts, limit = parts[0].counts, MAX_PROTOTYPES if len(parts) == 1 else MAX_PAIRED_PROTOTYPES
    if bool((counts == 1).all()) and len(counts) <= limit:
        exact, groups = torch.arange(len(counts)), list[Tensor]()
    else:
        exact = (counts == 1).nonzero()[:EXACT_PROTOTYPES, 0]
        group_rows = torch.ones(len(counts), dtype=torch.bool).index_fill_(0, exact, False).nonzero()[:, 0]
        vectors = torch.cat([part.vectors.flatten(1) for part in parts], dim=1)[group_rows]
        groups = [group_rows[rows] for rows in _merge(vectors, counts[group_rows], limit - EXACT_PROTOTYPES)]
        groups.sort(key=lambda rows: -int(counts[rows].sum()))  # so that none counts as a single image
    return [part.summary(exact, groups) for part in parts]


@dataclass(frozen=True)
class _Prototypes:
    """P prototypes of one class in S feature spaces."""

    vectors: Tensor  # float32 [P, S, D]
    counts: Tensor  # int64 [P]
    codes: LayerCodes | None  # of earlier layers, if all have them
    squares: Tensor  # [D]: sum of squared distances of images to their prototypes, in the last layer

    @classmethod
    def of(cls, summaries: Sequence[ClassSummary]) -> _Prototypes:
        table = SummaryTable.concatenate([SummaryTable.of([summary]) for summary in summaries])
        vectors = torch.stack([table.decoded(space=space) for space in range(table.spaces)], dim=1)
        images = torch.zeros(len(summaries)).index_add_(0, table.owners, table.counts.float())
        return cls(vectors, table.counts, table.layers, images @ table.deviations.float().square())

    def summary(self, exact: Tensor, groups: Sequence[Tensor]) -> ClassSummary:
        """Store the prototypes `exact` [e] as they are, and each group of others as its mean."""
        images, ones, squares = self.vectors[exact], self.counts[exact], self.squares
        codes = None if self.codes is None else self.codes[exact]
        if not groups:
            return ClassSummary(quantize_int8(images[:, 0]), ones, round_to_half((squares / len(ones)).sqrt()), codes)
        weights = [(self.counts[rows] / self.counts[rows].sum())[:, None, None] for rows in groups]
        means = torch.stack([(w * self.vectors[rows]).sum(dim=0) for w, rows in zip(weights, groups, strict=True)])
        for mean, rows in zip(means, groups, strict=True):
            squares = squares + self.counts[rows].float() @ (self.vectors[rows, 0] - mean[0]).square()
        if codes is not None:
            origin = decode_layers(codes, means.shape[2]).mean(dim=0) if len(exact) else torch.zeros(())
            offsets = encode_layers(means[:, 1:] - origin)
            codes = LayerCodes(torch.cat([codes.codes, offsets.codes]), torch.cat([codes.steps, offsets.steps]))
        counts = torch.cat([ones, torch.stack([self.counts[rows].sum() for rows in groups])])
        deviations = round_to_half((squares / counts.sum()).sqrt())
        return ClassSummary(quantize_int8(torch.cat([images, means])[:, 0]), counts, deviations, codes)


def _merge(vectors: Tensor, counts: Tensor, limit: int) -> list[Tensor]:
    """Merge n prototypes [n, D] to at most `most` groups, at each step the two that lose the least (Ward): their rows."""
    means, sizes, groups = vectors.double(), counts.double(), [torch.tensor([row]) for row in range(len(counts))]
    while len(groups) > limit:
        loss = torch.cdist(means, means).square() * (sizes[:, None] * sizes / (sizes[:, None] + sizes))
        loss.fill_diagonal_(torch.inf)
        row, column = sorted(divmod(int(loss.argmin()), len(groups)))
        size = sizes[row] + sizes[column]
        means[row] = (sizes[row] * means[row] + sizes[column] * means[column]) / size
        sizes[row] = size
        groups[row] = torch.cat([groups[row], groups[column]])
        keep = torch.arange(len(groups)) != column
        means, sizes = means[keep], sizes[keep]
        del groups[column]
    return groups
