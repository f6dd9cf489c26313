"""APER against its helper and scikit-learn's nearest centroid."""

import torch
import torch.nn.functional as F
from sklearn.neighbors import NearestCentroid

from protosteer.data.images import ArrayImages
from protosteer.evaluation.embedding_cache import EmbeddingCache
from protosteer.methods.aper import APER
from protosteer.methods.checks import Maker
from protosteer.methods.per_task_tuning import tune_deep_prompt
from protosteer.methods.testing import GROUPS, toy_backbone, toy_images, toy_task

MAKE = Maker(APER, make_images=EmbeddingCache)


def test_the_prompt_is_the_first_tasks_and_stays():
    backbone, method = toy_backbone(), MAKE.after()
    prompt = tune_deep_prompt(toy_task(GROUPS[0]), backbone, method.settings)
    assert torch.equal(method.adaptation["prompt"], prompt) and prompt.shape == (2, 2, 24)
    assert prompt.flatten(1).norm(dim=1).min() > 0  # every layer has learned from it
    other = tune_deep_prompt(toy_task(GROUPS[1]), backbone, method.settings)
    assert not torch.allclose(prompt, other)


def test_decisions_are_scikit_learns_under_the_cosine():
    method = MAKE.after()

    def features(pixels):
        return torch.cat([method.backbone.embed_pixels(pixels, p) for p in (None, method.adaptation["prompt"])], dim=1)

    train = torch.cat([features(toy_images(group)[0]) for group in GROUPS])
    names = [label for group in GROUPS for label in toy_images(group)[1]]
    oracle = NearestCentroid().fit(train.numpy(), names)
    # Between vectors of length one the nearest is the most similar.
    oracle.centroids_ = F.normalize(torch.from_numpy(oracle.centroids_).float(), dim=1).numpy()
    everything = [name for group in GROUPS for name in group]
    pixels = torch.cat([toy_images(everything, per_class=5, seed=90)[0], torch.randint(0, 256, (40, 3, 16, 16)).byte()])
    expected = oracle.predict(F.normalize(features(pixels), dim=1).numpy())
    answer = method.answer(EmbeddingCache(method, ArrayImages(pixels)))
    assert [method.classes[k] for k in answer.classes] == expected.tolist()
    assert answer.prompts.tolist() == [1] * len(pixels)
