"""The default classifier against its twin in NumPy, and what its records promise."""

import dataclasses

import numpy as np
import pytest
import torch
from numpy_twin import Twin, as_tasks

from conftest import easy_task, tiny_backbone
from protosteer.evidence.classifier import EvidenceClassifier
from protosteer.evidence.prototype_summary import summarise_class
from protosteer.learner import Learner, merge
from protosteer.model.class_table import ClassTable
from protosteer.model.index import Index
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord, TaskRecord
from protosteer.paper.prototypes import Centroids
from protosteer.settings import Settings

DIM, IMAGES = 8, 60
QUICK = Settings.preset("best", epochs=2, batch_size=8, neck_hidden=16, augmentation="crop", centroids=2)
ALONE = QUICK.replace(independent=True)
SPRING, SUMMER, AUTUMN = ["ant", "bee"], ["cat", "dog", "eel"], ["fox", "gnu"]


class World:
    """Classes in three tasks, seen in several spaces: plain, the first task's prompt for all, own prompts."""

    def __init__(self, seed: int = 0, domain: bool = True, noise: float = 0.9, again: tuple[str, ...] = ()):
        """again: classes that the last task has too."""
        self.draw = torch.Generator().manual_seed(seed)
        self.noise, self.tasks = noise, [["d", "b"], ["a", "e", "c"], ["f", *again]]
        self.centres = {name: torch.randn(DIM, generator=self.draw) for t in self.tasks for name in t}
        self.turns = [torch.linalg.qr(torch.randn(DIM, DIM, generator=self.draw))[0] for _ in range(4)]
        prompts = [torch.full((2, 1, DIM), float(t)) for t in range(len(self.tasks))]
        records = []
        for t, names in enumerate(self.tasks):
            classes = tuple(self.record(name, t, domain) for name in names)
            records.append(
                TaskRecord(f"t{t}", ClassTable.of(classes), prompts[t], shared_prompt=prompts[0] if domain else None)
            )
        self.memory = Memory(records)
        labels = torch.arange(IMAGES) % len(self.memory.classes)
        self.labels = labels
        self.images = torch.stack([self.image(self.memory.classes[i]) for i in labels.tolist()])
        self.plain_images, self.shared_images = self.blurred(self.images), self.blurred(self.images)

    def image(self, name: str) -> torch.Tensor:
        return self.centres[name] + self.noise * torch.randn(DIM, generator=self.draw)

    def blurred(self, images: torch.Tensor) -> torch.Tensor:
        """In a space of all classes, which knows something that the other one does not."""
        return images + self.noise * torch.randn(images.shape, generator=self.draw)

    def record(self, name: str, task: int, domain: bool) -> ClassRecord:
        images = torch.stack([self.image(name) for _ in range(9)])
        plain = summarise_class(self.blurred(images) @ self.turns[3])
        values = (images @ self.turns[task])[:6]
        groups = Centroids(values[:3], torch.zeros(3, DIM), torch.full((3,), 3))
        everywhere = summarise_class(self.blurred(images) @ self.turns[0]) if domain else None
        return ClassRecord(name, plain.points, groups, None, plain, everywhere)

    def embed(self, rows: torch.Tensor, numbers: torch.Tensor | None) -> torch.Tensor:
        """The prompt for all classes has the number after the last task's, and is that of task 0."""
        if numbers is None:
            return self.plain_images[rows] @ self.turns[3]
        turns = torch.stack([*self.turns[:3], self.turns[0]])
        shared = (numbers % len(self.tasks) == 0)[:, None]
        images = torch.where(shared, self.shared_images[rows], self.images[rows])
        return torch.einsum("bd,bde->be", images, turns[numbers])

    def embed_all(self, prompt: np.ndarray | None) -> np.ndarray:
        """All images, for the twin; a prompt is full of the number of its task."""
        numbers = None if prompt is None else torch.full((IMAGES,), int(prompt.flat[0]))
        return self.embed(torch.arange(IMAGES), numbers).double().numpy()


@pytest.mark.parametrize("domain", [True, False])
@pytest.mark.parametrize("worth", [0.0, 0.49])
@pytest.mark.parametrize("again", [(), ("a", "d")])
def test_all_images_together_are_decided_as_one_by_one(domain, worth, again):
    world = World(domain=domain, again=again)
    read = EvidenceClassifier(world.memory, Index.build(world.memory), min_pass_weight=worth)
    assert len(read.passes) == (2 if domain and not worth else 1)
    matches = read.match(world.embed, IMAGES)
    answers = Twin(*as_tasks(world.memory), worth=worth).predict(world.embed_all)
    np.testing.assert_allclose(matches.scores.numpy(), answers.scores, atol=1e-4)
    np.testing.assert_allclose(matches.similarities.numpy(), answers.similarities, atol=1e-6)
    assert matches.passes.tolist() == answers.passes and len(set(answers.passes)) > 1


def test_whoever_is_sure_takes_one_pass():
    world = World(noise=0.05)
    read = EvidenceClassifier(world.memory, Index.build(world.memory))
    matches = read.match(world.embed, IMAGES)
    assert (matches.passes == 1).all() and not matches.candidates.any()
    assert (matches.scores.argmax(dim=1) == world.labels).all()


def test_probabilities_mean_what_they_say():
    """Over many images, mean confidence and accuracy agree, though no image was held out."""
    sure, right = [], []
    for seed in range(8):
        world = World(seed)
        matches = EvidenceClassifier(world.memory, Index.build(world.memory)).match(world.embed, IMAGES)
        probability, label = matches.scores.softmax(dim=1).max(dim=1)
        sure.append(probability)
        right.append((label == world.labels).float())
    assert float(torch.cat(sure).mean()) == pytest.approx(float(torch.cat(right).mean()), abs=0.06)


@pytest.mark.parametrize("domain", [False, True])
def test_left_out_images_are_answered_as_images_are(domain):
    world = World(domain=domain, noise=0.7)
    limits = {"min_pass_weight": 0.0, "min_unbiased": IMAGES}  # more images than there are: all are taken
    read = EvidenceClassifier(world.memory, Index.build(world.memory), **limits)
    twin = Twin(*as_tasks(world.memory), worth=0.0, enough=IMAGES)
    confidence, top = twin.checked()
    right = [predicted == truth for predicted, truth in zip(top, twin.truth, strict=True)]
    assert len(twin.order) == 1 + domain
    assert read.loo_predictions.confidence.tolist() == pytest.approx(confidence, abs=1e-4)
    assert read.loo_predictions.correct.tolist() == right and 0.5 < sum(right) / len(right) < 1
    assert read.loo_predictions.labels.tolist() == list(twin.truth)
    assert read.loo_predictions.predicted.tolist() == top


def taught(*tasks: list[str], settings: Settings = QUICK) -> Learner:
    learner = Learner(tiny_backbone(), settings)
    for classes in tasks:
        learner.learn(easy_task(classes), name=classes[0])
    return learner


def images(classes: list[str]) -> torch.Tensor:
    return easy_task(classes, per_class=6, seed=50)[0]


def test_the_first_tasks_prompt_serves_all_classes():
    learner = taught(SPRING, SUMMER)
    first, second = learner.memory.tasks
    assert torch.equal(first.shared_prompt, first.prompt) and torch.equal(second.shared_prompt, first.prompt)
    assert not torch.equal(second.prompt, first.prompt)
    assert all(record.shared is not None for record in learner.memory.records)
    assert torch.equal(learner.memory.shared_prompt, first.prompt)


def test_fast_trains_nothing_after_the_first_task():
    learner = taught(SPRING, SUMMER, settings=QUICK.replace(prompt_tasks="first"))
    first, second = learner.memory.tasks
    assert first.prompt is not None and second.prompt is None
    assert torch.equal(second.shared_prompt, first.prompt)


def test_instant_trains_nothing():
    learner = taught(SPRING, SUMMER, settings=QUICK.replace(prompts=False))
    assert all(task.prompt is None and task.shared_prompt is None for task in learner.memory.tasks)
    assert (learner.predict(images(SPRING)).passes == 1).all()


def test_a_given_prompt_serves_all_classes_of_independent_tasks():
    domain = taught(AUTUMN).memory.tasks[0].prompt
    learner = Learner(tiny_backbone(), ALONE, domain)
    learner.learn(easy_task(SPRING), name="spring")
    assert torch.equal(learner.memory.shared_prompt, domain)
    assert not torch.equal(learner.memory.tasks[0].prompt, domain)


def test_the_order_of_independent_tasks_changes_no_bit():
    a, b = taught(SPRING, SUMMER, settings=ALONE), taught(SUMMER, SPRING, settings=ALONE)
    shown = images([*SPRING, *SUMMER])
    ours, theirs = a.predict(shown), b.predict(shown)
    columns = [theirs.classes.index(name) for name in ours.classes]
    assert torch.equal(ours.scores, theirs.scores[:, columns]) and ours.labels == theirs.labels


def test_merged_independent_models_are_one_that_learned_all():
    whole, shown = taught(SPRING, SUMMER, settings=ALONE), images([*SPRING, *SUMMER])
    merged = merge(taught(SPRING, settings=ALONE), taught(SUMMER, settings=ALONE))
    assert torch.equal(merged.predict(shown).scores, whole.predict(shown).scores)


def test_forgetting_an_independent_task_leaves_no_trace():
    learner, shown = taught(SPRING, SUMMER, settings=ALONE), images(SUMMER)
    learner.forget(task="ant")
    assert torch.equal(learner.predict(shown).scores, taught(SUMMER, settings=ALONE).predict(shown).scores)


def test_models_with_different_prompts_for_all_merge_without_one():
    merged = merge(taught(SPRING), taught(SUMMER))
    assert merged.memory.shared_prompt is None
    assert [view.prompt for view in merged.reader.classifier.passes] == [None]
    assert len(merged.predict(images(SPRING))) == 12


def test_a_file_holds_every_bit(tmp_path):
    learner, shown = taught(SPRING, SUMMER, AUTUMN), images([*SPRING, *AUTUMN])
    learner.save(tmp_path / "m.protosteer")
    again = Learner.load(tmp_path / "m.protosteer", tiny_backbone())
    assert torch.equal(again.predict(shown).scores, learner.predict(shown).scores)
    assert again.model.pack() == learner.model.pack()


def test_a_class_that_cannot_be_read_as_evidence_makes_all_be_read_as_the_paper_does():
    learner = taught(SPRING)
    assert learner.reader.rule == "evidence"
    (task,) = learner.memory.tasks
    bare = ClassTable.of(dataclasses.replace(c, plain=None, shared=None) for c in task.classes)
    learner.memory = Memory([dataclasses.replace(task, classes=bare, shared_prompt=None)])
    assert learner.reader.rule == "paper"
    prediction = learner.predict(images(SPRING))
    assert torch.equal(prediction.scores, prediction.similarities)


def test_a_record_can_be_used_before_its_prompt_is_trained():
    learner, usable = Learner(tiny_backbone(), QUICK), []
    record = learner.learn(easy_task(SPRING), name="spring", on_usable=usable.append)
    (early,) = usable
    assert early.metadata.unfinished and not record.metadata.unfinished
    assert early.prompt is None and record.prompt is not None
    before = Learner(tiny_backbone(), QUICK)
    before.memory = Memory([early])
    instant = taught(SPRING, settings=QUICK.replace(prompts=False))
    shown = images(SPRING)
    assert torch.equal(before.predict(shown).scores, instant.predict(shown).scores)


def test_where_nothing_is_trained_there_is_one_record_only():
    learner = Learner(tiny_backbone(), QUICK.replace(prompts=False))
    learner.learn(easy_task(SPRING), on_usable=lambda record: pytest.fail("nothing more will come"))
