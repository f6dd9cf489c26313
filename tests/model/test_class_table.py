"""A table of classes holds what its records say, in any order and any number of parts."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_tables import assert_same, lists_of_records

from conftest import tiny_backbone
from many_toys import many
from protosteer.data.class_folders import Files
from protosteer.evidence.prototype_summary import pack_prototypes, quantize_int8, unpack_prototypes
from protosteer.evidence.summary_table import SummaryTable
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.model.records import TaskMetadata, TaskRecord
from protosteer.rules import reader_of
from protosteer.settings import Settings
from protosteer.workflows import known_files, model_summary, ood


@settings(deadline=None, max_examples=60, derandomize=True)
@given(lists_of_records(), st.data())
def test_rows_ranges_selections_and_joins_are_the_records(records, data):
    table = ClassTable.of(records)
    for i, record in enumerate(records):
        assert_same(table[i], record)
    order = data.draw(st.lists(st.integers(0, len(records) - 1), max_size=8))
    for row, place in enumerate(order):
        assert_same(table.take(order)[row], records[place])
    cut = data.draw(st.integers(0, len(records)))
    parts = [part for part in (table[:cut], table[cut:]) if len(part)]
    joined = ClassTable.concatenate(parts)
    assert joined.names == table.names and joined.starts.keys() == table.starts.keys()
    for group, rows in table.starts.items():
        assert torch.equal(rows, joined.starts[group])
    for name, column in table.columns.items():
        assert torch.equal(column, joined.columns[name])
        assert column.data_ptr() == joined.columns[name].data_ptr(), "neighbours are joined without a copy"


@settings(deadline=None, max_examples=60, derandomize=True)
@given(lists_of_records())
def test_columns_are_those_of_all_records_and_survive_packing(records):
    table = ClassTable.of(records)
    assert torch.equal(table.keys, torch.cat([r.keys for r in records]))
    assert table.key_lengths.tolist() == [len(r.keys) for r in records]
    assert table.images.tolist() == [r.images for r in records]
    assert table.summarised == all(r.plain is not None for r in records)
    digests = [n for r in records if r.file_digests is not None for n in r.file_digests.tolist()]
    assert table.file_digests.tolist() == digests
    packed = table.packed()
    assert int(table.bytes_per_class().sum()) == sum(t.nbytes for t in packed.values())
    again = ClassTable.of_columns(table.names, packed, table.starts)
    for mine, theirs in zip(table, again, strict=True):
        assert_same(mine, theirs)
    assert all(torch.equal(t, packed[name]) for name, t in again.packed().items())


def test_summaries_are_joined_in_eight_bits_where_these_hold_them_all():
    draw = torch.Generator().manual_seed(0)
    one, two, other = (torch.randn(6, 8, generator=draw) for _ in range(3))

    def table(points: torch.Tensor) -> SummaryTable:
        ones = torch.ones(len(points), dtype=torch.int64)
        return SummaryTable(points, ones, torch.zeros(2, 8), ones[:2] * 3)

    one, two = quantize_int8(one), quantize_int8(two)
    eight = table(one).quantized()
    assert eight.points.dtype == torch.int8
    joined = SummaryTable.concatenate([eight, table(two)])
    assert joined.points.dtype == torch.int8 and torch.equal(joined.decoded(), torch.cat([one, two]))
    assert torch.equal(joined.take(torch.tensor([3, 0, 1, 2])).decoded()[:3], two[3:])
    whole = SummaryTable.concatenate([eight, table(other)])
    assert whole.steps is None and torch.equal(whole.decoded(), torch.cat([one, other]))
    assert SummaryTable.concatenate([table(one), table(two)]).steps is None  # nothing is gained among few


@pytest.fixture
def thousands() -> Memory:
    """20,000 classes in 20 tasks, with digests and held-out similarities."""
    (one,) = many(1, 1).memory.tasks
    tasks = []
    for t in range(20):
        classes = ClassTable.concatenate([one.classes] * 1000)
        classes = dataclasses.replace(classes, names=tuple(f"class-{t}-{i}" for i in range(1000)))
        classes = classes.with_rows("seen", list(torch.arange(t * 1000, t * 1000 + 1000)[:, None]))
        classes = classes.with_rows("held_out", [torch.tensor([0.5])] * 1000)
        tasks.append(TaskRecord(f"task-{t}", classes, None, metadata=TaskMetadata(held_out=t % 2)))
    return Memory(tasks)


def test_nothing_that_works_on_all_classes_makes_records(thousands, monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(ClassTable, "_record", lambda self: made.append(self.names))
    learner = Learner(tiny_backbone(), Settings(rule="paper"))
    learner.memory = thousands
    files = Files([tmp_path / "a", tmp_path / "b"], ["class-3-7", "class-0-0"])
    known = known_files.KnownFiles.find(thousands.tasks, files, dict(zip(files.paths, [3007, 19_999], strict=True)))
    assert known.same_class == [0] and known.other_class == {1: "class-19-999"}
    learner.save(tmp_path / "many.protosteer")
    read = model_file.read(tmp_path / "many.protosteer")
    other = dataclasses.replace(read, memory=Memory())
    merged = model_file.merge([other, read], task_renames={"task-3": "renamed"})
    assert len(merged.memory.table) == 20_000 and merged.memory.task_names[3] == "renamed"
    monkeypatch.setattr(model_summary, "PAIRED", 0)
    assert model_summary.describe(read, reader_of(read.memory, read.settings))["totals"]["classes"] == 20_000
    assert ood.threshold(learner, 0.1) == 0.5 and len(ood.class_thresholds(learner)) == 10_000
    assert sum(len(list(task.tensors())) for task in thousands.tasks) > 0
    thousands.remove(thousands.tasks[4], ["class-4-999"])
    assert len(thousands.table) == 19_999 and not made


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.lists(st.floats(-1, 1, width=32), min_size=3, max_size=3), min_size=1, max_size=4))
def test_eight_bits_hold_quantized_prototypes_exactly_and_others_stay_as_they_are(rows):
    points = torch.tensor(rows)
    for given_points, coded in ((quantize_int8(points), True), (points, False)):
        packed = pack_prototypes(given_points)
        assert torch.equal(unpack_prototypes(packed["points"], packed.get("steps")), given_points)
        assert not coded or packed["points"].dtype == torch.int8
    assert torch.equal(quantize_int8(quantize_int8(points)), quantize_int8(points))
    step = points.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((quantize_int8(points) - points).abs() <= 0.51 * step + 1e-5).all())
