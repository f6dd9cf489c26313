"""Methods on all embeddings against scikit-learn on all embeddings."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from protosteer.methods import find_method
from protosteer.methods.checks import Maker, learn_task
from protosteer.methods.feature_bank import FeatureBank
from protosteer.methods.testing import GROUPS, toy_backbone, toy_images

NAMES = [name for group in GROUPS for name in group]


def learned(name: str, **settings: Any) -> tuple[Maker, FeatureBank]:
    make = Maker(find_method(name), settings)
    method = make.after()
    assert isinstance(method, FeatureBank)
    return make, method


def all_at_once(method: FeatureBank) -> tuple[np.ndarray, list[int], np.ndarray]:
    """Training embeddings of all tasks with their labels, and embeddings of noisy test images."""
    pixels = torch.cat([toy_images(group)[0] for group in GROUPS])
    names = [name for group in GROUPS for name in toy_images(group)[1]]
    train = method.backbone.embed_pixels(pixels).double().numpy()
    test = toy_images(NAMES, per_class=5, seed=90)[0]
    labels = [method.classes.index(name) for name in names]
    return train, labels, method.backbone.embed_pixels(test).double().numpy()


@pytest.mark.parametrize(("neighbours", "temperature"), [(1, 0.07), (20, 0.07), (20, 0.5), (999, 0.01)])
def test_knn_is_scikit_learns_with_dinos_weights(neighbours, temperature):
    make, method = learned("knn", neighbours=neighbours, temperature=temperature)
    train, labels, test = all_at_once(method)
    oracle = KNeighborsClassifier(
        n_neighbors=min(neighbours, len(train)),
        weights=lambda distances: np.exp((1 - distances) / temperature),
        metric="cosine",
    ).fit(train, labels)
    expected = oracle.predict_proba(test)
    answer = method.answer(make.images(method, NAMES))
    assert answer.classes.tolist() == expected.argmax(axis=1).tolist()
    np.testing.assert_allclose(answer.confidence, expected.max(axis=1), rtol=1e-4)


@pytest.mark.parametrize("penalty", [1e-2, 1.0])
def test_the_probe_is_scikit_learns_logistic_regression(penalty):
    make, method = learned("probe", penalty=penalty)
    train, labels, test = all_at_once(method)
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    oracle = LogisticRegression(C=1 / (penalty * len(train)), tol=1e-9, max_iter=10_000)
    oracle.fit((train - mean) / deviation, labels)
    np.testing.assert_allclose(method.weight.numpy() * deviation, oracle.coef_, atol=1e-4)
    expected = oracle.predict_proba((test - mean) / deviation)
    answer = method.answer(make.images(method, NAMES))
    assert answer.classes.tolist() == expected.argmax(axis=1).tolist()
    np.testing.assert_allclose(answer.confidence, expected.max(axis=1), atol=1e-4)


def test_a_feature_that_never_changes_does_not_harm_the_probe():
    make = Maker(find_method("probe"))
    backbone = toy_backbone()
    with torch.no_grad():  # the last norm gives out the same number for every image
        backbone.vit.norm.weight[3] = 0
    method = make(backbone=backbone)
    for group in GROUPS:
        learn_task(method, group)
    truth = torch.arange(6).repeat_interleave(5)
    assert method.weight.isfinite().all() and torch.equal(method.predict(make.images(method, NAMES)), truth)
