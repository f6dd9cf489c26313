"""Models are lists of records: merging, forgetting, undoing and files are exact, for any records."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_tables import assert_same, memories

from conftest import tiny_backbone
from protosteer.model import file as model_file
from protosteer.model.file import Model, backbone_header
from protosteer.model.memory import Memory
from protosteer.model.merging import concatenate
from protosteer.model.unlearning import forget, forget_all
from protosteer.settings import Settings

pytestmark = pytest.mark.slow

PLACE = Path("a.protosteer")
exactly = functools.partial(settings, deadline=None, max_examples=40, derandomize=True)


@functools.cache
def backbone() -> dict[str, Any]:
    return backbone_header(tiny_backbone())


def packed(memory: Memory) -> bytes:
    return Model(PLACE, backbone(), Settings(), memory).pack()


def after(memory: Memory, *changes: Callable[[Memory], object]) -> bytes:
    changed = Memory(memory.tasks)
    for change in changes:
        change(changed)
    return packed(changed)


@exactly()
@given(memories(least=0))
def test_a_file_holds_all_of_a_memory(memory):
    read = model_file.unpack(packed(memory), PLACE)
    assert read.pack() == packed(memory) and read.memory.owners == memory.owners
    for mine, theirs in zip(memory.tasks, read.memory.tasks, strict=True):
        for field in ("name", "independent", "metadata", "few_shot", "corrected_from"):
            assert getattr(mine, field) == getattr(theirs, field)
        for prompt, other in ((mine.prompt, theirs.prompt), (mine.shared_prompt, theirs.shared_prompt)):
            assert prompt is other is None or torch.equal(prompt, other)
        for one, other in zip(mine.classes, theirs.classes, strict=True):
            assert_same(one, other)


@exactly()
@given(memories("a"), memories("b"), memories("c"))
def test_merging_is_associative_and_loses_nothing(a, b, c):
    whole = packed(concatenate([a, b, c]))
    assert packed(concatenate([concatenate([a, b]), c])) == whole
    assert packed(concatenate([a, concatenate([b, c])])) == whole
    merged = concatenate([a, b])
    assert merged.task_names == [*a.task_names, *b.task_names] and set(merged.classes) == {*a.classes, *b.classes}
    assert int(merged.table.images.sum()) == int(a.table.images.sum() + b.table.images.sum())


@exactly()
@given(memories())
def test_a_memory_is_merged_with_itself_under_other_names(memory):
    renames = {name: f"other {name}" for name in memory.classes}
    tasks = {name: f"other {name}" for name in memory.task_names}
    twice = model_file.unpack(packed(concatenate([memory, memory], renames, tasks)), PLACE).memory
    assert twice.classes == [*renames, *renames.values()]
    assert twice.task_names == [*tasks, *tasks.values()] and len(twice.table) == 2 * len(memory.table)


@exactly()
@given(memories("a"), memories("b"), st.randoms())
def test_what_was_merged_can_be_forgotten_in_any_order(a, b, random):
    order = random.sample(b.task_names, len(b))
    merged = model_file.unpack(packed(concatenate([a, b])), PLACE).memory
    assert after(merged, *(functools.partial(forget, task=name) for name in order)) == packed(a)


@exactly()
@given(memories(), st.data())
def test_a_forgotten_class_leaves_nothing_and_the_others_stay(memory, data):
    gone = data.draw(st.sampled_from(memory.classes))
    kept = {
        name: memory.table.take([i for i, n in enumerate(memory.table.names) if n == name]) for name in memory.classes
    }
    bytes_before = sum(task.bytes for task in memory.tasks)
    changed = Memory(memory.tasks)
    outcome = forget(changed, gone)
    assert gone not in changed.classes and gone not in changed.table.names
    assert outcome.bytes == bytes_before - sum(task.bytes for task in changed.tasks)
    for name in changed.classes:
        rows = changed.table.take([i for i, n in enumerate(changed.table.names) if n == name])
        assert all(torch.equal(column, kept[name].columns[field]) for field, column in rows.columns.items())
    assert after(memory, lambda m: forget_all(m, [gone])) == packed(changed)


@exactly()
@given(memories(), memories("more"))
def test_a_task_that_is_added_and_removed_leaves_the_same_bytes(memory, more):
    (task, *_) = more.tasks
    assert after(memory, lambda m: m.add(task), lambda m: m.remove(task)) == packed(memory)
    read = model_file.unpack(after(memory, lambda m: m.add(task)), PLACE).memory
    assert after(read, lambda m: m.remove(m.tasks[-1])) == packed(memory)
