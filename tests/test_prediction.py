"""Names, probabilities and rankings from the numbers of a match."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from conftest import easy_task, tiny_backbone
from protosteer import Learner, Prediction, Settings
from protosteer.evidence.matches import ClassifierMatches

SETTINGS = Settings.preset("paper", prompts=False, centroids=2)
CLASSES = ["ant", "bee", "cat", "dog"]


@pytest.fixture(scope="module")
def learner() -> Learner:
    learner = Learner(tiny_backbone(), SETTINGS)
    for classes in (CLASSES[:2], CLASSES[2:]):
        learner.learn(easy_task(classes))
    return learner


def test_probabilities_and_energy(learner: Learner) -> None:
    prediction = learner.predict(easy_task(CLASSES, seed=7)[0])
    expected = torch.exp(prediction.scores / 0.6)
    torch.testing.assert_close(prediction.probabilities, expected / expected.sum(dim=1, keepdim=True))
    torch.testing.assert_close(prediction.energy, -0.6 * expected.sum(dim=1).log())
    tasks = {name: task.name for task in learner.memory.tasks for name in task.class_names}
    assert prediction.tasks == [tasks[label] for label in prediction.labels]


@pytest.mark.parametrize("top", [1, 3, 99])
def test_the_label_ranks_first_also_where_all_are_as_similar(learner: Learner, top: int) -> None:
    scores = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    matches = ClassifierMatches(
        scores=scores,
        candidates=torch.ones(5, 2, dtype=torch.bool),
        winners=torch.zeros(5, dtype=torch.long),
        embeddings=torch.zeros(5, 24),
        passes=torch.ones(5, dtype=torch.long),
        similarities=scores,
    )
    tied = dataclasses.replace(matches, scores=torch.ones(5, 4), similarities=torch.ones(5, 4))
    for one in (Prediction.build(learner.reader.index, found, 0.6) for found in (matches, tied)):
        for row, ranking in enumerate(one.ranked(top)):
            names, probabilities, similarities = zip(*ranking, strict=True)
            columns = [one.classes.index(name) for name in names]
            assert len(set(names)) == len(names) == min(top, 4) and names[0] == one.labels[row]
            assert list(probabilities) == one.probabilities[row, columns].tolist()
            assert list(similarities) == one.scores[row, columns].tolist() == sorted(similarities, reverse=True)
