"""S-Prompts against scikit-learn's K-means, a search through all centroids and heads applied by hand."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from sklearn.metrics import pairwise_distances

from protosteer.data.images import ArrayImages
from protosteer.evaluation.embedding_cache import EmbeddingCache
from protosteer.methods.checks import Maker
from protosteer.methods.per_task_tuning import tune_prompt
from protosteer.methods.plain_images import PlainImages
from protosteer.methods.s_prompts import SPrompts
from protosteer.methods.testing import GROUPS, toy_backbone, toy_images, toy_task
from protosteer.methods.training_utils import task_seed
from protosteer.streams.base import training_view

MAKE = Maker(SPrompts, make_images=EmbeddingCache)


def unit(embeddings):
    return embeddings / embeddings.norm(dim=1, keepdim=True)


def odd_images():
    """Images of all classes, and some of none."""
    draw = torch.Generator().manual_seed(3)
    known = toy_images([name for group in GROUPS for name in group], per_class=5, seed=90)[0]
    return torch.cat([known, torch.randint(0, 256, (60, 3, 16, 16), generator=draw).byte()])


def test_centroids_are_scikit_learns():
    method = MAKE.after()
    for t, group in enumerate(GROUPS):
        points = unit(method.backbone.embed_pixels(toy_images(group)[0])).double().numpy()
        seed = task_seed(0, group) % 2**32
        expected = torch.from_numpy(KMeans(5, n_init=10, random_state=seed).fit(points).cluster_centers_)
        found = method.centroids[method.owners == t].double()
        near = torch.cdist(expected, found)
        assert len(found) == 5 and near.min(dim=1).values.max() < 1e-5 and near.min(dim=0).values.max() < 1e-5


def test_the_task_of_the_nearest_centroid_answers_and_nobody_else():
    method, pixels = MAKE.after(), odd_images()
    answer = method.answer(EmbeddingCache(method, ArrayImages(pixels)))
    plain = unit(method.backbone.embed_pixels(pixels))
    distances = pairwise_distances(plain.numpy(), method.centroids.numpy(), metric="manhattan")
    starts, chosen = [0, 2, 5, 6], []
    for i, row in enumerate(distances):
        t = int(method.owners[row.argmin()])
        prompted = method.backbone.embed_pixels(pixels[i : i + 1], method.prompts[t])[0]
        own = range(starts[t], starts[t + 1])
        logits = torch.stack([method.weight[k] @ prompted + method.bias[k] for k in own])
        assert answer.classes[i] == own[int(logits.argmax())]
        assert abs(answer.confidence[i] - logits.softmax(dim=0).max()) < 1e-4
        assert answer.candidates[i].tolist() == [s == t for s in range(3)]
        chosen.append(t)
    assert set(chosen) == {0, 1, 2} and answer.prompts.tolist() == [1] * len(pixels)


def test_a_task_is_learned_as_if_there_were_no_other():
    method, backbone = MAKE.after(2), toy_backbone()
    with torch.random.fork_rng():
        torch.manual_seed(task_seed(0, GROUPS[1]))
        start = torch.nn.Linear(24, 2).weight.detach()[None]
        head = torch.nn.Linear(24, 3)
        prompt = tune_prompt(toy_task(GROUPS[1]), backbone, start, head, method.settings, torch.default_generator)
    assert torch.equal(method.prompts[1], prompt) and not torch.equal(prompt, start)
    assert torch.equal(method.weight[2:], head.weight) and torch.equal(method.bias[2:], head.bias)


def test_a_class_has_a_row_in_the_head_of_every_task_that_brings_it():
    method = SPrompts(toy_backbone(), SPrompts.settings_class(**SPrompts.test_settings))
    for name, classes in (("day", ["ant", "bee"]), ("night", ["bee", "cat"])):
        with training_view(replace(toy_task(classes), name=name)) as task:
            method.learn(task)
    assert method.tasks == [["ant", "bee"], ["cat"]] and method.heads.tolist() == [[0, 0], [0, 1], [1, 1], [1, 2]]
    pixels, labels = toy_images(["ant", "bee", "cat"], per_class=4, seed=50)
    answer = method.answer(PlainImages(method, ArrayImages(pixels)))
    # By hand: the head of the chosen task, over its own classes.
    plain = F.normalize(method.backbone.embed_pixels(pixels), dim=1)
    chosen = method.owners[torch.cdist(plain, method.centroids, p=1).argmin(dim=1)].tolist()
    for row, t in enumerate(chosen):
        prompted = method.backbone.embed_pixels(pixels[row : row + 1], method.prompts[t])
        own = slice(0, 2) if t == 0 else slice(2, 4)
        best = int(F.linear(prompted, method.weight[own], method.bias[own]).argmax())
        assert method.classes[answer.classes[row]] == [["ant", "bee"], ["bee", "cat"]][t][best]
