import pytest
import torch
import torch.nn.functional as F

from protosteer.paper import diagnostics


def clusters(centres: torch.Tensor, per_class: int = 10, noise: float = 0.05, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(centres)).repeat_interleave(per_class)
    return centres[labels] + noise * torch.randn(len(labels), centres.shape[1], generator=generator), labels


APART, LABELS = clusters(torch.eye(4))
FALLEN, _ = clusters(torch.ones(4, 4) + 0.1 * torch.eye(4))


def test_spread_is_one_for_a_point_and_small_for_a_sphere():
    assert diagnostics.spread(torch.ones(5, 3)) == pytest.approx(1)
    assert diagnostics.spread(torch.eye(4)) == pytest.approx(0.5)


def test_overlap_is_the_mean_cosine_between_class_means():
    means = diagnostics.class_means(APART, LABELS)
    expected = [F.cosine_similarity(means[i], means[j], dim=0) for i in range(4) for j in range(4) if i != j]
    assert diagnostics.class_overlap(APART, LABELS) == pytest.approx(float(torch.stack(expected).mean()), abs=1e-6)


def test_loo_ncm_accuracy_leaves_each_image_out():
    embeddings = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(30) % 3
    hits = 0
    for i in range(30):
        means = []
        for k in range(3):
            members = [j for j in range(30) if labels[j] == k and j != i]
            means.append(embeddings[members].mean(dim=0))
        similarity = F.cosine_similarity(embeddings[i], torch.stack(means), dim=1)
        hits += int(similarity.argmax() == labels[i])
    assert diagnostics.loo_ncm_accuracy(embeddings, labels) == pytest.approx(100 * hits / 30)


def test_weights_that_see_nothing_are_reported():
    noise = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    assert diagnostics.near_chance(noise, LABELS) and diagnostics.near_chance(APART, LABELS) is None


def test_collapse_is_reported():
    assert diagnostics.collapse(APART, FALLEN, LABELS)


def test_no_collapse_where_classes_stand_apart_or_always_stood_close():
    assert diagnostics.collapse(FALLEN, APART, LABELS) is None
    assert diagnostics.collapse(FALLEN, FALLEN, LABELS) is None
    assert diagnostics.collapse(APART[:10], torch.ones(10, 4), torch.zeros(10, dtype=torch.long)) is None
    one_point = torch.ones(40, 16)
    assert diagnostics.collapse(one_point, one_point, LABELS) is None  # it is not the prompt that did it
