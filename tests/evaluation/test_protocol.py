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
        for name in ("prompts_per_image", "retrieval_accuracy"):
            assert ours[name] == theirs[name]


def test_figures_have_the_names_used_everywhere():
    run = run_stream(CPP(tiny_backbone(), QUICK), stream(2))
    assert {
        "last_accuracy", "avg_accuracy", "last_forgetting", "avg_forgetting", "prompts_per_image",
        "retrieval_accuracy", "bytes_per_task", "bytes_per_class", "train_seconds", "eval_seconds",
        "forward_passes", "naive_forward_passes", "last_image_accuracy",
        "avg_image_accuracy", "trained_parameters",
    } <= run.figures().keys()  # fmt: skip
    assert run.figures()["bytes_per_task"] * 2 == run.figures()["bytes_per_class"] * 5


def test_retrieval_and_prompts_per_image_are_those_of_prediction():
    tasks = stream()
    run = run_stream(CPP(tiny_backbone(), QUICK.replace(neighbours=1)), tasks)
    learner = Learner(tiny_backbone(), QUICK.replace(neighbours=1))
    ever = []
    for i, task in enumerate(tasks):
        learner.learn((task.train, task.train_labels), name=task.name)
        tried, found = [], []
        for earlier in tasks[: i + 1]:
            for candidates in learner.predict(earlier.test).candidates:
                tried.append(len(candidates))
                found.append(earlier.name in candidates)
        assert run.rows[i]["prompts_per_image"] == sum(tried) / len(tried)
        assert run.rows[i]["retrieval_accuracy"] == pytest.approx(100 * sum(found) / len(found))
        ever += tried
    assert run.figures()["overall_prompts_per_image"] == pytest.approx(sum(ever) / len(ever))
    assert run.rows[-1]["retrieval_accuracy"] < 100, "an easier stream would test nothing"


@pytest.mark.parametrize("prompts", [True, False])
def test_diagnosis_agrees_with_a_twin_that_looks_at_one_image_after_the_other(prompts):
    tasks = stream()
    method = CPP(tiny_backbone(), QUICK.replace(prompts=prompts, neighbours=2))
    run = run_stream(method, tasks)
    records, backbone = method.learner.memory.tasks, method.backbone
    assert run.diagnosis is not None
    bins_used = set()
    for j, (task, row) in enumerate(zip(tasks, run.diagnosis["tasks"], strict=True)):
        names = ("accuracy", "not_retrieved", "wrong_prompt_won", "wrong_class")
        found = dict.fromkeys((*names, "true_task_with_prompt", "true_task_without_prompt"), 0)
        for i, label in enumerate(task.test_labels):
            pixels = task.test.pixels([i])
            query = backbone.embed_pixels(pixels)[0]
            keys = [
                (cosine(query, key), t) for t, r in enumerate(records) for c in r.classes for key in c.keys
            ]
            tried = {t for _, t in sorted(keys, reverse=True)[:2]}
            best = (-2.0, "", -1)
            for t in sorted(tried):
                seen = backbone.embed_pixels(pixels, records[t].prompt)[0]
                for record in records:
                    for known in record.classes:
                        best = max(best, *((cosine(seen, v), known.name, t) for v in known.values.means))
            outcome = "accuracy" if best[1] == label else "not_retrieved" if j not in tried else "wrong_class"
            if outcome == "wrong_class" and prompts and best[2] != j:
                outcome = "wrong_prompt_won"
            found[outcome] += 1
            own = backbone.embed_pixels(pixels, records[j].prompt)[0]
            inside = [(cosine(own, v), c.name) for c in records[j].classes for v in c.values.means]
            plain = [(cosine(query, k), c.name) for c in records[j].classes for k in c.keys]
            found["true_task_with_prompt"] += max(inside)[1] == label
            found["true_task_without_prompt"] += max(plain)[1] == label
            bins_used.add(outcome)
        for name, count in found.items():
            assert row[name] == pytest.approx(100 * count / len(task.test_labels)), name
        assert 0 < row["key_spread"] <= 1 and (row["key_spread"] == row["value_spread"]) != prompts
    assert run.diagnosis["mean"]["accuracy"] == pytest.approx(run.figures()["last_accuracy"])
    assert len(bins_used) >= 3, "a stream with other errors would test more"


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))
