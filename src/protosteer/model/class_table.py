"""The classes of a task, or of a model, as a few long tensors.

Code that reads all classes uses whole columns. One class is a cheap row view, a `ClassRecord`. A hundred thousand records
would be a million small tensors, which take a minute to make.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor

from protosteer.evidence.prototype_summary import ClassSummary, LayerCodes, half_if_lossless
from protosteer.evidence.summary_table import SummaryTable, join_rows, ragged_rows
from protosteer.model.records import ClassRecord
from protosteer.paper.prototypes import Centroids

SUMMARIES = ("plain", "domain")
LAYERS = {part: f"{part}_layers" for part in SUMMARIES}  # the same prototypes in earlier layers, where there are
# Columns of each group, which share the rows of a class. Names are those of a file: "domain" is the shared prompt,
# "held_out" the held-out similarities, "seen" the digests of files.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "keys": ("keys",),
    "values": ("values.means", "values.deviations", "values.counts"),
    **{part: tuple(f"{part}.{x}" for x in ("points", "steps", "counts", "deviations")) for part in SUMMARIES},
    **{group: tuple(f"{group}.{x}" for x in ("codes", "steps")) for group in LAYERS.values()},
    "held_out": ("held_out",),
    "seen": ("seen",),
}


@dataclass(frozen=True, eq=False)
class ClassTable(Sequence[ClassRecord]):
    """C classes, one after the other; a class may lack any group but "values".

    Attributes:
        names: Names of the classes.
        columns: "values.means" and "values.deviations" [V, D], "values.counts" int64 [V]; "plain.points" [P, D],
            "plain.steps" [P] where prototypes have eight bits, "plain.counts" int64 [P], "plain.deviations" with one
            row per class that has prototypes, and the same of "domain"; of either, the same prototypes in earlier
            layers, "plain_layers.codes" and "plain_layers.steps"; "keys" [K, D] of classes without "plain";
            "held_out" [H]; "seen" int64 [S]. A group that no class has is absent.
        starts: int64 [C + 1] for each group: the rows of class i are `starts[i]` to `starts[i + 1] - 1`.
    """

    names: tuple[str, ...]
    columns: Mapping[str, Tensor]
    starts: Mapping[str, Tensor]

    @classmethod
    def of(cls, records: Iterable[ClassRecord]) -> ClassTable:
        """Build a table from single records."""
        records = tuple(records)
        groups: dict[str, list[Mapping[str, Tensor] | None]] = {
            "keys": [{"keys": r.keys} if r.plain is None else None for r in records],
            "values": [_fields("values", r.values) for r in records],
            "plain": [_fields("plain", r.plain) for r in records],
            "domain": [_fields("domain", r.shared) for r in records],
            LAYERS["plain"]: [_fields(LAYERS["plain"], r.plain and r.plain.layers) for r in records],
            LAYERS["domain"]: [_fields(LAYERS["domain"], r.shared and r.shared.layers) for r in records],
            "held_out": [_fields("held_out", r.heldout_similarities) for r in records],
            "seen": [_fields("seen", r.file_digests) for r in records],
        }
        columns, starts = dict[str, Tensor](), dict[str, Tensor]()
        for group, parts in groups.items():
            part_fields = [part for part in parts if part]
            starts[group] = _starts([len(part[GROUPS[group][0]]) if part else 0 for part in parts])
            for field in part_fields[0] if part_fields else ():
                columns[field] = torch.cat([part[field] for part in part_fields])
        return cls.of_columns([r.name for r in records], columns, starts)

    @classmethod
    def of_columns(
        cls, names: Iterable[str], columns: Mapping[str, Tensor], starts: Mapping[str, Tensor]
    ) -> ClassTable:
        """Build a table from columns, without the groups that have no rows."""
        used_starts = {group: rows for group, rows in starts.items() if int(rows[-1])}
        fields = {f: columns[f] for group in GROUPS if group in used_starts for f in GROUPS[group] if f in columns}
        return cls(tuple(names), fields, used_starts)

    @classmethod
    def concatenate(cls, tables: Sequence[ClassTable]) -> ClassTable:
        """Join tables; columns that follow one another in memory are not copied."""
        columns, starts = dict[str, Tensor](), dict[str, Tensor]()
        for group, fields in GROUPS.items():
            owners = [table for table in tables if group in table.starts]
            if not owners:
                continue
            starts[group] = _starts(torch.cat([table.lengths(group) for table in tables]))
            if group in SUMMARIES:
                summaries = SummaryTable.concatenate([table._summaries(group) for table in owners])
                columns |= {f: t for f in fields if (t := getattr(summaries, f.split(".")[1])) is not None}
            else:
                columns |= {f: join_rows([table.columns[f] for table in owners]) for f in fields}
        return cls(tuple(itertools.chain.from_iterable(table.names for table in tables)), columns, starts)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, row: int) -> ClassRecord: ...

    @overload
    def __getitem__(self, row: slice) -> ClassTable: ...

    def __getitem__(self, row: int | slice) -> ClassRecord | ClassTable:
        if isinstance(row, slice):
            start, stop, step = row.indices(len(self))
            return self.take(range(start, stop, step)) if step != 1 else self._range(start, max(start, stop))
        place = range(len(self))[row]
        return self._range(place, place + 1)._record()

    def take(self, rows: Sequence[int] | Tensor) -> ClassTable:
        """Select classes by number, in that order."""
        order = torch.as_tensor(rows, dtype=torch.int64)
        columns = {f: t[ragged_rows(self._field_starts(f).diff(), order)] for f, t in self.columns.items()}
        starts = {group: _starts(self.lengths(group)[order]) for group in self.starts}
        return self.of_columns([self.names[row] for row in order.tolist()], columns, starts)

    def without(self, names: Iterable[str]) -> ClassTable:
        """Return the classes that have other names."""
        dropped_names = set(names)
        return self.take([row for row, name in enumerate(self.names) if name not in dropped_names])

    def renamed(self, names: Mapping[str, str]) -> ClassTable:
        """Return the same classes under new names, by old names."""
        return replace(self, names=tuple(names.get(name, name) for name in self.names))

    def with_rows(self, group: str, parts: Sequence[Tensor | None]) -> ClassTable:
        """Replace "held_out" or "seen" of all classes; one part per class, None for none."""
        tensors = [part for part in parts if part is not None]
        columns = {**self.columns, **({group: torch.cat(tensors)} if tensors else {})}
        starts = {**self.starts, group: _starts([0 if part is None else len(part) for part in parts])}
        return self.of_columns(self.names, columns, starts)

    def with_image_weight(self, images: int) -> ClassTable:
        """Return the same classes as if every prototype of a summary stood for `images` times as many images."""
        counts = {f"{part}.counts" for part in SUMMARIES}
        columns = {f: t * images if f in counts else t for f, t in self.columns.items()}
        return replace(self, columns=columns)

    def lengths(self, group: str) -> Tensor:
        """Return how many rows each class has in a group: [C]."""
        rows = self.starts.get(group)
        return torch.zeros(len(self), dtype=torch.int64) if rows is None else rows.diff()

    @property
    def summarised(self) -> bool:
        """Whether every class has a summary without a prompt, which the default classifier needs."""
        return "plain" in self.starts and bool((self.lengths("plain") > 0).all())

    def summaries(self, part: str) -> SummaryTable | None:
        """Return the "plain" or "domain" summaries of all classes; None where a class has none.

        Without earlier layers, unless all classes have them.
        """
        return self._summaries(part) if len(self) and bool((self.lengths(part) > 0).all()) else None

    @property
    def keys(self) -> Tensor:
        """float32 [K, D]: keys of all classes; of a class with a summary, its prototypes without a prompt."""
        points = self._summaries("plain").decoded() if "plain" in self.starts else None
        if points is None or "keys" not in self.starts:
            return self.columns["keys"] if points is None else points
        key_counts, prototype_counts = self.lengths("keys"), self.lengths("plain")
        order = (key_counts > 0).repeat_interleave(key_counts + prototype_counts)  # which rows come from "keys"
        rows = torch.empty(len(order), points.shape[1])
        rows[order], rows[~order] = self.columns["keys"], points
        return rows

    @property
    def key_lengths(self) -> Tensor:
        """[C]: how many keys each class has."""
        return self.lengths("keys") + self.lengths("plain")

    @property
    def values(self) -> Centroids:
        """Value prototypes of all classes in single precision: [V, D] and [V]."""
        means, deviations, counts = (self.columns[field] for field in GROUPS["values"])
        return Centroids(means.float(), deviations.float(), counts)

    @property
    def images(self) -> Tensor:
        """int64 [C]: images that each class was learned from."""
        sums = torch.cat([torch.zeros(1, dtype=torch.int64), self.columns["values.counts"].cumsum(0)])
        return sums[self.starts["values"]].diff()

    @property
    def heldout_similarities(self) -> Tensor:
        """[H]: of all classes; `lengths("held_out")` has how many each has."""
        return self.columns.get("held_out", torch.empty(0))

    @property
    def file_digests(self) -> Tensor:
        """int64 [S]: of all classes; `lengths("seen")` has how many each has."""
        return self.columns.get("seen", torch.empty(0, dtype=torch.int64))

    def find_digests(self, digests: Iterable[int]) -> Iterator[tuple[int, str]]:
        """Yield (digest, class) for those of these digests that classes have, class by class."""
        numbers = torch.tensor(sorted(set(digests)), dtype=torch.int64)
        rows = torch.isin(self.file_digests, numbers).nonzero()[:, 0]
        owners = torch.arange(len(self)).repeat_interleave(self.lengths("seen"))[rows]
        for digest, owner in zip(self.file_digests[rows].tolist(), owners.tolist(), strict=True):
            yield digest, self.names[owner]

    def packed(self) -> dict[str, Tensor]:
        """Return the columns as a file stores them: in fewer bits where that is exact."""
        columns = dict(self.columns)
        for part in (part for part in SUMMARIES if part in self.starts):
            columns |= {f"{part}.{x}": t for x, t in self._summaries(part).packed().items()}
        for field in ("values.means", "values.deviations"):
            if field in columns:
                columns[field] = half_if_lossless(columns[field])
        return columns

    def bytes_per_class(self) -> Tensor:
        """Return how many bytes a file keeps of each class: int64 [C]."""
        sizes = torch.zeros(len(self), dtype=torch.int64)
        for field, column in self.packed().items():
            row = column.shape[1:].numel() * column.element_size()
            sizes += row * self._field_starts(field).diff()
        return sizes

    def _summaries(self, part: str) -> SummaryTable:
        """Return the summaries of the classes that have one."""
        points, counts, deviations = (self.columns[f"{part}.{x}"] for x in ("points", "counts", "deviations"))
        lengths, layers = self.lengths(part), None
        if torch.equal(lengths, self.lengths(LAYERS[part])):
            layers = LayerCodes(*(self.columns[field] for field in GROUPS[LAYERS[part]]))
        return SummaryTable(points, counts, deviations, lengths[lengths > 0], self.columns.get(f"{part}.steps"), layers)

    def _field_starts(self, field: str) -> Tensor:
        group, _, column = field.partition(".")
        if group in SUMMARIES and column == "deviations":
            return _starts((self.lengths(group) > 0).long())
        return self.starts[group]

    def _bounds(self, field: str, start: int, stop: int) -> slice:
        """Return the rows of classes `first` to `last` - 1 in a column; cheap, since a file has thousands of tasks."""
        group, _, column = field.partition(".")
        if group in SUMMARIES and column == "deviations" and len(self.columns[field]) == len(self):
            return slice(start, stop)
        rows = self._field_starts(field)
        return slice(int(rows[start]), int(rows[stop]))

    def _range(self, start: int, stop: int) -> ClassTable:
        columns = {field: column[self._bounds(field, start, stop)] for field, column in self.columns.items()}
        starts = {group: rows[start : stop + 1] - rows[start] for group, rows in self.starts.items()}
        return self.of_columns(self.names[start:stop], columns, starts)

    def _record(self) -> ClassRecord:
        """Return the only class."""
        plain_summary, shared_summary = (self._summary(part) for part in SUMMARIES)
        keys = self.columns["keys"] if plain_summary is None else plain_summary.points
        held_out, digests = self.columns.get("held_out"), self.columns.get("seen")
        return ClassRecord(self.names[0], keys, self.values, held_out, plain_summary, shared_summary, digests)

    def _summary(self, part: str) -> ClassSummary | None:
        if part not in self.starts:
            return None
        table = self._summaries(part)
        return ClassSummary(table.decoded(), table.counts, table.deviations[0].float(), table.layers)


def _fields(group: str, part: Centroids | ClassSummary | LayerCodes | Tensor | None) -> Mapping[str, Tensor] | None:
    """Return the columns of one class, with a first axis of rows."""
    if part is None or isinstance(part, Tensor):
        return None if part is None else {group: part}
    fields = {f"{group}.{name}": tensor for name, tensor in vars(part).items() if isinstance(tensor, Tensor)}
    if group in SUMMARIES:
        fields[f"{group}.deviations"] = fields[f"{group}.deviations"][None]
    return fields


def _starts(lengths: Sequence[int] | Tensor) -> Tensor:
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
