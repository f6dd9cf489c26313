"""The example is the method: the demo's figure, and what a learner makes of the same images, bit for bit."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from conftest import REPOSITORY, easy_task, tiny_backbone
from examples import cpp_minimal
from photo_toys import photos
from protosteer import Learner, Settings
from protosteer.data.images import ArrayImages

QUICK = Settings.preset("paper", epochs=2, batch_size=8, neck_hidden=16, augmentation="crop")


@pytest.mark.slow
def test_the_digits_give_the_demos_cpp_figure() -> None:
    metrics = cpp_minimal.main([])
    assert metrics["last_accuracy"] == pytest.approx(97.21, abs=0.005)
    assert metrics["last_forgetting"] == pytest.approx(1.38, abs=0.005)
    assert list(metrics) == ["last_accuracy", "avg_accuracy", "last_forgetting", "avg_forgetting"]


@pytest.mark.parametrize("settings", [QUICK, QUICK.replace(noise="class", prompt_start="zero")])
def test_prompts_prototypes_and_predictions_are_a_learners(settings: Settings) -> None:
    backbone = tiny_backbone()
    cpp, learner = cpp_minimal.CPP(backbone, settings), Learner(backbone, settings)
    for classes in (["ant", "bee"], ["cat", "dog"]):
        pixels, labels = easy_task(classes)
        cpp.learn(ArrayImages(pixels), labels)
        learner.learn((pixels, labels))
    tasks = learner.memory.tasks
    assert all(torch.equal(a, b.prompt) for a, b in zip(cpp.prompts, tasks, strict=True))
    records = [record for task in tasks for record in task.classes]
    assert cpp.classes == [record.name for record in records]
    assert all(torch.equal(a.means, b.keys) for a, b in zip(cpp.keys, records, strict=True))
    assert all(torch.equal(a.means, b.values.means) for a, b in zip(cpp.values, records, strict=True))
    test, _ = easy_task(["ant", "bee", "cat", "dog"])
    assert cpp.predict(ArrayImages(test)) == learner.predict(test).labels


def test_a_folder_of_class_folders_is_learned(tmp_path: Path) -> None:
    folder = photos(tmp_path, ["ant", "bee", "cat", "dog"])
    metrics = cpp_minimal.main([str(folder), "--backbone", "nano", "--tasks", "2"])
    assert 0 <= metrics["last_accuracy"] <= 100


def test_accuracy_and_forgetting_are_the_definitions() -> None:
    metrics = cpp_minimal.summarise([[90.0], [80.0, 70.0], [85.0, 60.0, 50.0]])
    assert metrics == {
        "last_accuracy": 65.0,
        "avg_accuracy": pytest.approx((90 + 75 + 65) / 3),
        "last_forgetting": 7.5,  # 90 - 85 and 70 - 60
        "avg_forgetting": 8.75,
    }


def test_it_is_short_and_needs_the_paper_and_images_alone() -> None:
    text = (REPOSITORY / "examples" / "cpp_minimal.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    modules = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    ours = {name for name in modules if name and name.startswith("protosteer.")}
    assert all(name.startswith(("protosteer.paper.", "protosteer.data.")) for name in ours - {"protosteer.streams"})
