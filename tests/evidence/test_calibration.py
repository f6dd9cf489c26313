"""Weights against what they promise, and classes swept in blocks against all of them at once."""

import math

import pytest
import torch
import torch.nn.functional as F

from protosteer.evidence import calibration
from protosteer.evidence import class_statistics as spaces
from protosteer.evidence.calibration import ImageWeights, LooScores, Selection
from protosteer.evidence.prototype_summary import quantize_int8
from protosteer.evidence.scorer import CoarseScorer
from protosteer.evidence.summary_table import SummaryTable


def weights(kinds, labels):
    stacked = torch.stack(kinds, dim=-1)
    return LooScores.among_all(stacked, stacked, labels).weights(range(len(kinds)))


def test_weights_are_the_likeliest():
    draw = torch.Generator().manual_seed(4)
    good, noise = torch.randn(400, 5, generator=draw).double(), torch.randn(400, 5, generator=draw).double()
    labels = torch.distributions.Categorical(logits=3 * good).probs.cumsum(1)
    labels = (labels < torch.rand(400, 1, generator=draw)).sum(dim=1)
    useful, useless = weights([good, noise], labels)
    assert useful == pytest.approx(3, abs=0.5) and useless < 0.2

    def likelihood(a, b):
        return float(F.cross_entropy(a * good + b * noise, labels, label_smoothing=1 / 401))

    best = likelihood(useful, useless)
    assert best <= min(likelihood(useful + d, useless) for d in (-0.2, 0.2)) + 1e-9
    assert best <= likelihood(useful, useless + 0.2) + 1e-9


def test_weights_stay_finite_where_everything_is_right():
    labels = torch.arange(50) % 5
    (weight,) = weights([F.one_hot(labels, 5).double()], labels)
    sure = 1 / (1 + 4 * math.exp(-weight))
    assert 0.97 < sure < 1 - 1 / 200  # of 50 images one may go wrong


def test_without_images_to_leave_out_weights_are_the_usual_ones():
    nothing = torch.empty(0, 3).double()
    assert sum(weights([nothing, nothing], torch.empty(0, dtype=torch.int64))) == calibration.UNCALIBRATED_WEIGHT


def views(classes=600, points=3, dim=16):
    """The same images twice: as they are, and turned and blurred."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, 1, dim, generator=draw)
    images = centres + 0.4 * torch.randn(classes, points, dim, generator=draw)
    blurred = images.flip(2) + 0.4 * torch.randn(classes, points, dim, generator=draw)
    ones, lengths = torch.ones(classes * points, dtype=torch.int64), torch.full((classes,), points)
    return [
        CoarseScorer(
            SummaryTable(quantize_int8(F.normalize(x.flatten(0, 1), dim=1)), ones, torch.zeros(classes, dim), lengths)
        )
        for x in (images, blurred)
    ]


def test_classes_swept_in_blocks_are_those_that_all_at_once_show(monkeypatch):
    monkeypatch.setattr(spaces, "LOO_SCORES", 60_000)  # so that 200 images are left out
    seen = views()
    exact = LooScores.of(seen)
    for name, value in {"MAX_CLASSES": 300, "NEAREST_CLASSES": 50, "SAMPLED_CLASSES": 250, "_BLOCK": 64}.items():
        monkeypatch.setattr(calibration, name, value)
    swept = LooScores.of(seen)
    assert len(exact.true_class) == 200 and swept.scores.shape == (200, 300, 2)
    for part in ("true_class", "mean", "max_similarity"):
        assert torch.allclose(getattr(swept, part), getattr(exact, part), atol=1e-12)
    best = exact.scores.sum(dim=2).topk(50, dim=1).indices[:, :, None].expand(-1, -1, 2)
    assert torch.allclose(swept.scores[:, :50], exact.scores.gather(1, best), atol=1e-12)
    assert torch.allclose(swept.log_count.exp().sum(dim=1), torch.tensor(600.0).double())  # for every class once
    for some in ([0], [1], [0, 1]):
        assert swept.weights(some) == pytest.approx(exact.weights(some), rel=0.03, abs=1e-5)


def test_a_sweep_that_keeps_every_class_is_exact(monkeypatch):
    seen = views()
    exact = LooScores.of(seen).weights([0, 1])
    for name, value in {"MAX_CLASSES": 300, "NEAREST_CLASSES": 50, "SAMPLED_CLASSES": 600, "_BLOCK": 64}.items():
        monkeypatch.setattr(calibration, name, value)
    assert LooScores.of(seen).weights([0, 1]) == pytest.approx(exact, rel=1e-6, abs=1e-6)


def test_an_image_of_weight_two_counts_as_two():
    draw = torch.Generator().manual_seed(2)
    scores, labels = torch.randn(30, 4, 2, generator=draw).double(), torch.arange(30) % 4
    scores[torch.arange(30), labels] += 1
    twice = torch.tensor([1.0, 2.0, 0.0]).repeat(10).double()
    rows = torch.cat([torch.full((int(weight),), row) for row, weight in enumerate(twice.tolist())])
    once, repeated = (LooScores.among_all(s, s, n) for s, n in ((scores, labels), (scores[rows], labels[rows])))
    images, prior = ImageWeights(twice), torch.tensor([0.5, 0.5]).double()
    assert once.weights([0, 1], images) == pytest.approx(repeated.weights([0, 1]), rel=1e-4)
    every = ImageWeights(torch.ones(len(rows)).double())
    torch.testing.assert_close(once.shares(prior, images), repeated.shares(prior, every), rtol=1e-4, atol=1e-6)
    assert once.log_likelihood(0, 2.0, images) == pytest.approx(repeated.log_likelihood(0, 2.0, every))


@pytest.mark.parametrize(("confirmed", "expected"), [(0, 0.0), (4, 4 / 7), (40, 0.1)])
def test_corrected_images_count_as_often_as_errors_come(confirmed, expected):
    """Of 9 learned images 3 go wrong, smoothed 4 to 7: no more of 4 corrections count beside 4 confirmations."""
    labels = torch.zeros(9 + 4 + 4, dtype=torch.int64)
    scores = torch.eye(2).double()[torch.tensor([1, 1, 1] + [0] * 14)][..., None]
    kinds = torch.tensor([0] * 9 + [1] * 4 + [2] * 4)
    chosen = Selection(kinds == 0, kinds == 1, kinds == 2, num_corrected=4, num_confirmed=confirmed)
    weights = chosen.weights(LooScores.among_all(scores, scores, labels)).weights
    assert weights[kinds == 0].tolist() == [1.0] * 9 and weights[kinds == 2].tolist() == [1.0] * 4
    assert weights[kinds == 1].tolist() == pytest.approx([expected] * 4)
