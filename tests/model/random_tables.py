"""Hypothesis strategies for records, tasks and memories of a small backbone."""

import dataclasses

import torch
from hypothesis import strategies as st

from conftest import tiny_backbone
from protosteer.evidence.prototype_summary import ClassSummary, quantize_int8
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord, TaskMetadata, TaskRecord
from protosteer.paper.prototypes import Centroids

DIM = tiny_backbone().dim


def a_record(name: str, seed: int, summarised: bool, shared: bool, coded: bool, extras: int) -> ClassRecord:
    draw = torch.Generator().manual_seed(seed)
    values, points = 1 + seed % 3, 1 + seed % 4

    def rows(count: int) -> torch.Tensor:
        return torch.randn(count, DIM, generator=draw) / 8

    def summary() -> ClassSummary:
        prototypes = quantize_int8(rows(points)) if coded else rows(points)
        counts = torch.ones(points, dtype=torch.int64) * (1 + seed % 2)
        return ClassSummary(prototypes, counts, rows(1)[0].abs())

    plain = summary() if summarised else None
    return ClassRecord(
        name,
        rows(2) if plain is None else plain.points,
        Centroids(rows(values), rows(values).abs(), torch.arange(1, values + 1)),
        torch.rand(extras, generator=draw) if extras else None,
        plain,
        summary() if summarised and shared else None,
        torch.arange(seed, seed + extras) if extras else None,
    )


def _named(some: list[ClassRecord]) -> list[ClassRecord]:
    return [dataclasses.replace(one, name=f"class {i}") for i, one in enumerate(some)]


def lists_of_records(shared: bool | None = None) -> st.SearchStrategy[list[ClassRecord]]:
    """One to five classes. shared: whether all have, or none has, a summary under the shared prompt."""
    either = st.booleans()
    summarised, under_prompt = (st.just(True), st.just(True)) if shared else (either, either)
    if shared is False:
        under_prompt = st.just(False)
    one = st.builds(a_record, st.just("c"), st.integers(0, 99), summarised, under_prompt, either, st.integers(0, 2))
    return st.lists(one, min_size=1, max_size=5).map(_named)


@st.composite
def memories(draw: st.DrawFn, prefix: str = "task", least: int = 1) -> Memory:
    """One to three tasks with names of their own; classes of the same name may be in several of them."""
    tasks = []
    for i in range(draw(st.integers(least, 3))):
        shared = draw(st.booleans())
        records = draw(lists_of_records(shared))
        prompt = torch.full((1, 1, DIM), float(i)) if draw(st.booleans()) else None
        tasks.append(
            TaskRecord(
                f"{prefix}-{i}",
                ClassTable.of(records),
                prompt,
                draw(st.booleans()),
                TaskMetadata({"epochs": i}, i, loss=0.5, held_out=i or None),
                draw(st.booleans()),
                torch.full((1, 1, DIM), 0.5) if shared else None,
                draw(st.sampled_from([None, "class 0"])),
            )
        )
    return Memory(tasks)


def leaves(record: ClassRecord) -> dict[str, object]:
    """All that a record says, by name."""
    found: dict[str, object] = {"name": record.name, "keys": record.keys}
    for field in ("values", "plain", "shared"):
        part = getattr(record, field)
        found |= {f"{field}.{name}": tensor for name, tensor in vars(part).items()} if part else {field: None}
    return found | {"held_out": record.heldout_similarities, "seen": record.file_digests}


def assert_same(one: ClassRecord, other: ClassRecord) -> None:
    mine, theirs = leaves(one), leaves(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        both = isinstance(value, torch.Tensor) and isinstance(theirs[name], torch.Tensor)
        assert torch.equal(value, theirs[name]) if both else value == theirs[name], name
