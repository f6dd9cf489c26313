"""An adapted backbone: its file, whom it serves, and that models which share one stay exact."""

import hashlib
import itertools
from pathlib import Path

import pytest
import torch

from conftest import easy_task, tiny_backbone
from expect import expect_error
from photo_toys import EVIDENCE, file_bytes, photos
from protosteer.errors import LearnerError, ModelFileError, SettingsError
from protosteer.learner import Learner, merge
from protosteer.model import file as model_file
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.util.tensor_file import pack_tensors, unpack_tensors
from protosteer.workflows import shared_prompt
from protosteer.workflows.folder_scan import scan_folder
from protosteer.workflows.shared_prompt import Adapted, adapt

ALONE = EVIDENCE.replace(independent=True)


@pytest.fixture(scope="module")
def domain(tmp_path_factory) -> Path:
    return photos(tmp_path_factory.mktemp("a") / "domain", ["fly", "gnat", "moth"])


@pytest.fixture(scope="module")
def path(domain, tmp_path_factory) -> Path:
    """The file of an adapted backbone; never changed by a test."""
    path = tmp_path_factory.mktemp("b") / "my.backbone"
    adapt(tiny_backbone(), scan_folder(domain), EVIDENCE).write(path)
    return path


@pytest.fixture(scope="module")
def adapted(path) -> Adapted:
    return shared_prompt.read(path)


def test_the_prompt_is_that_of_a_first_task(domain, adapted):
    learner = Learner(tiny_backbone(), EVIDENCE)
    record = learner.learn(domain)
    assert torch.equal(adapted.prompt, record.prompt)
    assert adapted.classes == ["fly", "gnat", "moth"] and adapted.images == 24
    assert adapted.settings == EVIDENCE and adapted.backbone["name"] == "tiny"


def test_its_fingerprint_is_of_backbone_and_prompt(adapted):
    data = adapted.backbone["fingerprint"].encode() + adapted.prompt.numpy().tobytes()
    assert adapted.fingerprint == hashlib.sha256(data).hexdigest() == adapted.describe()["fingerprint"]


def test_training_that_was_interrupted_goes_on(tmp_path, domain, adapted):
    checkpoint = CheckpointFile(tmp_path / "b.part", seconds=0)

    def stop(stage):
        if stage.training and stage.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapt(tiny_backbone(), scan_folder(domain), EVIDENCE, stop, checkpoint)
    steps = []
    again = adapt(tiny_backbone(), scan_folder(domain), EVIDENCE, steps.append, checkpoint)
    assert torch.equal(again.prompt, adapted.prompt)
    assert next(stage.done for stage in steps if stage.training) == 3


def test_nothing_to_train_is_said_before_any_work(tmp_path, domain):
    with expect_error("one-class", LearnerError, path=tmp_path / "x"):
        adapt(tiny_backbone(), scan_folder(photos(tmp_path / "x", ["ant"])), EVIDENCE)
    with expect_error("prompts-off", SettingsError):
        adapt(tiny_backbone(), scan_folder(domain), EVIDENCE.replace(prompts=False))


# Files


def changed(path: Path, change) -> bytes:
    header, tensors = unpack_tensors(path.read_bytes(), "x")
    change(header, tensors)
    return pack_tensors(header, tensors)


@pytest.mark.parametrize(
    "change",
    [
        lambda header, tensors: header.update(fingerprint="0" * 64),
        lambda header, tensors: header.update(classes=[1, 2]),
        lambda header, tensors: header.update(classes=3),
        lambda header, tensors: header.update(images="many"),
        lambda header, tensors: header["backbone"].pop("name"),
        lambda header, tensors: header["settings"].update(epochs=-1),
        lambda header, tensors: tensors.pop("prompt"),
        lambda header, tensors: tensors.update(prompt=tensors["prompt"][:, :, :5]),
        lambda header, tensors: tensors.update(prompt=tensors["prompt"].repeat(5, 1, 1)),
        lambda header, tensors: tensors.update(prompt=tensors["prompt"].double()),
    ],
)
def test_forged_files_are_refused_in_one_line(path, tmp_path, change):
    forged = tmp_path / "x.backbone"
    forged.write_bytes(changed(path, change))
    with pytest.raises(ModelFileError) as caught:
        shared_prompt.read(forged)
    assert "\n" not in str(caught.value)


def test_other_files_are_told_apart(path, tmp_path):
    model, none = tmp_path / "m.protosteer", tmp_path / "none"
    learner = Learner(tiny_backbone(), EVIDENCE)
    learner.learn(easy_task(["ant", "bee"]))
    learner.save(model)
    with expect_error("not-adapted-backbone", ModelFileError, path=model):
        shared_prompt.read(model)
    with expect_error("no-adapted-backbone", ModelFileError, path=none):
        shared_prompt.read(none)
    with pytest.raises(ModelFileError, match="is a shared prompt, not a model"):
        model_file.read(path)
    newer = tmp_path / "new.backbone"
    newer.write_bytes(changed(path, lambda header, tensors: header.update({model_file.ADAPTED: 2})))
    with expect_error("not-adapted-backbone", ModelFileError, path=newer):
        shared_prompt.read(newer)
    assert [shared_prompt.is_adapted(p) for p in (path, newer, model, none)] == [True, True, False, False]


# Whom it serves


def test_another_backbone_is_refused(adapted):
    assert adapted.prompt_for(tiny_backbone()) is adapted.prompt
    with pytest.raises(ModelFileError, match="not with 'tiny'"):
        adapted.prompt_for(tiny_backbone(seed=1))


def test_a_learner_must_have_begun_with_it(adapted):
    adapted.check_used(Learner(tiny_backbone(), EVIDENCE, adapted.prompt))
    begun = Learner(tiny_backbone(), EVIDENCE, adapted.prompt)
    begun.learn(easy_task(["ant", "bee"]))
    adapted.check_used(begun)
    other = Learner(tiny_backbone(), EVIDENCE)
    other.learn(easy_task(["ant", "bee"]))
    with expect_error("learned-without-shared-prompt", LearnerError):
        adapted.check_used(other)
    with expect_error("rule-without-shared-prompt", SettingsError):
        adapted.check_used(Learner(tiny_backbone(), EVIDENCE.replace(rule="paper"), adapted.prompt))


TASKS = {"spring": ["ant", "bee"], "summer": ["cat", "dog"]}


def learned(adapted: Adapted, *names: str) -> Learner:
    backbone = tiny_backbone()
    learner = Learner(backbone, ALONE, adapted.prompt_for(backbone))
    for name in names:
        learner.learn(easy_task(TASKS[name]), name=name)
    return learner


def test_independent_models_of_one_adapted_backbone_merge_exactly(adapted, tmp_path):
    """To the bit, and whatever the order of tasks; only the columns stand in another order."""
    images, _ = easy_task([*TASKS["spring"], *TASKS["summer"], "yak"], seed=4)
    outcomes = []
    for order in itertools.permutations(TASKS):
        merged, whole = merge(*(learned(adapted, name) for name in order)), learned(adapted, *order)
        assert torch.equal(merged.shared_prompt, adapted.prompt)
        assert file_bytes(merged, tmp_path) == file_bytes(whole, tmp_path)
        prediction = merged.predict(images)
        columns = torch.tensor([prediction.classes.index(name) for name in sorted(prediction.classes)])
        outcomes.append((prediction.labels, prediction.scores[:, columns]))
    (labels, scores), (others, swapped) = outcomes
    assert labels == others and torch.equal(scores, swapped)


def test_forgetting_stays_exact_relative_to_it(adapted, tmp_path):
    """The prompt for all classes is no task's: what remains is as if the other had never been learned."""
    learner = learned(adapted, "spring", "summer")
    outcome = learner.forget(task="spring")
    assert outcome.exact
    assert file_bytes(learner, tmp_path) == file_bytes(learned(adapted, "summer"), tmp_path)
