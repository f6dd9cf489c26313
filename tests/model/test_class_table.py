from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from conftest import easy_task, tiny_backbone
from protosteer.errors import ModelFileError
from protosteer.evidence.prototype_summary import pack_prototypes, quantize_int8
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.model.class_table import Bulk, Slices, Stack
from protosteer.settings import Settings
from protosteer.util.tensor_file import pack_tensors, unpack_tensors

QUICK = Settings.preset("best", epochs=1, batch_size=8, neck_hidden=16, augmentation="none", centroids=2)


@functools.cache
def taught(rule: str) -> Learner:
    learner = Learner(tiny_backbone(), dataclasses.replace(QUICK, rule=rule))
    learner.learn(easy_task(["cat", "dog", "ant"]), name="first")
    learner.learn(easy_task(["eel", "Fuß ☃"]), name="second")
    return learner


@pytest.fixture(params=["evidence", "paper"])
def learner(request) -> Learner:
    return taught(request.param).copy()


@pytest.fixture
def together(learner, tmp_path, monkeypatch):
    """The same as a file that has all classes one after the other."""
    monkeypatch.setattr(model_file, "MANY", 2)
    path = tmp_path / "many.protosteer"
    learner.save(path)
    assert unpack_tensors(path.read_bytes(), "many")[0]["format"] == 3
    return path


def test_classes_together_are_the_same_classes(learner, together):
    again = Learner.load(together, backbone=tiny_backbone())
    assert all(isinstance(task.classes, Slices) and not task.classes.made for task in again.memory.tasks)
    images, _ = easy_task(["cat", "dog", "eel", "Fuß ☃"], seed=9)
    before, after = learner.predict(images), again.predict(images)
    assert torch.equal(before.scores, after.scores) and before.labels == after.labels
    assert not any(task.classes.made for task in again.memory.tasks)  # nobody had to look at a record
    for mine, theirs in zip(learner.memory.tasks, again.memory.tasks, strict=True):
        for (name, a), (other, b) in zip(mine.tensors(), theirs.tensors(), strict=True):
            assert name == other and torch.equal(a, b) and a.dtype == b.dtype


def test_saved_again_they_are_the_same_file_whether_looked_at_or_not(together, tmp_path):
    again = Learner.load(together, backbone=tiny_backbone())
    for look in (False, True):
        _ = again.memory.records if look else None
        again.save(tmp_path / "again.protosteer")
        assert (tmp_path / "again.protosteer").read_bytes() == together.read_bytes()


def test_changes_after_reading_are_those_of_a_file_that_has_them_apart(learner, together):
    again = Learner.load(together, backbone=tiny_backbone())
    for one in (learner, again):
        one.forget("dog")
        one.add_class("gnu", easy_task(["gnu"])[0][:3])
    images, _ = easy_task(["cat", "ant", "eel", "gnu"], seed=3)
    before, after = learner.predict(images), again.predict(images)
    assert learner.classes == again.classes and torch.equal(before.scores, after.scores)


def test_few_classes_stay_in_the_format_that_earlier_versions_read(learner, tmp_path):
    learner.save(tmp_path / "few.protosteer")
    assert unpack_tensors((tmp_path / "few.protosteer").read_bytes(), "few")[0]["format"] in (1, 2)


def test_classes_that_are_not_alike_are_kept_apart(learner):
    first, second = learner.memory.tasks
    bare = tuple(dataclasses.replace(record, plain=None, shared=None) for record in second.classes)
    mixed = [first, dataclasses.replace(second, classes=bare)]
    alike = first.classes[0].plain is None
    assert (Stack.of(mixed) is not None) == alike


@pytest.mark.parametrize(
    "name, change",
    [
        ("starts.values", lambda t: t + 1),
        ("starts.values", lambda t: t.flip(0)),
        ("starts.values", lambda t: t[:-1]),
        ("starts.values", lambda t: t.float()),
        ("classes.values.means", lambda t: t[:-1]),
        ("classes.values.means", lambda t: t * torch.nan),
        ("classes.values.means", lambda t: t[:, :-1]),
        ("classes.values.means", lambda t: t.double()),
        ("classes.values.deviations", lambda t: t - 100),
        ("classes.values.counts", lambda t: t * 0),
        ("classes.held_out", lambda t: torch.full((3,), torch.nan)),
        ("starts.other", lambda t: torch.arange(3)),
    ],
)
@pytest.mark.parametrize("learner", ["paper"], indirect=True)
def test_forged_stacks_are_refused_in_one_line(together, name, change):
    header, tensors = unpack_tensors(together.read_bytes(), "many")
    tensors[name] = change(tensors.get(name)).contiguous()
    together.write_bytes(pack_tensors(header, tensors))
    with pytest.raises(ModelFileError, match="inconsistent header"):
        model_file.read(together)


@pytest.mark.parametrize(
    "name, change",
    [
        ("plain.points", lambda t: t[:-1]),
        ("plain.points", lambda t: t.float()),
        ("plain.steps", lambda t: t * torch.inf),
        ("plain.steps", lambda t: torch.full_like(t, 0.1)),
        ("plain.counts", lambda t: t - 1),
        ("plain.counts", lambda t: t * 5),
        ("plain.deviations", lambda t: t[:-1]),
        ("plain.deviations", lambda t: t + 2),
        ("domain.points", lambda t: t[:, :3]),
    ],
)
@pytest.mark.parametrize("learner", ["evidence"], indirect=True)
def test_forged_sketches_are_refused_in_one_line(together, name, change):
    header, tensors = unpack_tensors(together.read_bytes(), "many")
    tensors[f"classes.{name}"] = change(tensors[f"classes.{name}"]).contiguous()
    together.write_bytes(pack_tensors(header, tensors))
    with pytest.raises(ModelFileError, match="inconsistent header"):
        model_file.read(together)


def test_classes_are_joined_in_eight_bits_where_these_hold_them_all():
    def bulk(points, steps=None):
        ones = torch.ones(len(points), dtype=torch.int64)
        return Bulk(points, ones, torch.zeros(2, 8), ones[:2] * 3, steps)

    draw = torch.Generator().manual_seed(0)
    one, two, other = (torch.randn(6, 8, generator=draw) for _ in range(3))
    one, two = quantize_int8(one), quantize_int8(two)
    eight = bulk(*pack_prototypes(one).values())
    joined = Bulk.joined([eight, bulk(two)])
    assert joined.points.dtype == torch.int8 and torch.equal(joined.decoded(), torch.cat([one, two]))
    assert torch.equal(joined.ordered(torch.tensor([3, 0, 1, 2])).decoded()[:3], two[3:])
    whole = Bulk.joined([eight, bulk(other)])
    assert whole.steps is None and torch.equal(whole.decoded(), torch.cat([one, other]))
    assert Bulk.joined([bulk(one), bulk(two)]).steps is None  # nothing is gained among few
