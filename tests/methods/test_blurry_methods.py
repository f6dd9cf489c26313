"""A class that comes in two tasks is what it is in one, wherever a method keeps sums of its images."""

from typing import Any

import pytest
import torch

from expect import expect_error
from protosteer.data.images import ArrayImages
from protosteer.errors import ModelFileError, SettingsError
from protosteer.methods import METHODS, find_method
from protosteer.methods.base import Method
from protosteer.methods.checks import Maker, check_repeated_classes, checks_for
from protosteer.methods.ncm import NCM
from protosteer.methods.testing import toy_images
from protosteer.streams.base import TrainingTask
from protosteer.util.tensor_file import pack_tensors, unpack_tensors

NAMES = ["ant", "bee", "cat"]
PIXELS, LABELS = toy_images(NAMES, per_class=9)
# Classes come once, twice and three times, in parts of unequal sizes; the second task has nothing new.
PARTS = [
    [i for i in range(27) if i < 4 or 9 <= i < 11],
    [i for i in range(27) if 4 <= i < 5 or 11 <= i < 18],
    [i for i in range(27) if 5 <= i < 9 or i >= 18],
]
CLOSED = {
    "ncm": ("means",),
    "slda": ("means", "covariance", "counts"),
    "fecam": ("means", "counts", "sums", "inverses"),
    "ranpac": ("sums",),
    "knn": ("embeddings", "labels"),
    "aper": ("means", "counts"),
}


def learned(name: str, parts: list[list[int]], **settings: Any) -> Method:
    method = Maker(find_method(name), settings)()
    for number, rows in enumerate(parts):
        labels = [LABELS[i] for i in rows]
        method.learn(TrainingTask(f"task-{number}", sorted(set(labels)), ArrayImages(PIXELS[rows]), labels))
    assert method.classes == NAMES
    return method


@pytest.mark.parametrize("name", CLOSED)
def test_two_parts_of_a_class_are_the_class(name, monkeypatch):
    if name == "aper":  # its prompt is the first task's, whatever comes later
        monkeypatch.setattr("protosteer.methods.first_session.tune_deep_prompt", lambda *_: torch.zeros(2, 2, 24))
    settings = {"first_session": "none"} if name == "ranpac" else {}
    whole, parted = (learned(name, parts, **settings) for parts in ([list(range(27))], PARTS))
    assert parted.tasks == [["ant", "bee"], [], ["cat"]]
    for what in CLOSED[name]:
        ours, theirs = (getattr(method, what) for method in (parted, whole))
        if name == "knn":  # in the order in which they came
            ours, theirs = (
                some[torch.argsort(some.flatten(1)[:, 0] if some.ndim > 1 else some)] for some in (ours, theirs)
            )
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6 * float(theirs.abs().max()))
    images = Maker(type(whole)).images(whole, NAMES)
    assert torch.equal(parted.predict(images), whole.predict(images))


@pytest.mark.parametrize("features", [20, 300])  # fewer and more than there are images
def test_the_ridge_of_parts_is_the_ridge_of_all(features):
    whole, parted = (
        learned("ranpac", parts, features=features, first_session="none") for parts in ([list(range(27))], PARTS)
    )
    ours, theirs = (method.factor.T @ method.factor for method in (parted, whole))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))


def test_of_several_centroids_new_ones_come_beside_the_old():
    method = learned("ncm", PARTS, centroids=2)
    assert isinstance(method, NCM)
    assert method.owners.bincount().tolist() == [2 + 1 + 2, 2 + 2, 2] and int(method.counts.sum()) == 27


def test_methods_without_support_reject_repeated_classes():
    able = {name for name, method in METHODS.items() if method.supports_repeated_classes}
    assert able >= {*CLOSED, "cpp", "protosteer", "probe", "joint", "finetune", "er"} and able < set(METHODS)
    for name, method in METHODS.items():
        assert (check_repeated_classes in checks_for(method)) == (name in able)
    with expect_error("no-repeated-classes", SettingsError, method="icarl"):
        METHODS["icarl"].require_repeated_classes()


def test_the_check_finds_a_method_that_names_a_class_twice():
    class Twice(NCM):
        def learn(self, task):
            super().learn(task)
            self.tasks[-1] = sorted(set(task.train_labels))

    with pytest.raises((AssertionError, IndexError)):
        check_repeated_classes(Maker(Twice))


def test_a_state_of_another_version_is_rejected():
    method = learned("slda", PARTS)
    tensors = method.state_dict()
    for other in ({k: t for k, t in tensors.items() if k != "counts"}, tensors | {"more": torch.ones(1)}):
        with expect_error("other-state", ModelFileError, method="slda"):
            method.load_state_dict(other)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("means", lambda t: t[:, :-1]),
        ("means", lambda t: t[:-1]),
        ("means", lambda t: t.half()),
        ("means", lambda t: t / 0),
        ("owners", lambda t: t + 100),
        ("owners", lambda t: t - 100),
        ("counts", lambda t: t[None]),
    ],
)
def test_a_forged_state_is_rejected(name, change):
    method = learned("ncm", PARTS)
    header, tensors = unpack_tensors(method.state(), "it")
    method.restore(pack_tensors(header, tensors))
    forged = [(header, tensors | {name: change(tensors[name])}), ({**header, "tasks": [5]}, tensors), ({}, tensors)]
    for state in forged:
        with expect_error("other-state", ModelFileError, method="ncm"):
            method.restore(pack_tensors(*state))
