"""The face towards scikit-learn: its own checks on feature vectors, and images in its tools."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from conftest import easy_task, tiny_backbone
from expect import expect_error
from photo_toys import photos
from protosteer.backbones import Backbone
from protosteer.data.class_folders import read_folder
from protosteer.errors import DataError, SettingsError
from protosteer.learner import Learner
from protosteer.settings import Settings
from protosteer.sklearn import ProtosteerClassifier

pytestmark = pytest.mark.slow


INSTANT = Settings.preset("instant")


@parametrize_with_checks([ProtosteerClassifier()])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    return load_digits(return_X_y=True)


def test_vectors_are_read_by_the_rule_that_reads_images():
    """A learner that is given images, against the classifier that is given their embeddings."""
    backbone = tiny_backbone()
    images, labels = easy_task(["ant", "bee", "cat"], 12)
    new = easy_task(["ant", "bee", "cat"], 5, seed=1)[0]
    learner = Learner(backbone, INSTANT.replace(feature_layers="last"))
    learner.learn((images, labels))
    wanted = learner.predict(new)
    vectors = backbone.embed_pixels(images).numpy()
    found = ProtosteerClassifier().fit(vectors, labels)
    assert wanted.classes == found.classes_.tolist() == ["ant", "bee", "cat"]
    assert wanted.probabilities.min() < 0.5 < wanted.probabilities.max()
    probabilities = torch.from_numpy(found.predict_proba(backbone.embed_pixels(new).numpy()))
    assert torch.allclose(probabilities, wanted.probabilities.double(), atol=1e-5)


def test_pipelines_searches_and_cross_validation(digits):
    X, y = digits
    pipeline = make_pipeline(StandardScaler(), ProtosteerClassifier())
    scores = cross_val_score(pipeline, X[:900], y[:900], cv=3)
    assert scores.mean() > 0.93
    search = GridSearchCV(pipeline, {"protosteerclassifier__random_state": [0, 1]}, cv=2).fit(X[:200], y[:200])
    assert search.best_score_ > 0.85


def test_classes_arrive_over_time_and_nothing_is_forgotten(digits):
    X, y = digits
    order = [y[:900] % 3 == task for task in (2, 0, 1)]
    grown = ProtosteerClassifier()
    for known, rows in enumerate(order, 1):
        grown.partial_fit(X[:900][rows], y[:900][rows])
        assert len(grown.classes_) == len(np.unique(y[:900][np.any(order[:known], axis=0)]))
    whole = ProtosteerClassifier().fit(X[:900], y[:900])
    assert grown.classes_.tolist() == list(range(10))
    assert np.allclose(grown.predict_proba(X[900:]), whole.predict_proba(X[900:]))
    assert grown.score(X[900:], y[900:]) > 0.9


def test_known_classes_grow(digits):
    X, y = digits
    half = ProtosteerClassifier().fit(X[:150], y[:150]).score(X[900:], y[900:])
    grown = ProtosteerClassifier().fit(X[:150], y[:150])
    for start in range(150, 900, 150):
        grown.partial_fit(X[start : start + 150], y[start : start + 150])
    whole = ProtosteerClassifier().fit(X[:900], y[:900]).score(X[900:], y[900:])
    assert grown.classes_.tolist() == list(range(10))
    assert half + 0.02 < grown.score(X[900:], y[900:]) and whole - 0.02 < grown.score(X[900:], y[900:])


def test_classes_that_are_told_before_they_come_have_no_probability(digits):
    X, y = digits
    early = y < 3
    told = ProtosteerClassifier().partial_fit(X[early], y[early], classes=range(10))
    probabilities = told.predict_proba(X[:50])
    assert probabilities.shape == (50, 10) and not probabilities[:, 3:].any()
    assert np.allclose(probabilities.sum(axis=1), 1)
    with pytest.raises(ValueError, match="64 features"):
        told.partial_fit(X[:, :5], y)
    assert told.classes_.tolist() == list(range(10)) and told.score(X[early], y[early]) > 0.95


def test_images_as_arrays_and_as_paths(tmp_path):
    files = read_folder(photos(tmp_path / "spring", ["ant", "bee", "cat"], 9))
    paths = np.array([str(path) for path in files.paths])
    classifier = ProtosteerClassifier(tiny_backbone())
    assert cross_val_score(classifier, paths, files.labels, cv=3).mean() > 0.9
    classifier.fit(paths[:18], files.labels[:18]).partial_fit(files.paths[18:], files.labels[18:])
    assert classifier.learner_.tasks == ["task-1", "task-2"]
    classifier.learner_.save(tmp_path / "x.protosteer")
    again = Learner.load(tmp_path / "x.protosteer", classifier.backbone)
    assert again.predict(files.paths).labels == classifier.predict(paths).tolist() == files.labels
    images, labels = easy_task(["3", "10"], 6)
    by_number = clone(classifier).fit(images.permute(0, 2, 3, 1).numpy(), np.array(labels, dtype=int))
    assert by_number.classes_.tolist() == [3, 10] and set(by_number.predict(images.numpy())) == {3, 10}
    copied = pickle.loads(pickle.dumps(by_number))
    assert np.array_equal(copied.predict_proba(images.numpy()), by_number.predict_proba(images.numpy()))


def test_cleanlab_finds_wrong_labels_by_left_out_probabilities(digits):
    """docs/how-to/data.md has the figures: 29 are found, 25 of them are wrong."""
    cleanlab = pytest.importorskip("cleanlab.filter", reason="cleanlab is not installed")
    X, y = digits[0][:600], digits[1][:600]
    pixels = torch.from_numpy(255 - 15 * X.reshape(-1, 1, 8, 8)).to(torch.uint8).expand(-1, 3, -1, -1)
    vectors = Backbone.load("nano").embed_pixels(pixels).numpy()
    draw = np.random.default_rng(0)
    wrong = draw.choice(len(y), 30, replace=False)
    given = y.copy()
    given[wrong] = (given[wrong] + draw.integers(1, 10, len(wrong))) % 10
    probabilities = cross_val_predict(ProtosteerClassifier(), vectors, given, cv=3, method="predict_proba")
    found = cleanlab.find_label_issues(given, probabilities, return_indices_ranked_by="self_confidence")
    right = len(set(found) & set(wrong))
    assert right >= 24 and right >= 0.8 * len(found)


def test_a_backbone_may_be_named():
    images, labels = easy_task(["ant", "bee"], 4)
    classifier = ProtosteerClassifier(backbone="nano").fit(images.numpy(), labels)
    assert isinstance(classifier.learner_.backbone, Backbone) and classifier.get_params()["backbone"] == "nano"


def test_what_cannot_work_is_told_in_a_line(digits):
    X, y = digits
    with expect_error("preset-needs-backbone", SettingsError, preset="best"):
        ProtosteerClassifier(preset="best").fit(X, y)
    with expect_error("unknown-preset", SettingsError, name="quick"):
        ProtosteerClassifier(preset="quick").fit(X, y)
    with expect_error("not-images", DataError):
        ProtosteerClassifier(tiny_backbone()).fit(X, y)
