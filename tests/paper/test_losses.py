"""The contrastive losses against a loop-by-loop twin, appendix A's closed-form gradients, and every corner."""

import math

import pytest
import torch
import torch.nn.functional as F

from protosteer.paper import losses


def twin(z, labels, tau, prototypes=(), prototype_labels=(), uniformity=False, prototype_rows=False):
    """The loss as METHOD writes it, one anchor and one pair at a time."""
    points = [*z, *prototypes]
    names = [*labels.tolist(), *[f"p{p}" for p in prototype_labels]]
    rows = len(points) if prototype_rows else len(z)
    terms = []
    for i in range(rows):
        positives = [p for p in range(len(points)) if p != i and names[p] == names[i]]
        below = [n for n in range(len(points)) if names[n] != names[i] or (uniformity and n != i)]
        if not positives:
            continue
        log_sum = math.log(sum(math.exp(float(points[i] @ points[n]) / tau) for n in below)) if below else 0.0
        terms.append(-sum(float(points[i] @ points[p]) / tau - log_sum for p in positives) / len(positives))
    return sum(terms) / len(terms) if terms else 0.0


def batch(n: int = 12, classes: int = 3, m: int = 7, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    z = F.normalize(torch.randn(n, 5, generator=generator, dtype=torch.float64), dim=1)
    prototypes = F.normalize(torch.randn(m, 5, generator=generator, dtype=torch.float64), dim=1)
    return z, torch.arange(n) % classes, prototypes, torch.arange(m) % 2


@pytest.mark.parametrize("uniformity", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("with_prototypes", [False, True])
@pytest.mark.parametrize("tau", [0.1, 0.6])
def test_cpl_equals_its_loop_by_loop_twin(uniformity, rows, with_prototypes, tau):
    z, labels, prototypes, prototype_labels = batch()
    if not with_prototypes:
        prototypes, prototype_labels = prototypes[:0], prototype_labels[:0]
    expected = twin(z, labels, tau, prototypes, prototype_labels.tolist(), uniformity, rows)
    shifted = prototype_labels + int(labels.max()) + 1
    actual = losses.cpl(z, labels, tau, prototypes, shifted, uniformity, rows)
    assert float(actual) == pytest.approx(expected, abs=1e-10)


def test_prototypes_without_labels_are_negatives_of_every_image():
    z, labels, prototypes, prototype_labels = batch()
    expected = twin(z, labels, 0.6, prototypes, prototype_labels.tolist())
    assert float(losses.cpl(z, labels, 0.6, prototypes)) == pytest.approx(expected, abs=1e-10)


def test_supcon_has_positives_in_the_denominator_and_no_prototypes():
    z, labels, _, _ = batch()
    assert float(losses.supcon(z, labels, 0.2)) == pytest.approx(twin(z, labels, 0.2, uniformity=True), abs=1e-10)
    assert float(losses.supcon(z, labels, 0.2)) != pytest.approx(twin(z, labels, 0.2), abs=1e-3)


def test_gradients_are_those_of_appendix_a():
    """d L_i / d s_ij: -1 / (tau |P(i)|) for a positive, softmax weight / tau for a negative."""
    z, labels, prototypes, _ = batch()
    tau, n = 0.6, len(z)
    similarity = (z @ torch.cat([z, prototypes]).T).requires_grad_()
    same = torch.cat([labels[:, None] == labels, torch.zeros(n, len(prototypes), dtype=torch.bool)], dim=1)
    positives = same & ~torch.eye(*same.shape, dtype=torch.bool)
    losses.contrastive(similarity, positives, ~same, tau).backward()
    expected = torch.zeros_like(similarity)
    for i in range(n):
        weights = torch.exp(similarity[i].detach() / tau) * ~same[i]
        expected[i] = weights / weights.sum() / tau - positives[i] / (tau * positives[i].double().sum())
    torch.testing.assert_close(similarity.grad, expected / n, rtol=0, atol=1e-12)


CORNERS = {
    "one class": torch.zeros(6, dtype=torch.long),
    "one image per class": torch.arange(6),
    "one image": torch.zeros(1, dtype=torch.long),
    "two classes, one of them single": torch.tensor([0, 0, 0, 0, 0, 1]),
}


@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prototypes", [0, 4])
@pytest.mark.parametrize("uniformity", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_value_and_gradient_are_finite_in_every_corner(corner, dtype, prototypes, uniformity, rows):
    labels = CORNERS[corner]
    raw = torch.randn(len(labels), 5, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    earlier = F.normalize(torch.ones(prototypes, 5), dim=1)
    shifted = torch.arange(prototypes) + 10
    loss = losses.cpl(F.normalize(raw, dim=1), labels, 0.01, earlier, shifted, uniformity, rows)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(raw.grad).all()


def test_no_negative_at_all_leaves_the_alignment_term():
    z = F.normalize(torch.randn(4, 5, generator=torch.Generator().manual_seed(2)), dim=1)
    similarity = (z @ z.T).masked_select(~torch.eye(4, dtype=torch.bool))
    loss = losses.cpl(z, torch.zeros(4, dtype=torch.long), 0.6)
    assert float(loss) == pytest.approx(-float(similarity.mean()) / 0.6, abs=1e-6)


def test_no_positive_at_all_is_zero_with_zero_gradient():
    z = F.normalize(torch.randn(4, 5), dim=1).requires_grad_()
    loss = losses.cpl(z, torch.arange(4), 0.6)
    loss.backward()
    assert loss.item() == 0.0 and not z.grad.any()


def test_cross_entropy_is_torchs_in_float32():
    logits = torch.randn(5, 3).bfloat16()
    labels = torch.tensor([0, 1, 2, 1, 0])
    torch.testing.assert_close(losses.cross_entropy(logits, labels), F.cross_entropy(logits.float(), labels))
