"""L2P's selection, pull term and features against loops written out."""

import math

import pytest
import torch

from protosteer.methods.checks import Maker
from protosteer.methods.l2p import L2P
from protosteer.methods.testing import GROUPS, toy_images


@pytest.fixture(scope="module")
def method() -> L2P:
    method = Maker(L2P).after(2)
    assert isinstance(method, L2P)
    with torch.no_grad():  # keys so different that images differ in what they select
        draw = torch.Generator().manual_seed(1)
        method.shared["keys"].copy_(torch.randn(4, 24, generator=draw))
    return method


def images(method: L2P) -> torch.Tensor:
    return method.backbone.preprocessing(toy_images(GROUPS[1], per_class=3)[0], method.backbone.device)


def cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def selection(method: L2P, query: torch.Tensor) -> list[tuple[float, int]]:
    """(cosine, number) of the two best keys."""
    keys = method.shared["keys"].tolist()
    return sorted(((cosine(query.tolist(), key), m) for m, key in enumerate(keys)), reverse=True)[:2]


def test_every_image_selects_the_prompts_of_its_nearest_keys(method):
    queries = method.backbone.embed(images(method))
    prompts, selections = method.prompt(queries), set()
    assert prompts.shape == (9, 1, 4, 24)
    for query, prompt in zip(queries, prompts, strict=True):
        numbers = [m for _, m in selection(method, query)]
        selections.add(tuple(numbers))
        assert torch.equal(prompt[0], torch.cat([method.shared["prompts"][m] for m in numbers]))
    assert len(selections) > 1


def test_selected_keys_are_pulled_towards_queries(method):
    method.shared["keys"].requires_grad_()  # a restored method has not begun to train
    queries = method.backbone.embed(images(method))
    _, penalty = method.training_prompt(queries)
    expected = sum(1 - similar for query in queries for similar, _ in selection(method, query)) / 9
    assert penalty.item() == pytest.approx(method.settings.pull * expected, rel=1e-5)
    method.shared["keys"].grad = None
    penalty.backward()
    some = {m for query in queries for _, m in selection(method, query)}
    assert {m for m in range(4) if method.shared["keys"].grad[m].any()} == some


def test_the_head_sees_the_mean_of_what_comes_out_at_the_prompt(method):
    """Each image alone, its prompt put between class token and patches by hand, through the layers."""
    vit, some = method.backbone.vit, images(method)
    prompts = method.prompt(method.backbone.embed(some))
    features = method.features(method.backbone, some, prompts)
    for image, prompt, found in zip(some, prompts, features, strict=True):
        x = vit.embed_patches(image[None])
        x = torch.cat([x[:, :1], prompt, x[:, 1:]], dim=1)
        for block in vit.blocks:
            x = block(x)
        torch.testing.assert_close(found, sum(vit.norm(x)[0, i] for i in range(1, 5)) / 4)
