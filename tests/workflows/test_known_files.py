"""Photographs of classes that a model has already: new ones make them grow, old ones are left out."""

import shutil

import pytest
import torch

from expect import expect_error
from photo_toys import EVIDENCE, QUICK, file_bytes, photos, taught
from protosteer.errors import LearnerError
from protosteer.learner import Learner
from protosteer.settings import Settings
from protosteer.workflows.folder_scan import scan_folder
from protosteer.workflows.learn_folder import learn_folder

INSTANT = Settings.preset("instant")


@pytest.fixture
def spring(tmp_path):
    return photos(tmp_path / "spring", ["ant", "bee"], 8)


def test_a_folder_that_was_learned_has_nothing_new(spring):
    learner = taught(spring, settings=INSTANT)
    found = scan_folder(spring, learner.memory)
    assert not len(found.files) and len(found.already_learned) == 16 and found.known.keys() == {"ant", "bee"}
    with expect_error("no-new-images", LearnerError, path=spring):
        learn_folder(learner, found)
    assert learner.tasks == ["spring"]


def test_new_images_of_a_known_class_and_a_new_class_make_one_task(spring, tmp_path):
    learner = taught(spring, settings=INSTANT)
    more = photos(tmp_path / "more", ["bee", "cat"], 6, seed=1)
    shutil.copy(spring / "bee" / "00.png", more / "bee" / "a copy.png")
    shutil.copy(spring / "ant" / "00.png", more / "cat" / "no cat.png")
    found = scan_folder(more, learner.memory)
    assert found.counts == {"bee": 6, "cat": 7} and found.already_learned == [more / "bee" / "a copy.png"]
    assert found.learned_as_other_class == {more / "cat" / "no cat.png": "ant"} and found.known == {"bee": ["spring"]}
    taught_ = learn_folder(learner, found, holdout=0)
    assert learner.classes == ["ant", "bee", "cat"] and taught_.record.class_names == ["bee", "cat"]
    assert learner.memory.owners["bee"] == ["spring", "more"]
    assert [record.images for record in taught_.record.classes] == [6, 7]
    assert not len(scan_folder(more, learner.memory).files)


def test_what_was_seen_is_in_the_file_and_goes_with_the_class(spring, tmp_path):
    learner = taught(spring, settings=INSTANT)
    learner.save(tmp_path / "m.protosteer")
    read = Learner.load(tmp_path / "m.protosteer", learner.backbone)
    for mine, theirs in zip(learner.memory.records, read.memory.records, strict=True):
        assert len(mine.file_digests) == 8 and torch.equal(mine.file_digests, theirs.file_digests)
    read.forget("ant")
    assert scan_folder(spring, read.memory).counts == {"ant": 8}


def test_a_model_from_before_digests_were_kept_takes_images_again(spring):
    learner = Learner(taught(spring).backbone, INSTANT)
    learner.learn(spring)
    assert learner.memory.records[0].file_digests is None
    assert scan_folder(spring, learner.memory).counts == {"ant": 8, "bee": 8}


def test_an_unfinished_task_goes_on_though_its_images_were_seen(spring, tmp_path):
    before, settings = taught(spring, settings=EVIDENCE), EVIDENCE
    summer = photos(tmp_path / "summer", ["bee", "cat"], 8, seed=2)
    left: list[Learner] = []
    finished = before.copy()
    learn_folder(finished, scan_folder(summer, before.memory), on_usable=lambda learner, _: left.append(learner))
    (usable,) = left
    assert usable.memory.tasks[1].metadata.unfinished and usable.memory.tasks[1].classes[0].file_digests is not None
    found = scan_folder(summer, usable.memory)
    assert found.counts == {"bee": 8, "cat": 8} and not found.already_learned and found.known == {"bee": ["spring"]}
    learn_folder(usable, found)
    assert usable.settings == settings and file_bytes(usable, tmp_path) == file_bytes(finished, tmp_path)


def test_by_the_papers_rule_a_class_grows_too(spring, tmp_path):
    learner = taught(spring)
    learn_folder(learner, scan_folder(photos(tmp_path / "more", ["bee"], 6, seed=1), learner.memory))
    assert learner.memory.tasks[1].prompt is not None  # against ant's prototypes
    assert learner.settings == QUICK and len(learner.predict(spring / "bee")) == 8
