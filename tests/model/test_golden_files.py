"""Model files that earlier versions wrote predict as they did: see golden/README.md."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from golden_toys import FOLDER, golden_backbone, numbers, queries
from protosteer.learner import Learner
from protosteer.prediction import Prediction
from protosteer.util.tensor_file import unpack_tensors
from protosteer.workflows import shared_prompt

GOLDEN: dict[str, dict[str, Any]] = json.loads((FOLDER / "golden.json").read_text())
TENSORS = ("scores", "probabilities", "energy")
every_file = pytest.mark.parametrize("name", GOLDEN)


def load(name: str, folder: Path = FOLDER) -> Learner:
    # The model of the first `mini` finds its weights by their fingerprint.
    return Learner.load(folder / f"{name}.protosteer", None if name == "mini-v1" else golden_backbone())


def assert_same_bits(one: Prediction, other: Prediction) -> None:
    assert all(torch.equal(getattr(one, part), getattr(other, part)) for part in (*TENSORS, "similarities"))
    assert (one.classes, one.labels, one.candidates) == (other.classes, other.labels, other.candidates)


def test_the_files_are_those_recorded_and_have_every_format():
    assert sorted(GOLDEN) == sorted(path.stem for path in FOLDER.glob("*.protosteer"))
    formats = {}
    for name in GOLDEN:
        header, _ = unpack_tensors((FOLDER / f"{name}.protosteer").read_bytes(), name)
        formats[name] = header["format"]
    assert formats == {name: golden["format"] for name, golden in GOLDEN.items()}
    assert set(formats.values()) == {1, 2, 3, 4, 5}


@every_file
def test_a_golden_file_predicts_as_recorded(name):
    golden, prediction = GOLDEN[name], load(name).predict(queries())
    assert prediction.classes == golden["classes"] and prediction.labels == golden["labels"]
    assert prediction.tasks == golden["tasks"] and prediction.candidates == golden["candidates"]
    assert prediction.passes.tolist() == golden["passes"]
    for part in TENSORS:
        torch.testing.assert_close(getattr(prediction, part), torch.tensor(golden[part]), atol=2e-4, rtol=5e-4)


@every_file
def test_a_golden_file_saved_again_predicts_the_same_bits(name, tmp_path):
    learner = load(name)
    learner.save(tmp_path / f"{name}.protosteer")
    saved = load(name, tmp_path)
    assert saved.settings == learner.settings and saved.tasks == learner.tasks
    assert_same_bits(saved.predict(queries()), learner.predict(queries()))


@every_file
def test_a_class_of_a_golden_file_can_be_forgotten(name, tmp_path):
    learner = load(name)
    rest = [other for other in learner.classes if other != "bee"]
    learner.forget("bee")
    prediction = learner.predict(queries())
    assert prediction.classes == learner.classes == rest and "bee" not in prediction.labels
    learner.save(tmp_path / f"{name}.protosteer")
    assert_same_bits(load(name, tmp_path).predict(queries()), prediction)


def test_what_a_file_says_of_its_tasks_is_read():
    about = {name: load(name).memory.tasks for name in GOLDEN}
    assert [t.few_shot for t in about["paper-few-shot"]] == [False, False, True]
    assert about["paper-few-shot"][2].classes[0].heldout_similarities is not None
    assert [t.metadata.unfinished for t in about["evidence-unfinished"]] == [None, None, True]
    corrections = about["evidence-corrected"][2:]
    assert [t.corrected_from for t in corrections] == ["ant", "ant"]
    assert all(len(t.classes[0].file_digests) == 1 for t in corrections)
    assert [t.shared_prompt is not None for t in about["evidence-merged"]] == [True, True, False]


def test_the_file_of_a_shared_prompt_is_read():
    adapted = shared_prompt.read(FOLDER / "shared-prompt.adapted")
    assert torch.equal(adapted.prompt_for(golden_backbone()), 0.3 * numbers(7, 2, 1, 12))
    assert (adapted.classes, adapted.images) == (["ant", "bee"], 24)
