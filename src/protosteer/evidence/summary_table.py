"""The summaries of many classes as a table: a few long tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from protosteer.evidence.prototype_summary import (
    MAX_EXACT_PROTOTYPES,
    ClassSummary,
    LayerCodes,
    decode_layers,
    half_if_lossless,
    pack_prototypes,
    unpack_prototypes,
)


@dataclass(frozen=True)
class SummaryTable:
    """R class summaries, one after the other, in the number formats of a file.

    In single precision, a million classes of five prototypes and width 192 would take four times as much, 4 GB.
    """

    points: Tensor  # [P, D]: see `decoded`
    counts: Tensor  # int64 [P]: images behind each
    deviations: Tensor  # [R, D]
    lengths: Tensor  # int64 [R]: prototypes of each summary
    steps: Tensor | None = None  # [P]: scales of prototypes in eight bits; None: they are floats
    layers: LayerCodes | None = None  # of P prototypes: the feature spaces of earlier layers

    @classmethod
    def of(cls, summaries: Sequence[ClassSummary]) -> SummaryTable:
        """Stack single summaries."""
        return cls(
            torch.cat([s.points for s in summaries]),
            torch.cat([s.counts for s in summaries]),
            torch.stack([s.deviations for s in summaries]),
            torch.tensor([len(s.points) for s in summaries]),
            layers=join_layers([s.layers for s in summaries]),
        )

    @property
    def spaces(self) -> int:
        """S: the number of feature spaces."""
        return 1 if self.layers is None else 1 + self.layers.steps.shape[1]

    def last_layer(self) -> SummaryTable:
        """Return the table without earlier layers."""
        return dataclasses.replace(self, layers=None)

    @classmethod
    def concatenate(cls, tables: Sequence[SummaryTable]) -> SummaryTable:
        """Join tables; in eight bits if one of them has eight bits and all others can be converted."""
        if any(table.steps is not None for table in tables):
            tables = [table.quantized() for table in tables]
        if any(table.steps is None for table in tables):
            tables = [
                table if table.steps is None else dataclasses.replace(table, points=table.decoded(), steps=None)
                for table in tables
            ]
        steps = [table.steps for table in tables if table.steps is not None]
        fields = ("points", "counts", "deviations", "lengths")
        columns = {name: join_rows([getattr(table, name) for table in tables]) for name in fields}
        layers = join_layers([table.layers for table in tables])
        return cls(**columns, steps=join_rows(steps) if steps else None, layers=layers)

    def quantized(self) -> SummaryTable:
        """Return the table in eight bits, if they hold the prototypes exactly."""
        if self.steps is not None:
            return self
        packed = pack_prototypes(self.decoded())
        return dataclasses.replace(self, points=packed["points"], steps=packed.get("steps"))

    def decoded(self, rows: Tensor | slice = slice(None), space: int = 0) -> Tensor:
        """Return prototypes in one feature space as float32 [r, D]; 0 is that of the last layer."""
        if space:
            return self._decoded_layer(rows, space - 1)
        return unpack_prototypes(self.points[rows], None if self.steps is None else self.steps[rows])

    def _decoded_layer(self, rows: Tensor | slice, layer: int) -> Tensor:
        """Return prototypes in one of the earlier layers, float32 [r, D]."""
        assert self.layers is not None
        vectors = decode_layers(self.layers[rows, layer : layer + 1], self.deviations.shape[1])[:, 0]
        grouped = self.grouped[rows].nonzero()[:, 0]
        if len(grouped):
            vectors[grouped] += self._group_origins[self.owners[rows][grouped], layer]
        return vectors

    @cached_property
    def grouped(self) -> Tensor:
        """Bool [P]: which prototypes are groups of images."""
        places = torch.arange(len(self.counts)) - (self.lengths.cumsum(0) - self.lengths)[self.owners]
        return places >= self.num_exact[self.owners]

    @cached_property
    def _group_origins(self) -> Tensor:
        """float32 [R, S - 1, D]: the mean of each summary's single images in earlier layers; 0 without any."""
        assert self.layers is not None
        single = (~self.grouped).nonzero()[:, 0]
        vectors, owners = decode_layers(self.layers[single], self.deviations.shape[1]), self.owners[single]
        sums = torch.zeros(len(self.lengths), *vectors.shape[1:]).index_add_(0, owners, vectors)
        return sums / self.num_exact.clamp(min=1)[:, None, None]

    @cached_property
    def num_exact(self) -> Tensor:
        """[R]: how many prototypes of each are single images; see `ClassSummary.num_exact`."""
        ends = self.lengths.cumsum(0)
        sums = torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])
        images = sums[ends] - sums[ends - self.lengths]
        # Up to the first prototype that stands for several images; a sentinel follows the last one.
        several = torch.cat([(self.counts != 1).nonzero()[:, 0], ends[-1:]])
        leading = several[torch.searchsorted(several, ends - self.lengths).clamp(max=len(several) - 1)]
        leading = torch.minimum(leading - (ends - self.lengths), self.lengths)
        return torch.where(images == self.lengths, self.lengths, leading.clamp(max=MAX_EXACT_PROTOTYPES))

    @cached_property
    def owners(self) -> Tensor:
        """[P]: the summary of each prototype, as a number."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

    def take(self, order: Tensor) -> SummaryTable:
        """Select summaries by number [r], in that order."""
        if torch.equal(order, torch.arange(len(self.lengths))):
            return self
        rows, lengths = ragged_rows(self.lengths, order), self.lengths[order]
        steps = None if self.steps is None else self.steps[rows]
        layers = None if self.layers is None else self.layers[rows]
        return SummaryTable(self.points[rows], self.counts[rows], self.deviations[order], lengths, steps, layers)

    def packed(self) -> dict[str, Tensor]:
        """Return the columns as a file keeps them, but for earlier layers."""
        table = self.quantized()
        columns = {"points": table.points if table.steps is not None else half_if_lossless(table.points)}
        if table.steps is not None:
            columns["steps"] = table.steps
        return {**columns, "counts": self.counts, "deviations": half_if_lossless(self.deviations)}


def join_layers(parts: Sequence[LayerCodes | None]) -> LayerCodes | None:
    """Join the codes of earlier layers; None where some prototypes lack them, or have others."""
    present = [part for part in parts if part is not None]
    if len(present) < len(parts) or len({part.codes.shape[1:] for part in present}) != 1:
        return None
    return LayerCodes(join_rows([part.codes for part in present]), join_rows([part.steps for part in present]))


def ragged_rows(lengths: Tensor, order: Tensor) -> Tensor:
    """Return the rows of the groups `order` [r], where group i has the `lengths[i]` rows after those of group i - 1."""
    starts, sizes = (lengths.cumsum(0) - lengths)[order], lengths[order]
    offsets = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return starts.repeat_interleave(sizes) + offsets


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors; those that follow one another in memory are joined without a copy."""
    head, width, rows = parts[0], parts[0].shape[1:].numel(), 0
    for part in parts:
        is_adjacent = part.dtype == head.dtype and part.shape[1:] == head.shape[1:] and part.is_contiguous()
        is_adjacent = is_adjacent and part.untyped_storage().data_ptr() == head.untyped_storage().data_ptr()
        if not is_adjacent or part.storage_offset() != head.storage_offset() + rows * width:
            return torch.cat(list(parts))
        rows += len(part)
    shape = (rows, *head.shape[1:])
    return head.as_strided(shape, torch.empty(shape, device="meta").stride())
