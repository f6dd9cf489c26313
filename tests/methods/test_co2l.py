"""Both losses against loops over single images; who is an anchor; the head against scikit-learn."""

import math

import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression

from protosteer.methods.checks import Maker
from protosteer.methods.co2l import RIDGE, Co2L, asymmetric_loss, fit_head, relation_loss
from protosteer.paper.losses import supcon

LABELS = torch.tensor([0, 0, 1, 2, 2, 2, 3, 3])


def vectors(seed: int) -> torch.Tensor:
    drawn = torch.randn(8, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(drawn, dim=1)


def test_the_asymmetric_loss_is_a_mean_over_anchors():
    z, temperature = vectors(0), 0.5
    similar = (z @ z.T).tolist()
    terms = []
    for i in range(3, 8):  # classes 2 and 3
        whole = sum(math.exp(similar[i][j] / temperature) for j in range(8) if j != i)
        positives = [j for j in range(8) if j != i and LABELS[j] == LABELS[i]]
        logs = [math.log(math.exp(similar[i][j] / temperature) / whole) for j in positives]
        terms.append(-sum(logs) / len(logs))
    found = asymmetric_loss(z, LABELS, LABELS >= 2, temperature)
    torch.testing.assert_close(found.item(), sum(terms) / len(terms))


def test_with_all_images_as_anchors_it_is_supcon():
    every = torch.ones(8, dtype=torch.bool)
    torch.testing.assert_close(asymmetric_loss(vectors(0), LABELS, every, 0.3), supcon(vectors(0), LABELS, 0.3))


def test_old_images_are_negatives_and_nothing_more():
    """Which old class they are of does not matter, but where they lie does; without anchors there is no loss."""
    z, anchors = vectors(0), LABELS >= 2
    other, moved = LABELS.clone(), z.clone()
    other[:3] = torch.tensor([1, 0, 0])
    moved[:3] = vectors(1)[:3]
    loss = asymmetric_loss(z, LABELS, anchors, 0.5)
    assert torch.equal(loss, asymmetric_loss(z, other, anchors, 0.5))
    assert not torch.isclose(loss, asymmetric_loss(moved, LABELS, anchors, 0.5))
    assert float(asymmetric_loss(z, LABELS, LABELS > 3, 0.5)) == 0


def test_relations_are_softmaxes_over_all_other_images():
    z, before, present, past = vectors(0), vectors(1), 0.2, 0.05
    now, then = (z @ z.T).tolist(), (before @ before.T).tolist()
    expected = 0.0
    for i in range(8):
        others = [j for j in range(8) if j != i]
        p = [math.exp(then[i][j] / past) for j in others]
        q = [math.exp(now[i][j] / present) for j in others]
        expected -= sum(a / sum(p) * math.log(b / sum(q)) for a, b in zip(p, q, strict=True)) / 8
    torch.testing.assert_close(relation_loss(z, before, present, past).item(), expected)


def test_the_loss_is_of_two_views():
    method = Maker(Co2L, {"distillation_weight": 2.0}).after(1)
    method.begin_task(None, None)
    with torch.no_grad():
        method.projection[0].weight.mul_(1.5)
    images, labels = torch.randn(8, 3, 16, 16), torch.tensor([0, 2, 3, 2])
    embeddings = method.backbone.embed(images)
    z = F.normalize(method.projection(embeddings), dim=1)
    before = F.normalize(method.past[1](embeddings), dim=1)  # the backbone has not moved
    both = torch.cat([labels, labels])
    expected = asymmetric_loss(z, both, both >= 2, 0.5) + 2.0 * relation_loss(z, before, 0.2, 0.01)
    loss, shown = method.loss(images, labels)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(shown, embeddings[:4])


def test_training_sees_every_image_twice_in_a_batch():
    seen = []

    class Spy(Co2L):
        def loss(self, images, labels):
            seen.append((images, labels))
            return super().loss(images, labels)

    Maker(Spy, {"epochs": 1}).after(1)
    for images, labels in seen:
        first, second = images.chunk(2)
        assert len(first) == len(labels) and not torch.equal(first, second)
        # Two crops of one picture are more alike than crops of two.
        apart = torch.cdist(first.flatten(1), second.flatten(1))
        others = [apart[i][labels != labels[i]].min() for i in range(len(labels)) if (labels != labels[i]).any()]
        assert apart.diagonal().mean() < torch.stack(others).mean()


def test_the_head_is_a_logistic_regression_in_which_classes_count_the_same():
    draw = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 60 + [1] * 20 + [2] * 5)
    embeddings = torch.randn(85, 4, generator=draw) + torch.eye(4)[labels]
    weight, bias = fit_head(embeddings, labels, classes=3)
    # scikit-learn weighs by n / (classes * count) and adds up, so its C is 1 / (2 * ridge * n).
    twin = LogisticRegression(C=1 / (2 * RIDGE * 85), class_weight="balanced", tol=1e-8, max_iter=1000)
    twin.fit(embeddings.numpy(), labels.numpy())
    expected = torch.from_numpy(twin.predict_proba(embeddings.numpy())).float()
    found = F.linear(embeddings, weight, bias).softmax(dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
