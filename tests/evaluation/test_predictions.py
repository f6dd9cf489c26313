"""Predictions of a run, image by image, against scikit-learn and against the rows they belong to."""

import numpy as np
import pytest
import torch
from protocol_toys import QUICK, stream
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from conftest import tiny_backbone
from expect import expect_error
from protosteer.errors import RunError
from protosteer.evaluation.predictions import TOP, Predictions
from protosteer.evaluation.protocol import run_stream
from protosteer.evaluation.seed_folder import SeedFolder
from protosteer.learner import Learner
from protosteer.methods.base import Answer
from protosteer.methods.cpp import CPP
from protosteer.methods.ncm import NCM


def random_predictions(images: int = 60, classes: int = 4) -> Predictions:
    draw = np.random.default_rng(0)
    actual, predicted = draw.integers(0, classes, (2, images), dtype=np.int32)
    return Predictions(np.array([f"c{k}" for k in range(classes + 1)]), actual // 2, actual, predicted)


def test_metrics_of_classes_are_those_of_scikit_learn() -> None:
    made = random_predictions()
    figures = made.by_class()
    labels = range(5)
    counts = confusion_matrix(made.actual, made.predicted, labels=labels)
    assert (made.confusion() == counts).all()
    precision, recall, f1, support = precision_recall_fscore_support(
        made.actual, made.predicted, labels=labels, zero_division=0
    )
    assert list(figures["classes"]) == ["c0", "c1", "c2", "c3"]  # c4 has no test image
    for k, found in enumerate(figures["classes"].values()):
        assert found == pytest.approx(
            {"precision": 100 * precision[k], "recall": 100 * recall[k], "f1": 100 * f1[k], "support": support[k]}
        )
    pairs = figures["confusion"]
    assert [p["images"] for p in pairs] == sorted((p["images"] for p in pairs), reverse=True)
    wrong = {(f"c{a}", f"c{p}"): n for (a, p), n in np.ndenumerate(counts) if a != p and n}
    assert {(p["actual"], p["predicted"]): p["images"] for p in pairs} == wrong


def test_a_file_gives_back_what_was_saved_and_equal_bytes(tmp_path) -> None:
    made = random_predictions()
    made.save(tmp_path / "a.npz")
    made.save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    again = Predictions.load(tmp_path / "a.npz")
    assert (again.predicted == made.predicted).all() and again.classes.tolist() == made.classes.tolist()
    assert again.confidence is None and again.top_scores is None
    (tmp_path / "a.npz").write_bytes(b"PK")
    for name in ("a.npz", "missing.npz"):
        with expect_error("no-predictions", RunError, path=tmp_path / name):
            Predictions.load(tmp_path / name)


@pytest.mark.parametrize(
    "changed",
    [
        {"actual": np.zeros(59, np.int32)},
        {"predicted": np.full(60, 5, np.int32)},
        {"predicted": np.full(60, -1, np.int32)},
        {"given_task": np.zeros(60)},
        {"confidence": np.full(60, np.nan, np.float32)},
        {"top_classes": np.zeros(60, np.int32)},
        {"classes": np.array(["\ud800", *"abcd"])},
        {"classes": np.arange(5)},
        {"top_scores": np.zeros((60, 10_000), np.float32)},  # few bytes in the file
        {"unknown": np.zeros(60)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_forged_file_is_rejected(tmp_path, monkeypatch, changed) -> None:
    monkeypatch.setattr("protosteer.evaluation.predictions.MAX_BYTES", 10**6)
    arrays = {name: array for name, array in vars(random_predictions()).items() if array is not None}
    np.savez_compressed(tmp_path / "a.npz", **(arrays | changed))
    with expect_error("no-predictions", RunError, path=tmp_path / "a.npz"):
        Predictions.load(tmp_path / "a.npz")


@pytest.mark.parametrize("rule", ["paper", "evidence"])
def test_a_run_stores_what_a_learner_predicts(tmp_path, rule) -> None:
    settings, tasks = QUICK.replace(rule=rule), stream(3)
    store = SeedFolder(tmp_path, ".protosteer")
    run = run_stream(CPP(tiny_backbone(), settings), tasks, store=store)
    learner = Learner(tiny_backbone(), settings)
    for i, task in enumerate(tasks):
        learner.learn((task.train, task.train_labels), name=task.name)
        found = store.predictions(i)
        predicted = [learner.predict(earlier.test) for earlier in tasks[: i + 1]]
        names = found.classes.tolist()
        assert names == tasks.classes
        assert [names[k] for k in found.predicted] == [label for part in predicted for label in part.labels]
        assert [names[k] for k in found.actual] == [label for t in tasks[: i + 1] for label in t.test_labels]
        probabilities = torch.cat([part.probabilities for part in predicted])
        top = probabilities.topk(min(TOP, len(learner.classes)), dim=1)
        torch.testing.assert_close(torch.from_numpy(found.top_scores), top.values, atol=1e-4, rtol=1e-3)
        assert (found.top_classes[:, 0] == found.predicted).all()
        # Among the classes of the true task alone, by brute force.
        for j, part in enumerate(predicted):
            own = [learner.classes.index(name) for name in tasks[j].classes]
            best = part.probabilities[:, own].argmax(dim=1)
            given = [names[k] for k in found.given_task[found.task == j]]
            assert given == [learner.classes[own[k]] for k in best]
    assert (run.predictions.predicted == found.predicted).all()
    right = [found.right[found.task == j] for j in range(3)]
    assert run.matrix[-1] == [100.0 * hits.sum() / len(hits) for hits in right]


def test_the_loss_of_every_epoch_is_recorded() -> None:
    run = run_stream(CPP(tiny_backbone(), QUICK), stream(2))
    for row in run.to_dict()["after_each_task"]:
        ((first, second),) = row["losses"]
        assert first > 0 and second > 0
    assert run_stream(NCM(tiny_backbone(), NCM.settings_class()), stream(2)).rows[0]["losses"] == []


def test_scores_of_several_centroids_are_those_of_the_nearest() -> None:
    tasks, method = stream(2), NCM(tiny_backbone(), NCM.settings_class(centroids=3))
    run = run_stream(method, tasks)
    assert (run.predictions.top_classes[:, 0] == run.predictions.predicted).all()
    assert run.predictions.confidence is None and run.rows[-1]["given_task_accuracy"][0] >= run.matrix[-1][0]


def test_a_method_without_scores_has_no_task_incremental_accuracy() -> None:
    class Silent(NCM):
        def answer(self, images):
            return Answer(super().answer(images).classes)

    run = run_stream(Silent(tiny_backbone(), NCM.settings_class()), stream(2))
    assert run.rows[-1]["given_task_accuracy"] is None and run.predictions.top_classes is None
