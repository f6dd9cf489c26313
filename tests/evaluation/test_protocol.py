"""The protocol's matrix against the naive way, and what an evaluation may know."""

from __future__ import annotations

import pytest
import torch

from conftest import easy_task, tiny_backbone
from protosteer.data.images import ArrayImages
from protosteer.evaluation.protocol import run_stream
from protosteer.learner import Learner
from protosteer.methods.cpp import CPP
from protosteer.settings import Settings
from protosteer.streams.base import Stream, Task

QUICK = Settings(epochs=2, batch_size=8, neck_hidden=16, augmentation="crop", centroids=2)
GROUPS = [["ant", "bee"], ["cat", "dog", "eel"], ["fox"], ["gnu", "hen"]]


def stream(tasks: int = 4) -> Stream:
    """Unequal tasks; test images are noisier than training images, so that not all are classified."""
    made = []
    for classes in GROUPS[:tasks]:
        train, train_labels = easy_task(classes)
        test, test_labels = easy_task(classes, per_class=5, seed=70)
        noise = torch.randint(-60, 60, test.shape, generator=torch.Generator().manual_seed(len(made)))
        test = (test.int() + noise).clamp(0, 255).to(torch.uint8)
        made.append(
            Task(classes[0], classes, ArrayImages(train), train_labels, ArrayImages(test), test_labels)
        )
    return Stream("easy", made)


def naive_matrix(settings: Settings, tasks: Stream) -> tuple[list[list[float]], int]:
    """Learn and predict everything anew after every task, as if nothing were cached."""
    learner, matrix, passes = Learner(tiny_backbone(), settings), [], 0
    for i, task in enumerate(tasks):
        learner.learn((task.train, task.train_labels), name=task.name)
        row = []
        for earlier in tasks[: i + 1]:
            prediction = learner.predict(earlier.test)
            hits = sum(a == b for a, b in zip(prediction.labels, earlier.test_labels, strict=True))
            row.append(100.0 * hits / len(earlier.test_labels))
            passes += len(earlier.test_labels)
            if settings.prompts:
                passes += sum(len(candidates) for candidates in prediction.candidates)
        matrix.append(row)
    return matrix, passes


@pytest.mark.parametrize("prompts", [True, False])
def test_matrix_equals_the_naive_one_with_fewer_forward_passes(prompts):
    settings, tasks = QUICK.replace(prompts=prompts), stream()
    run = run_stream(CPP(tiny_backbone(), settings), tasks)
    matrix, passes = naive_matrix(settings, tasks)
    for ours, theirs in zip(run.matrix, matrix, strict=True):
        assert ours == theirs
    figures, images = run.figures(), sum(len(task.test) for task in tasks)
    assert figures["naive_forward_passes"] == passes > figures["forward_passes"]
    assert figures["forward_passes"] <= images * (1 + len(tasks) * prompts)
    assert any(a < 100 for row in run.matrix for a in row), "an easier stream would test nothing"


def test_an_evaluation_knows_nothing_learned_later():
    """Row i of a long run is row i of a run that ended there."""
    long = run_stream(CPP(tiny_backbone(), QUICK), stream(4))
    short = run_stream(CPP(tiny_backbone(), QUICK), stream(2))
    assert long.matrix[:2] == short.matrix
    for ours, theirs in zip(long.rows, short.rows, strict=False):
        assert ours.prompts_per_image == theirs.prompts_per_image
        assert ours.retrieval_accuracy == theirs.retrieval_accuracy


def test_figures_have_the_names_used_everywhere():
    run = run_stream(CPP(tiny_backbone(), QUICK), stream(2))
    assert {
        "last_accuracy", "avg_accuracy", "last_forgetting", "avg_forgetting", "prompts_per_image",
        "retrieval_accuracy", "bytes_per_task", "bytes_per_class", "train_seconds", "eval_seconds",
        "forward_passes", "naive_forward_passes", "last_image_accuracy",
        "avg_image_accuracy", "trained_parameters",
    } <= run.figures().keys()  # fmt: skip
    assert run.figures()["bytes_per_task"] * 2 == run.figures()["bytes_per_class"] * 5


@pytest.mark.parametrize("prompts", [True, False])
def test_diagnosis_accounts_for_every_image(prompts):
    run = run_stream(CPP(tiny_backbone(), QUICK.replace(prompts=prompts)), stream())
    assert run.diagnosis is not None
    for row, accuracy in zip(run.diagnosis.tasks, run.matrix[-1], strict=True):
        assert row.accuracy == pytest.approx(accuracy)
        bins = row.not_retrieved + row.wrong_prompt_won + row.wrong_class
        assert row.accuracy + bins == pytest.approx(100, abs=1e-3)
        assert row.true_task_with_prompt >= row.accuracy - 1e-3 or prompts
        assert 0 < row.key_spread <= 1 and 0 < row.value_spread <= 1
    assert run.diagnosis.mean()["accuracy"] == pytest.approx(run.figures()["last_accuracy"])
    if not prompts:
        assert all(row.wrong_prompt_won == 0 for row in run.diagnosis.tasks)
        assert all(row.key_spread == row.value_spread for row in run.diagnosis.tasks)


def test_retrieval_and_prompts_per_image_are_those_of_prediction():
    tasks = stream()
    run = run_stream(CPP(tiny_backbone(), QUICK.replace(neighbours=1)), tasks)
    learner = Learner(tiny_backbone(), QUICK.replace(neighbours=1))
    for i, task in enumerate(tasks):
        learner.learn((task.train, task.train_labels), name=task.name)
        tried, found = [], []
        for earlier in tasks[: i + 1]:
            for candidates in learner.predict(earlier.test).candidates:
                tried.append(len(candidates))
                found.append(earlier.name in candidates)
        assert run.rows[i].prompts_per_image == sum(tried) / len(tried)
        assert run.rows[i].retrieval_accuracy == pytest.approx(100 * sum(found) / len(found))
    assert run.rows[-1].retrieval_accuracy < 100, "an easier stream would test nothing"
