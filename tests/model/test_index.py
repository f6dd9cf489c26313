"""A memory as matrices: what belongs to which task and class, and which prompts are copies."""

import dataclasses

import torch
import torch.nn.functional as F

from protosteer.model.class_table import ClassTable
from protosteer.model.index import Index
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord, TaskRecord
from protosteer.paper.prototypes import Centroids

DIM = 6


def memory() -> Memory:
    """As a model becomes in use: t0 and t3 have prompts of their own, t1 none, t2 and t4 copies; "c0" comes twice."""
    generator = torch.Generator().manual_seed(0)

    def record(name: str, count: int) -> ClassRecord:
        means = torch.randn(count, DIM, generator=generator)
        values = Centroids(means, torch.zeros(count, DIM), torch.ones(count, dtype=torch.int64))
        return ClassRecord(name, torch.randn(count + 1, DIM, generator=generator), values)

    original = [0, None, 0, 3, 3]
    names = [["c0", "c1"], ["c2"], ["c3"], ["c4", "c0"], ["c5"]]
    return Memory(
        TaskRecord(
            f"t{t}",
            ClassTable.of(record(name, 1 + (t + k) % 3) for k, name in enumerate(names[t])),
            None if own is None else torch.full((2, 1, DIM), float(own)),
            few_shot=own not in (None, t),
        )
        for t, own in enumerate(original)
    )


def test_prototypes_belong_to_their_tasks_and_classes() -> None:
    mem = memory()
    index = Index.build(mem)
    found = index.prototypes
    keys = [(key, t) for t, task in enumerate(mem.tasks) for record in task.classes for key in record.keys]
    values = [(mean, record.name, t) for t, task in enumerate(mem.tasks) for record in task.classes
              for mean in record.values.means]  # fmt: skip
    torch.testing.assert_close(found.keys, F.normalize(torch.stack([key for key, _ in keys]), dim=1))
    assert found.key_tasks.tolist() == [t for _, t in keys]
    torch.testing.assert_close(found.values, F.normalize(torch.stack([mean for mean, *_ in values]), dim=1))
    assert [index.classes[c] for c in found.value_classes.tolist()] == [name for _, name, _ in values]
    assert index.value_tasks.tolist() == [t for *_, t in values] and found.num_classes == len(index.classes) == 6
    assert index.class_tasks.tolist() == [0, 0, 1, 2, 3, 4]  # where each was learned first


def test_copies_of_a_prompt_are_run_as_their_original() -> None:
    index = Index.build(memory())
    assert index.prompt_owners.tolist() == [0, 1, 0, 3, 3]
    assert index.prototypes.prompt_tasks.tolist() == [0, -1, 0, 3, 3]


def test_tasks_that_happen_to_be_equal_are_no_copies_unless_something_is_few_shot() -> None:
    """Looking for copies costs a checksum of every prompt, which most models need not pay."""
    plain = Memory(dataclasses.replace(task, few_shot=False) for task in memory().tasks)
    assert Index.build(plain).prompt_owners.tolist() == list(range(5))


def test_the_trunk_ends_where_the_first_prompt_begins() -> None:
    mem = memory()
    assert Index.build(mem).shared_layers(4) == 2
    late = dataclasses.replace(mem.tasks[0], prompt=torch.zeros(3, 1, DIM))
    assert Index.build(Memory([late, *mem.tasks[1:]])).shared_layers(4) == 1
