"""EASE: adapters against a layer written out, made-up prototypes and scores against loops."""

import math

import pytest
import torch
import torch.nn.functional as F

from protosteer.errors import ProtosteerWarning
from protosteer.evaluation.embedding_cache import EmbeddingCache
from protosteer.methods.adapters import new_adapters, with_adapters
from protosteer.methods.checks import Maker, learn_task
from protosteer.methods.ease import EASE, scores, synthesise
from protosteer.methods.testing import GROUPS, toy_backbone, toy_images

MAKE = Maker(EASE, make_images=EmbeddingCache)


def filled(backbone, width=4):
    """Adapters with something in them."""
    adapters = new_adapters(backbone, width, torch.Generator())
    with torch.no_grad():
        for parameter in adapters.parameters():
            parameter.normal_()
    return adapters


def test_an_adapter_reads_the_residual_stream_beside_the_mlp():
    torch.manual_seed(0)
    backbone = toy_backbone()
    adapters = filled(backbone)
    block, plain = with_adapters(backbone, adapters, 0.3, False).vit.blocks[1], backbone.vit.blocks[1]
    x, own = torch.randn(2, 5, 24), adapters[1]
    after = x + plain.attn(plain.norm1(x), None, None)
    read = plain.norm2(after)
    mlp = F.gelu(read @ plain.mlp.fc1.weight.T + plain.mlp.fc1.bias) @ plain.mlp.fc2.weight.T
    narrow = (after @ own.down.weight.T + own.down.bias).clamp(min=0)
    expected = after + mlp + plain.mlp.fc2.bias + 0.3 * (narrow @ own.up.weight.T + own.up.bias)
    torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(block(x), plain(x))


def test_new_adapters_change_nothing_and_weights_are_shared():
    backbone, pixels = toy_backbone(), toy_images(GROUPS[0])[0]
    before = {name: tensor.clone() for name, tensor in backbone.vit.state_dict().items()}
    adapted = with_adapters(backbone, new_adapters(backbone, 4, torch.Generator()), 0.1, trainable=True)
    assert torch.equal(adapted.embed_pixels(pixels), backbone.embed_pixels(pixels))
    mine = {p.data_ptr() for p in backbone.vit.parameters()}
    trained = [p for p in adapted.vit.parameters() if p.data_ptr() not in mine]
    assert len(trained) == 2 * 4 and all(p.requires_grad for p in trained)
    assert sum(p.requires_grad for p in adapted.vit.parameters()) == len(trained)
    frozen = with_adapters(backbone, filled(backbone), 0.1, trainable=False)
    assert frozen.fingerprint != backbone.fingerprint and not any(p.requires_grad for p in frozen.vit.parameters())
    assert backbone.vit.state_dict().keys() == before.keys()
    assert torch.equal(backbone.embed_pixels(pixels), toy_backbone().embed_pixels(pixels))


def cosine(a, b):
    return float((a * b).sum() / (a.norm() * b.norm()))


def test_prototypes_of_unseen_classes_are_made_up_as_a_loop_does():
    torch.manual_seed(1)
    counts, task_of = [2, 3, 1], [0, 0, 1, 1, 1, 2]
    known = torch.randn(3, 6, 5)
    found = synthesise(known, counts)
    for s in range(3):
        for k in range(6):
            if task_of[k] >= s:  # seen
                assert torch.equal(found[s, k], known[s, k])
                continue
            own = task_of[k]
            since = [c for c in range(6) if task_of[c] >= s]
            weights = [math.exp(cosine(known[own, k], known[own, c])) for c in since]
            expected = sum(w / sum(weights) * known[s, c] for w, c in zip(weights, since, strict=True))
            torch.testing.assert_close(found[s, k], expected)
    assert torch.equal(synthesise(found, counts), found)  # nothing is made up of what was made up


def test_scores_are_those_of_a_loop():
    torch.manual_seed(2)
    seen, prototypes, task_of = torch.randn(3, 4, 5), torch.randn(3, 6, 5), [0, 0, 1, 1, 1, 2]
    found = scores(seen, prototypes, [2, 3, 1], alpha=0.4)
    for b in range(4):
        for k in range(6):
            expected = sum((1 if s == task_of[k] else 0.4 / 2) * cosine(seen[s, b], prototypes[s, k]) for s in range(3))
            assert math.isclose(float(found[b, k]), expected, abs_tol=1e-5)


def test_the_plain_space_adds_its_cosine():
    make = Maker(EASE, {"plain_weight": 0.7}, EmbeddingCache)
    method, without = make.after(2), MAKE.after(2)
    assert torch.equal(method.prototypes, without.prototypes)
    pixels, names = (
        torch.cat([toy_images(g)[0] for g in GROUPS[:2]]),
        [n for g in GROUPS[:2] for n in toy_images(g)[1]],
    )
    embeddings = toy_backbone().embed_pixels(pixels)
    for k, name in enumerate(method.classes):
        own = embeddings[[label == name for label in names]]
        torch.testing.assert_close(method.plain[k], own.mean(dim=0), rtol=1e-4, atol=1e-5)
    images = make.images(method, GROUPS[1])
    found, before = method.answer(images), without.answer(images)
    queries = toy_backbone().embed_pixels(images.pixels(torch.arange(len(images))))
    added = [[0.7 * cosine(query, mean) for mean in method.plain] for query in queries]
    torch.testing.assert_close(found.scores, before.scores + torch.tensor(added), rtol=1e-4, atol=1e-5)
    assert torch.equal(found.prompts, before.prompts + 1)
    more = [a - b for a, b in zip(method.bytes_per_task(), without.bytes_per_task(), strict=True)]
    assert more == [4 * 24 * 2, 4 * 24 * 3]
    other = make()
    other.restore(method.state())
    assert torch.equal(other.plain, method.plain)


def test_prototypes_are_means_in_every_space_that_was_there():
    """Those of each task, in its own space and in those before it."""
    method, start = MAKE.after(), 0
    for t, group in enumerate(GROUPS):
        pixels, labels = toy_images(group)
        for s in range(t + 1):
            embeddings = method.spaces[s].embed_pixels(pixels)
            for i, name in enumerate(group):
                mean = embeddings[torch.tensor([label == name for label in labels])].mean(dim=0)
                torch.testing.assert_close(method.prototypes[s, start + i], mean)
        start += len(group)
    assert method.prototypes.shape == (3, 6, 24)


def test_one_task_is_the_nearest_class_mean_in_the_adapted_space():
    method = Maker(EASE, {"alpha": 7.0}, EmbeddingCache)()
    learn_task(method, GROUPS[1])
    pixels, labels = toy_images(GROUPS[1])
    plain = method.backbone.embed_pixels(pixels)
    train = method.spaces[0].embed_pixels(pixels)
    assert not torch.allclose(plain, train, atol=1e-3)
    number = torch.tensor([GROUPS[1].index(label) for label in labels])
    means = torch.stack([train[number == k].mean(dim=0) for k in range(3)])
    images = MAKE.images(method, ["ant", "bee", "fox", *GROUPS[1]])
    queries = method.spaces[0].embed_pixels(images.pixels(torch.arange(len(images))))
    answer = method.answer(images)
    expected = F.cosine_similarity(queries[:, None], means, dim=2).argmax(dim=1)
    assert torch.equal(answer.classes, expected) and answer.prompts.tolist() == [0] * len(images)


def test_each_space_is_computed_once_per_image():
    method = MAKE.after()
    images = MAKE.images(method, GROUPS[0])
    for _ in range(2):
        answer = method.answer(images)
    assert images.forward_passes == 3 * len(images) and answer.prompts.tolist() == [2] * len(images)


def test_training_that_changes_nothing_is_named():
    with pytest.warns(ProtosteerWarning, match="learning_rate"):
        learn_task(Maker(EASE, {"learning_rate": 1e-9})(), GROUPS[0])
