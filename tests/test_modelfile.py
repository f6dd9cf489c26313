from __future__ import annotations

import json
import os
import struct

import pytest
import torch

from conftest import easy_task, tiny_backbone
from protosteer import modelfile
from protosteer.backbones import Backbone
from protosteer.data.transforms import Preprocessing
from protosteer.errors import ModelFileError
from protosteer.learner import Learner
from protosteer.settings import Settings

QUICK = Settings(epochs=2, batch_size=8, neck_hidden=16, augmentation="none", centroids=2)


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


def test_saving_what_was_loaded_gives_the_same_file(saved, tmp_path):
    Learner.load(saved, backbone=tiny_backbone()).save(tmp_path / "again.protosteer")
    assert (tmp_path / "again.protosteer").read_bytes() == saved.read_bytes()


def test_learning_goes_on_after_reload_as_if_never_saved(learner, saved):
    again = Learner.load(saved, backbone=tiny_backbone())
    for one in (learner, again):
        one.learn(easy_task(["gnu"]), name="third")
    pairs = zip(learner.memory.tasks[-1].tensors(), again.memory.tasks[-1].tensors(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def test_another_backbone_is_refused_by_fingerprint(saved):
    with pytest.raises(ModelFileError, match="was learned with backbone 'tiny'"):
        Learner.load(saved, backbone=tiny_backbone(seed=1))


def test_another_preprocessing_is_refused(saved):
    other = tiny_backbone()
    other.preprocessing = Preprocessing(16, (0.4, 0.4, 0.4), (0.5, 0.5, 0.5))
    with pytest.raises(ModelFileError, match="preprocessing"):
        Learner.load(saved, backbone=other)


def test_a_backbone_that_cannot_be_found_is_named(saved, monkeypatch, tmp_path):
    monkeypatch.setenv("PROTOSTEER_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelFileError, match="needs backbone 'tiny'.*backbone="):
        Learner.load(saved)


def test_nano_is_found_by_its_name(tmp_path):
    learner = Learner(Backbone.load("nano"), QUICK)
    learner.learn(easy_task(["cat", "dog"]))
    learner.save(tmp_path / "m.protosteer")
    images, _ = easy_task(["cat", "dog"], seed=3)
    expected = learner.predict(images).scores
    assert torch.equal(Learner.load(tmp_path / "m.protosteer").predict(images).scores, expected)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_files_are_refused(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match="truncated or not a model file"):
        modelfile.read(saved)


def test_every_altered_byte_is_noticed(saved):
    good = saved.read_bytes()
    step = max(1, len(good) // 60)
    for place in range(0, len(good), step):
        bad = bytearray(good)
        bad[place] ^= 0x04
        saved.write_bytes(bad)
        with pytest.raises(ModelFileError):
            modelfile.read(saved)


def test_other_safetensors_and_missing_files_are_named(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(ModelFileError, match="not a protosteer model"):
        modelfile.read(tmp_path / "x.safetensors")
    with pytest.raises(ModelFileError, match="no model file .*none"):
        modelfile.read(tmp_path / "none")


def test_a_newer_format_is_refused_with_the_version_that_wrote_it(saved, monkeypatch):
    monkeypatch.setattr(modelfile, "FORMAT", modelfile.FORMAT + 1)
    with pytest.raises(ModelFileError, match="has format 1, this version reads 2"):
        modelfile.read(saved)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(learner, saved, monkeypatch):
    old = saved.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    learner.forget("cat")
    with pytest.raises(OSError, match="disk full"):
        learner.save(saved)
    assert saved.read_bytes() == old
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_header_is_readable_json_without_machine_paths_of_shipped_weights(saved):
    data = saved.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["protosteer"])["header"]
    assert header["backbone"]["name"] == "tiny" and header["backbone"]["weights"] is None
    assert [task["classes"] for task in header["tasks"]] == [["cat", "dog"], ["Fuß ☃", "eel"]]
