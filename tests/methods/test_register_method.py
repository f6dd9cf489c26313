"""A method from outside the package: one class in this file, run through the checks and the protocol.

Without postponed annotations, as authors may write it: settings must understand both forms.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import protosteer.methods
from expect import expect_error
from protosteer.errors import SettingsError
from protosteer.evaluation.embedding_cache import EmbeddingCache
from protosteer.evaluation.experiment import Experiment, run_experiment
from protosteer.methods import METHODS, Answer, Method, Source, find_method, register_method, unregister_method
from protosteer.methods.base import MethodSettings
from protosteer.methods.checks import Maker, check_method, checks_for
from protosteer.methods.training_utils import embed_task, number_labels, update_means
from protosteer.settings import setting


@dataclass(frozen=True)
class MeanSettings(MethodSettings):
    power: float = setting(2.0, above=0)  # of the distance


@pytest.fixture
def mean_method() -> Iterator[type[Method]]:
    """The nearest mean by a Minkowski distance, registered for one test."""

    @register_method("test-means")
    class Means(Method):
        source = Source("Nobody", "A method of the test suite", "nowhere", 2026)
        settings_class = MeanSettings
        supports_repeated_classes = True
        state_fields = {"means": "per class", "counts": "per class"}
        test_settings = {"power": 1.5}

        def __init__(self, backbone, settings):
            super().__init__(backbone, settings)
            self.means = torch.empty(0, backbone.dim)
            self.counts = torch.empty(0, dtype=torch.long)

        def learn(self, task):
            classes, labels = number_labels(task, self.classes)
            embeddings = embed_task(task, self.backbone, self.embed_batch_size)
            self.means, self.counts = update_means(self.means, self.counts, embeddings, labels)
            self.tasks.append(classes)

        def answer(self, images):
            embeddings = images.embed(torch.arange(len(images)))
            return Answer(torch.cdist(embeddings, self.means, p=self.settings.power).argmin(dim=1))

    yield Means
    unregister_method("test-means")
    with expect_error("unknown-method", SettingsError, name="test-means"):
        find_method("test-means")


def test_it_passes_the_checks(mean_method):
    check_method(mean_method)
    make = Maker(mean_method, make_images=EmbeddingCache)
    for check in checks_for(mean_method):
        check(make)
    method = make.after()
    assert method.settings.power == 1.5
    assert method.bytes_per_task() == [(4 * 24 + 8) * len(task) for task in method.tasks]


def test_it_runs_through_the_protocol(mean_method, tmp_path):
    values = {"stream": "split-digits", "tasks": 2, "train_per_class": 5, "test_per_class": 3, "device": "cpu"}
    made = Experiment.from_values({**values, "method": "test-means", "power": 1.0, "out": tmp_path / "run"})
    figures = run_experiment(made)
    assert figures["mean"]["last_accuracy"] > 50 and figures["mean"]["bytes_per_class"] == 4 * 128 + 8
    assert len(list((tmp_path / "run").rglob("task-*.safetensors"))) == 2
    with expect_error("setting-out-of-bounds", SettingsError, name="power"):
        Experiment.from_values({**values, "method": "test-means", "power": 0.0})


def test_a_name_belongs_to_one_method(mean_method):
    assert find_method("test-means") is mean_method and mean_method.name == "test-means"
    register_method("test-means")(mean_method)  # as a notebook cell that is run twice
    with expect_error("duplicate-method", SettingsError, name="test-means"):
        register_method("test-means")(find_method("ncm"))
    assert find_method("ncm").name == "ncm"


def test_every_file_of_the_package_is_found():
    """No list of imports to keep: the registry has what the files declare."""
    folder = Path(protosteer.methods.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("*.py")]
    assert sum(text.count('\n@register_method("') for text in texts) == len(METHODS) >= 27
    assert all(METHODS[name].name == name for name in METHODS)
