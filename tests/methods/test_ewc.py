"""The Fisher information against its closed form, the penalty against a loop, and weights that are held."""

import torch

from protosteer.data.images import ArrayImages
from protosteer.methods.checks import Maker, learn_task
from protosteer.methods.ewc import EWC
from protosteer.methods.finetune import Finetune
from protosteer.methods.testing import GROUPS, toy_images


def test_information_of_a_head_is_its_closed_form():
    """d log p(y) / dw_k = (1[k = y] - p_k) x for the row w_k of a linear layer, and without x for its bias."""
    method = Maker(EWC).after(2)
    pixels = toy_images(GROUPS[1])[0]
    with torch.no_grad():
        method.head.weight.mul_(0.3)  # so that it is not sure of anything
    method.generator.manual_seed(3)
    found = method.information(ArrayImages(pixels))
    embeddings = method.backbone.embed_pixels(pixels).detach()
    p = method.head(embeddings).detach().softmax(dim=1)
    torch.manual_seed(3)
    drawn = torch.cat([torch.multinomial(row[None], 1)[0] for row in p])
    assert len(drawn.unique()) > 1
    error = p - torch.nn.functional.one_hot(drawn, p.shape[1])  # [n, K]
    expected = (error[:, :, None] ** 2 * embeddings[:, None] ** 2).mean(dim=0)
    torch.testing.assert_close(found["head.weight"], expected, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found["head.bias"], (error**2).mean(dim=0), rtol=1e-4, atol=1e-7)
    assert found.keys() == method.parameters().keys()
    assert all(bool((t >= 0).all()) for t in found.values()) and float(found["vit.cls_token"].sum()) > 0


def test_the_penalty_is_a_sum_over_single_weights():
    """Rows for new classes are free."""
    method = Maker(EWC).after(1)
    method.begin_task(None, None)
    method.head.grow(3)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in method.parameters().values():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    expected = 0.0
    for name, parameter in method.parameters().items():
        fisher, anchor = method.fisher[name].flatten(), method.anchor[name].flatten()
        now = parameter[: len(method.anchor[name])].detach().flatten()
        for f, w, start in zip(fisher.tolist(), now.tolist(), anchor.tolist(), strict=True):
            expected += f * (w - start) ** 2
    torch.testing.assert_close(method.pull().item(), expected, rtol=1e-4, atol=0)
    images = torch.randn(4, 3, 16, 16)
    labels = torch.tensor([0, 1, 2, 4])
    plain = Finetune.loss(method, images, labels)[0]
    whole = plain.item() + 0.5 * method.settings.penalty * expected
    torch.testing.assert_close(method.loss(images, labels)[0].item(), whole, rtol=1e-4, atol=0)


def test_information_of_tasks_adds_up():
    method = Maker(EWC).after(1)
    before = {name: t.clone() for name, t in method.fisher.items()}
    learn_task(method, GROUPS[1])
    assert all(bool((t[: len(before[name])] >= before[name]).all()) for name, t in method.fisher.items())
    assert len(method.fisher["head.bias"]) == 5 and float(method.fisher["head.bias"][2:].min()) > 0


def test_what_matters_is_held():
    """Under a huge penalty, Fisher-weighted steps are a small part of what they are without."""
    moved = {}
    for penalty in (0.0, 1e6):
        method = Maker(EWC, {"penalty": penalty, "learning_rate": 1e-3}).after(1)
        fisher, start = method.fisher, {n: p.detach().clone() for n, p in method.parameters().items()}
        learn_task(method, GROUPS[1])
        own = {name: p.detach() for name, p in method.parameters().items()}
        moved[penalty] = sum(float((f * (own[name][: len(f)] - start[name]) ** 2).sum()) for name, f in fisher.items())
    assert moved[1e6] < 0.05 * moved[0.0]
