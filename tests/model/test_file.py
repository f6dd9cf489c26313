import json
import struct

import pytest
import torch

from conftest import easy_task, tiny_backbone
from expect import expect_error
from protosteer.backbones import Backbone, find_weights
from protosteer.data.transforms import Preprocessing
from protosteer.errors import ModelFileError
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.settings import Settings
from protosteer.util.tensor_file import pack_tensors, unpack_tensors

QUICK = Settings.preset("paper", epochs=2, batch_size=8, neck_hidden=16, augmentation="none", centroids=2)


@pytest.fixture
def learner() -> Learner:
    learner = Learner(tiny_backbone(), QUICK)
    learner.learn(easy_task(["cat", "dog"]), name="first")
    learner.learn(easy_task(["eel", "Fuß ☃"]), name="second")
    return learner


@pytest.fixture
def saved(learner, tmp_path):
    path = tmp_path / "pets.protosteer"
    learner.save(path)
    return path


def test_reload_predicts_the_same_bits(learner, saved):
    images, _ = easy_task(["cat", "dog", "eel", "Fuß ☃"], seed=9)
    again = Learner.load(saved, backbone=tiny_backbone())
    before, after = learner.predict(images), again.predict(images)
    assert torch.equal(before.scores, after.scores) and before.labels == after.labels
    assert torch.equal(before.energy, after.energy) and before.candidates == after.candidates
    assert again.settings == learner.settings and again.classes == learner.classes


def test_a_file_with_a_retired_setting_is_read(learner, monkeypatch, tmp_path):
    path, todays = tmp_path / "old.protosteer", Settings.to_dict
    monkeypatch.setattr(Settings, "to_dict", lambda self: {**todays(self), "cached_views": 4})
    learner.save(path)
    monkeypatch.undo()
    assert b"cached_views" in path.read_bytes()
    assert Learner.load(path, backbone=tiny_backbone()).settings == learner.settings


def test_learning_goes_on_after_reload_as_if_never_saved(learner, saved):
    again = Learner.load(saved, backbone=tiny_backbone())
    for one in (learner, again):
        one.learn(easy_task(["gnu"]), name="third")
    pairs = zip(learner.memory.tasks[-1].tensors(), again.memory.tasks[-1].tensors(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def test_another_backbone_is_refused_by_fingerprint(saved):
    with expect_error("other-backbone", ModelFileError, path=saved, name="tiny"):
        Learner.load(saved, backbone=tiny_backbone(seed=1))


def test_another_preprocessing_is_refused(saved):
    other = tiny_backbone()
    other.preprocessing = Preprocessing(16, (0.4, 0.4, 0.4), (0.5, 0.5, 0.5))
    with expect_error("other-preprocessing", ModelFileError):
        Learner.load(saved, backbone=other)


def test_a_backbone_that_cannot_be_found_is_named(saved, monkeypatch, tmp_path):
    monkeypatch.setenv("PROTOSTEER_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with expect_error("backbone-not-found", ModelFileError, name="tiny"):
        Learner.load(saved)


def test_nano_is_found_by_its_name(tmp_path):
    learner = Learner(Backbone.load("nano"), QUICK)
    learner.learn(easy_task(["cat", "dog"]))
    learner.save(tmp_path / "m.protosteer")
    images, _ = easy_task(["cat", "dog"], seed=3)
    expected = learner.predict(images).scores
    assert torch.equal(Learner.load(tmp_path / "m.protosteer").predict(images).scores, expected)


def test_a_link_stays_one_and_the_file_behind_it_changes(learner, saved):
    link = saved.with_name("link.protosteer")
    link.symlink_to(saved.name)
    learner.forget("cat")
    learner.save(link)
    assert link.is_symlink() and "cat" not in model_file.read(saved).memory.classes


def test_a_newer_format_is_refused_with_the_version_that_wrote_it(saved):
    header, tensors = unpack_tensors(saved.read_bytes(), "pets")
    saved.write_bytes(pack_tensors({**header, "format": 6}, tensors))
    with expect_error("unknown-format", ModelFileError, path=saved, format=6):
        model_file.read(saved)


def test_header_is_readable_json_without_machine_paths_of_shipped_weights(saved):
    data = saved.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["protosteer"])["header"]
    assert header["backbone"]["name"] == "tiny" and header["backbone"]["weights"] is None
    assert [task["classes"] for task in header["tasks"]] == [["cat", "dog"], ["Fuß ☃", "eel"]]


@pytest.fixture
def weights_file(tmp_path):
    """nano's weights in a place of the user's own."""
    path = tmp_path / "mine.safetensors"
    path.write_bytes(find_weights("nano").read_bytes())
    return path


def test_the_weights_are_found_where_they_were(weights_file, tmp_path):
    learner = Learner(Backbone.load("my own", weights=weights_file, crop=0.9), QUICK.replace(prompts=False))
    learner.learn(easy_task(["cat", "dog"]))
    learner.save(tmp_path / "m.protosteer")
    model = model_file.read(tmp_path / "m.protosteer")
    assert model.backbone["weights"] == str(weights_file.resolve())
    for name in (None, "my own"):
        found = model.backbone_for(model.load_backbone(name))
        assert found.fingerprint == learner.backbone.fingerprint and found.preprocessing.crop == 0.9
    moved = weights_file.rename(tmp_path / "moved.safetensors")
    assert model.backbone_for(model.load_backbone(weights=moved)).source == moved
    with expect_error("backbone-not-found", ModelFileError, name="my own"):
        model.backbone_for(None)


def test_a_backbone_that_is_asked_for_is_not_replaced_by_the_hint(weights_file, tmp_path):
    learner = Learner(Backbone.load("my own", weights=weights_file), QUICK.replace(prompts=False))
    learner.learn(easy_task(["cat", "dog"]))
    learner.save(tmp_path / "m.protosteer")
    model = model_file.read(tmp_path / "m.protosteer")
    assert model.load_backbone().source == weights_file.resolve()
    assert model.load_backbone("nano").source == find_weights("nano")
