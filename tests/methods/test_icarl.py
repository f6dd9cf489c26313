"""Herding by trying every image, the loss class by class, and scikit-learn's nearest centroid."""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import NearestCentroid

from expect import expect_error
from protosteer.errors import SettingsError
from protosteer.methods.checks import Maker, learn_task
from protosteer.methods.icarl import ICaRL, herding
from protosteer.methods.testing import GROUPS, toy_images, toy_task


def make(**changes):
    return Maker(ICaRL, changes)


def test_herding_brings_the_mean_of_those_chosen_nearest_to_the_class_mean():
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        features = F.normalize(torch.randn(15, 4, generator=draw, dtype=torch.float64) + 1, dim=1)
        chosen: list[int] = []
        for _ in range(15):
            distance = {
                i: float((features.mean(dim=0) - features[[*chosen, i]].mean(dim=0)).norm())
                for i in range(15)
                if i not in chosen
            }
            chosen.append(min(distance, key=distance.__getitem__))
        assert herding(features, 15).tolist() == herding(features, 99).tolist() == chosen
        assert herding(features, 4).tolist() == chosen[:4]


def test_exemplars_are_chosen_by_the_network_of_their_task_and_the_first_stay():
    maker = make(buffer_size=12)
    first, later = maker.after(1), maker.after(2)
    for label, name in enumerate(GROUPS[0]):
        pixels = toy_images(GROUPS[0])[0][label * 8 : label * 8 + 8]
        order = herding(F.normalize(first.backbone.embed_pixels(pixels), dim=1), 6)
        at_first = first.buffer.pixels[first.buffer.labels == label]
        assert torch.equal(at_first, pixels[order]), name
        assert torch.equal(later.buffer.pixels[later.buffer.labels == label], at_first[:2])


def test_the_nearest_mean_of_exemplars_is_scikit_learns_nearest_centroid():
    maker = make()
    method = maker.after()
    seen = F.normalize(method.backbone.embed_pixels(method.buffer.pixels), dim=1)
    oracle = NearestCentroid().fit(seen.numpy(), method.buffer.labels.numpy())
    oracle.centroids_ = F.normalize(torch.from_numpy(oracle.centroids_).float(), dim=1).numpy()
    torch.testing.assert_close(method.means, torch.from_numpy(oracle.centroids_), rtol=0, atol=1e-6)
    # Noise about which the classes may disagree, too.
    noise = torch.randint(0, 255, (40, 3, 16, 16), generator=torch.Generator().manual_seed(1))
    pixels = torch.cat([toy_images([*GROUPS[0], *GROUPS[1]], seed=90)[0], noise.to(torch.uint8)])
    queries = F.normalize(method.backbone.embed_pixels(pixels), dim=1)

    class Shown:
        def __len__(self):
            return len(pixels)

        def embed(self, rows):
            return method.backbone.embed_pixels(pixels[rows])

    answers = method.predict(Shown())
    assert answers.tolist() == oracle.predict(queries.numpy()).tolist() and len(answers.unique()) > 3


def test_the_targets_of_old_classes_are_what_the_network_said_before():
    maker = make()
    method, before = maker.after(2), maker.after(2)
    method.begin_task(toy_task(GROUPS[2]), torch.tensor([5]))
    method.head.grow(1)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():  # somewhere on the way through the task
        for parameter in method.parameters().values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
    pixels = torch.cat([toy_images(GROUPS[2], per_class=3)[0], toy_images(["cat"], per_class=2)[0]])
    images, labels = method.backbone.preprocessing(pixels), torch.tensor([5, 5, 5, 2, 2])
    value, _ = method.loss(images, labels)
    terms = []
    for image, label in zip(images, labels.tolist(), strict=True):
        now = method.head(method.backbone.embed(image[None]))[0].tolist()
        then = before.head(before.backbone.embed(image[None]))[0].tolist()
        targets = [1 / (1 + math.exp(-x)) for x in then] + [float(label == 5)]
        for logit, target in zip(now, targets, strict=True):
            said = 1 / (1 + math.exp(-logit))
            terms.append(-target * math.log(said) - (1 - target) * math.log(1 - said))
    assert len(terms) == 5 * 6 and value.item() == pytest.approx(sum(terms) / len(terms), rel=1e-4)


def test_exemplars_are_trained_on_beside_the_tasks_images():
    method = make().after(1)
    images, labels = method.training_set(toy_task(GROUPS[1]).train, torch.arange(24) // 8 + 2)
    assert len(images) == len(labels) == 24 + 16 and labels.bincount().tolist() == [8] * 5
    assert torch.equal(images.pixels(range(16)), method.buffer.pixels)


def test_a_buffer_without_room_for_every_class_is_refused():
    method = make(buffer_size=4, epochs=1).after(1)
    with expect_error("buffer-too-small", SettingsError, name="buffer_size"):
        learn_task(method, GROUPS[1])
