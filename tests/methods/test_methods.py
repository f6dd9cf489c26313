"""Checks that every method must pass, whatever it does, and what is special about the two that there are."""

from __future__ import annotations

import pytest
import torch

from conftest import easy_task, tiny_backbone
from protosteer.data.images import ArrayImages
from protosteer.errors import ModelFileError, SettingsError
from protosteer.evaluation.cache import EmbeddingCache
from protosteer.methods import METHODS, Method, find_method
from protosteer.methods.cpp import CPP
from protosteer.methods.ncm import NCM
from protosteer.streams.base import Task

CHEAP = {"cpp": {"epochs": 2, "batch_size": 8, "neck_hidden": 16, "augmentation": "crop", "centroids": 2}}
GROUPS = [["ant", "bee"], ["cat", "dog", "eel"], ["fox"]]


def make(name: str, seed: int = 0) -> Method:
    method = find_method(name)
    return method(tiny_backbone(), method.settings_from({**CHEAP.get(name, {}), "seed": seed}))


def task(classes: list[str]) -> Task:
    train, labels = easy_task(classes)
    test, test_labels = easy_task(classes, per_class=5, seed=90)
    return Task(classes[0], classes, ArrayImages(train), labels, ArrayImages(test), test_labels)


def taught(name: str, tasks: int = 3, seed: int = 0) -> Method:
    method = make(name, seed)
    for group in GROUPS[:tasks]:
        method.learn(task(group))
    return method


def images(method: Method, classes: list[str], rows: slice = slice(None)) -> EmbeddingCache:
    return EmbeddingCache(method.backbone, ArrayImages(easy_task(classes, per_class=5, seed=90)[0][rows]), 64)


@pytest.fixture(params=sorted(METHODS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_learns_what_it_is_taught_and_numbers_its_classes(name):
    method = taught(name)
    assert method.classes == [label for group in GROUPS for label in group]
    for group in GROUPS:
        answer = method.answer(images(method, group))
        truth = [method.classes.index(label) for label in easy_task(group, per_class=5)[1]]
        assert (answer.classes == torch.tensor(truth)).float().mean() > 0.8
        assert torch.equal(method.predict(images(method, group)), answer.classes)


def test_many_images_are_predicted_as_one_by_one(name):
    method = taught(name, 2)
    together = method.predict(images(method, GROUPS[1]))
    alone = [method.predict(images(method, GROUPS[1], slice(i, i + 1))) for i in range(len(together))]
    assert torch.equal(together, torch.cat(alone))


def test_predicting_changes_nothing(name):
    method = taught(name, 2)
    before = method.state()
    method.predict(images(method, GROUPS[0]))
    assert method.state() == before


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(name):
    assert taught(name, 2).state() == taught(name, 2).state()
    assert taught(name, 2).state() != taught(name, 2, seed=1).state()


def test_a_state_restores_everything(name):
    method, other = taught(name), make(name)
    other.restore(method.state())
    assert other.state() == method.state() and other.classes == method.classes
    assert other.bytes_per_task() == method.bytes_per_task()
    for group in GROUPS:
        assert torch.equal(other.predict(images(other, group)), method.predict(images(method, group)))


def test_a_restored_method_learns_on_as_if_nothing_had_happened(name):
    other = make(name)
    other.restore(taught(name, 2).state())
    other.learn(task(GROUPS[2]))
    assert other.state() == taught(name, 3).state()


def test_memory_grows_with_tasks_not_with_images(name):
    sizes = taught(name).bytes_per_task()
    assert len(sizes) == 3 and all(size > 0 for size in sizes)
    short = make(name)
    train, labels = easy_task(GROUPS[0], per_class=40)
    short.learn(Task("many", GROUPS[0], ArrayImages(train), labels, ArrayImages(train), labels))
    assert short.bytes_per_task()[0] == sizes[0]


def test_a_damaged_state_is_refused(name):
    state = bytearray(taught(name, 1).state())
    state[-1] ^= 1
    with pytest.raises(ModelFileError, match="altered or damaged"):
        make(name).restore(bytes(state))


def test_ncm_with_one_centroid_is_the_nearest_class_mean():
    method = taught("ncm")
    assert isinstance(method, NCM) and method.trained_parameters() == 0
    means, truth = [], []
    for group in GROUPS:
        pixels, labels = easy_task(group)
        embedded = method.backbone.embed_pixels(pixels)
        means += [embedded[[label == name for label in labels]].mean(dim=0) for name in group]
        truth.append(method.backbone.embed_pixels(easy_task(group, per_class=5, seed=90)[0]))
    cosine = torch.nn.functional.cosine_similarity(torch.cat(truth)[:, None], torch.stack(means)[None], dim=2)
    predicted = torch.cat([method.predict(images(method, group)) for group in GROUPS])
    assert torch.equal(cosine.argmax(dim=1), predicted)


def test_ncm_takes_centroids_and_refuses_what_would_do_nothing():
    assert NCM.settings_from({"centroids": 5}).centroids == 5
    assert NCM.settings_from({}).centroids == 1 and not NCM.settings_from({}).prompts
    with pytest.raises(SettingsError, match="trains nothing: unknown setting 'epochs'"):
        NCM.settings_from({"epochs": 3})
    with pytest.raises(SettingsError, match="did you mean 'centroids'"):
        NCM.settings_from({"centroid": 3})


def test_cpp_is_the_learner():
    method = taught("cpp")
    assert isinstance(method, CPP)
    pixels = easy_task(GROUPS[1], per_class=5, seed=90)[0]
    labels = [method.classes[k] for k in method.predict(images(method, GROUPS[1])).tolist()]
    assert labels == method.learner.predict(pixels).labels
    answer = method.answer(images(method, GROUPS[1]))
    assert answer.candidates is not None and answer.prompts is not None
    assert torch.equal(answer.candidates.sum(dim=1), answer.prompts) and int(answer.prompts.min()) >= 1


def test_an_unknown_method_is_named_with_the_nearest():
    with pytest.raises(SettingsError, match="no method is called 'cp'; did you mean 'cpp'"):
        find_method("cp")
