"""Statistics against those of all images at once, predictions against scikit-learn's."""

import numpy as np
import pytest
import torch
from sklearn.covariance import EmpiricalCovariance
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from protosteer.data.images import ArrayImages
from protosteer.methods.checks import Maker
from protosteer.methods.slda import SLDA
from protosteer.methods.testing import GROUPS, toy_images
from protosteer.streams.base import TrainingTask

NAMES = [name for group in GROUPS for name in group]
PIXELS, LABELS = toy_images(NAMES)


def learned(split: list[list[str]], keep: dict[str, int] | None = None, **settings: float) -> SLDA:
    """Learn classes in this split; `keep` says of how many images, where not of all."""
    method = Maker(SLDA, settings)()
    for group in split:
        rows = [i for name in group for i in where(name)[: (keep or {}).get(name)]]
        labels = [LABELS[i] for i in rows]
        method.learn(TrainingTask(group[0], group, ArrayImages(PIXELS[rows]), labels))
    assert isinstance(method, SLDA)
    return method


def where(name: str) -> list[int]:
    return [i for i, label in enumerate(LABELS) if label == name]


@pytest.mark.parametrize("split", [[NAMES], [*([name] for name in NAMES)], [NAMES[:1], NAMES[1:]]])
def test_statistics_are_those_of_all_images_whatever_the_split(split):
    method = learned(split, {"bee": 3, "eel": 1})  # classes of different sizes
    rows = [i for name in NAMES for i in where(name)[: {"bee": 3, "eel": 1}.get(name)]]
    embeddings = method.backbone.embed_pixels(PIXELS[rows]).double().numpy()
    labels = np.array([LABELS[i] for i in rows])
    means = np.stack([embeddings[labels == name].mean(axis=0) for name in NAMES])
    apart = embeddings - means[[NAMES.index(label) for label in labels]]
    expected = EmpiricalCovariance(assume_centered=True).fit(apart).covariance_
    np.testing.assert_allclose(method.means, means, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(method.covariance, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shrinkage", [1e-4, 0.03, 0.7])
def test_predictions_are_scikit_learns(shrinkage):
    """Which shrinks towards t I with t = tr(S) / D: (1 - e) S + e I is a multiple of (1 - s) S + s t I."""
    method = learned(GROUPS, shrinkage=shrinkage)
    test = toy_images(NAMES, per_class=40, seed=90)[0]
    noise = torch.randint(-60, 60, test.shape, generator=torch.Generator().manual_seed(0))
    test = (test + noise).clamp(0, 255).to(torch.uint8)  # so that some answers are in doubt
    t = float(method.covariance.trace()) / method.backbone.dim
    multiple = 1 - shrinkage + shrinkage / t
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage / (multiple * t), priors=np.full(6, 1 / 6))
    train = method.backbone.embed_pixels(PIXELS).double().numpy()
    oracle.fit(train, [NAMES.index(label) for label in LABELS])
    images = Maker(SLDA).images(method, NAMES)
    images.images = ArrayImages(test)
    answer = method.answer(images)
    scores = oracle.decision_function(method.backbone.embed_pixels(test).double().numpy()) / multiple
    assert answer.classes.tolist() == scores.argmax(axis=1).tolist()
    expected = torch.from_numpy(scores).softmax(dim=1).amax(dim=1)
    torch.testing.assert_close(answer.confidence, expected, rtol=0, atol=1e-4)
