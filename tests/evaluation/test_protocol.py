"""The protocol's matrix against the naive way, and what an evaluation may know."""

import pytest
import torch
from protocol_toys import QUICK, blurred, stream

from conftest import tiny_backbone
from expect import expect_error
from protosteer.errors import SettingsError
from protosteer.evaluation.protocol import Run, run_stream
from protosteer.learner import Learner
from protosteer.methods.cpp import CPP
from protosteer.methods.ncm import NCM
from protosteer.settings import Settings
from protosteer.streams.base import Stream
from protosteer.util import statistics


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
            passes += int(prediction.passes.sum())
        matrix.append(row)
    return matrix, passes


@pytest.mark.parametrize("rule", ["paper", "evidence"])
@pytest.mark.parametrize("prompts", [True, False])
def test_matrix_equals_the_naive_one_with_fewer_forward_passes(prompts, rule):
    settings, tasks = QUICK.replace(prompts=prompts, rule=rule), stream()
    run = run_stream(CPP(tiny_backbone(), settings), tasks)
    matrix, passes = naive_matrix(settings, tasks)
    for ours, theirs in zip(run.matrix, matrix, strict=True):
        assert ours == theirs
    figures, images = run.figures(), sum(len(task.test) for task in tasks)
    assert figures["naive_forward_passes"] == passes > figures["forward_passes"]
    assert figures["forward_passes"] <= images * (1 + len(tasks) * prompts)
    assert any(a < 100 for row in run.matrix for a in row), "an easier stream would test nothing"


@pytest.mark.parametrize("rule", ["paper", "evidence"])
def test_where_boundaries_are_blurry_all_classes_seen_are_tested(rule):
    """Those of later tasks too if an image of theirs has come: not in the matrix, but in what is messages of all."""
    settings, tasks = QUICK.replace(rule=rule, neighbours=1), blurred(stream(3))
    run = run_stream(CPP(tiny_backbone(), settings), tasks)
    learner, seen, anytime, learned = Learner(tiny_backbone(), settings), set(), 0.0, 0
    for i, task in enumerate(tasks):
        learner.learn((task.train, task.train_labels), name=task.name)
        seen |= set(task.train_labels)
        right, found, row = [], [], run.rows[i]
        for j, other in enumerate(tasks):
            messages = learner.predict(other.test)
            own = [a == b for a, b in zip(messages.labels, other.test_labels, strict=True)]
            if j <= i:
                assert row["accuracy"][j] == 100.0 * sum(own) / len(own)
            for hit, label, tried in zip(own, other.test_labels, messages.candidates, strict=True):
                if label in seen:
                    right.append(hit)
                    found.append(any(name in tried for name in learner.memory.owners[label]))
        assert len(row["accuracy"]) == i + 1 and row["seen_images"] == len(right)
        assert row["seen_accuracy"] == pytest.approx(100 * sum(right) / len(right))
        if rule == "paper":
            assert row["retrieval_accuracy"] == pytest.approx(100 * sum(found) / len(found))
        anytime, learned = anytime + row["seen_accuracy"] * len(task.train), learned + len(task.train)
    assert run.rows[0]["seen_images"] > len(tasks[0].test) and any(a < 100 for a in run.matrix[-1])
    figures = run.figures()
    assert figures["anytime_accuracy"] == pytest.approx(anytime / learned)
    away = sum(label in t.visiting for t in tasks for label in t.train_labels)
    assert figures["blurred_images"] == pytest.approx(100 * away / learned)
    assert [row["seen_accuracy"] for row in run.to_dict()["after_each_task"]] == [
        row["seen_accuracy"] for row in run.rows
    ]


def test_blurry_streams_are_rejected_by_methods_without_repeated_classes():
    class Once(NCM):
        supports_repeated_classes = False

    with expect_error("no-repeated-classes", SettingsError, method="ncm"):
        run_stream(Once(tiny_backbone(), NCM.settings_class()), blurred(stream(2)))


def test_without_visitors_anytime_accuracy_is_over_images():
    tasks = stream(3)
    run = run_stream(NCM(tiny_backbone(), NCM.settings_class()), tasks)
    after = [row["accuracy_over_images"] for row in run.to_dict()["after_each_task"]]
    counts = [len(task.train) for task in tasks]
    expected = sum(a * n for a, n in zip(after, counts, strict=True)) / sum(counts)
    assert run.figures()["anytime_accuracy"] == pytest.approx(expected) != run.figures()["avg_image_accuracy"]
    assert "blurred_images" not in run.figures() and "seen_accuracy" not in run.rows[0]


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
        "forward_passes", "naive_forward_passes", "last_image_accuracy", "passes_per_image", "calibration_error",
        "avg_image_accuracy", "trained_parameters",
    } <= run.figures().keys()  # fmt: skip
    assert run.figures()["bytes_per_task"] * 2 == run.figures()["bytes_per_class"] * 5


@pytest.mark.parametrize("rule", ["paper", "evidence"])
def test_rows_report_what_predictions_do(rule):
    """Passes, prompts, retrieved tasks and calibration, against a learner that predicts everything anew."""
    settings, tasks = QUICK.replace(rule=rule, neighbours=1), stream()
    run = run_stream(CPP(tiny_backbone(), settings), tasks)
    learner, passes, images = Learner(tiny_backbone(), settings), 0, 0
    for i, (task, row) in enumerate(zip(tasks, run.rows, strict=True)):
        learner.learn((task.train, task.train_labels), name=task.name)
        parts = [learner.predict(earlier.test) for earlier in tasks[: i + 1]]
        made = torch.cat([part.passes for part in parts])
        sure = torch.cat([part.probabilities.amax(dim=1) for part in parts])
        labels = [label for part in parts for label in part.labels]
        truth = [label for earlier in tasks[: i + 1] for label in earlier.test_labels]
        right = torch.tensor([a == b for a, b in zip(labels, truth, strict=True)])
        found = [t.name in tried for t, part in zip(tasks, parts, strict=False) for tried in part.candidates]
        error = statistics.calibration_error(statistics.reliability(sure, right))
        assert row["passes_per_image"] == pytest.approx(float(made.double().mean()))
        assert row["prompts_per_image"] == pytest.approx(float(made.double().mean()) - 1)
        assert row["calibration_error"] == pytest.approx(error, abs=1e-3)
        if rule == "paper":
            assert row["retrieval_accuracy"] == pytest.approx(100 * sum(found) / len(found))
        passes, images = passes + int(made.sum()), images + len(made)
    figures = run.figures()
    assert figures["overall_passes_per_image"] == pytest.approx(passes / images)
    assert figures["overall_prompts_per_image"] == pytest.approx(passes / images - 1)
    assert figures["calibration_error"] == run.rows[-1]["calibration_error"] > 0
    assert (figures["retrieval_accuracy"] is None) == (rule == "evidence")
    assert rule == "evidence" or figures["retrieval_accuracy"] < 100, "an easier stream would test nothing"
    bins = run.to_dict()["reliability"]
    assert sum(b["images"] for b in bins) == sum(run.test_images)
    assert not any("reliability" in row for row in run.to_dict()["after_each_task"])


def test_a_method_without_confidences_has_no_calibration():
    figures = run_stream(NCM(tiny_backbone(), NCM.settings_class()), stream(2)).to_dict()
    assert figures["calibration_error"] is None and figures["reliability"] is None
    assert figures["passes_per_image"] == figures["overall_passes_per_image"] == 1


def test_rows_of_an_older_version_lack_what_it_did_not_measure():
    rows = run_stream(CPP(tiny_backbone(), QUICK), stream(2)).rows
    new = ("passes_per_image", "calibration_error", "reliability")
    old = [{name: value for name, value in row.items() if name not in new} for row in rows]
    for known in (old, [old[0], rows[1]]):
        figures = Run([10, 15], [2, 3], [16, 24], known).to_dict()
        assert figures["overall_passes_per_image"] is None and figures["overall_prompts_per_image"]
        assert (figures["calibration_error"] is None) == (figures["reliability"] is None) == (known is old)
