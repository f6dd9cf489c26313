"""What every method must pass, whatever it does. A check takes a `Maker` and raises AssertionError.

    for check in checks_for(MyMethod):
        check(Maker(MyMethod, {"epochs": 2}))

They run on tiny images and a random ViT of two layers, in seconds. Which of them apply depends on what the
method declares of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import ArrayImages, ImageSet
from protosteer.errors import LearnerError, ModelFileError
from protosteer.methods.base import Images, Method
from protosteer.methods.testing import GROUPS, PlainImages, toy_backbone, toy_images, toy_task
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import Stage
from protosteer.streams.base import TaskData, lesson


@dataclass(frozen=True)
class Maker:
    """Makes methods of one kind: cheap settings that learn well enough, and a way to see test images."""

    method: type[Method]
    settings: Mapping[str, Any] = field(default_factory=dict)
    see: Callable[[Method, ImageSet], Images] | None = None  # None: nothing is cached
    states: dict[tuple[int, int], bytes] = field(default_factory=dict)  # by tasks and seed

    def __call__(self, seed: int = 0, backbone: Backbone | None = None) -> Method:
        own = self.method.preset(None)
        settings = self.method.settings_from({**own, **self.settings, "seed": seed})
        return self.method(backbone or toy_backbone(), settings)

    def taught(self, tasks: int = len(GROUPS), seed: int = 0) -> Method:
        """One that has learned the first tasks. What was taught once is restored, not taught again."""
        method = self(seed)
        begun = max((n for n, s in self.states if s == seed and n <= tasks), default=0)
        if begun:
            method.restore(self.states[begun, seed])
        for i in range(begun, tasks):
            learn_tasks(method, GROUPS[i])
            self.states[i + 1, seed] = method.state()
        return method

    def images(self, method: Method, classes: Sequence[str], rows: slice = slice(None)) -> Images:
        """Test images of some classes as a run would show them."""
        images = ArrayImages(toy_images(classes, per_class=5, seed=90)[0][rows])
        return self.see(method, images) if self.see else PlainImages(method, images)

    def answers(self, method: Method) -> list[Tensor]:
        return [
            method.predict(self.images(method, group)) for group in GROUPS[: len(method.bytes_per_task())]
        ]


def learn_tasks(method: Method, group: Sequence[str], per_class: int = 8, **more: Any) -> None:
    """A task as a run teaches it: its images are gone afterwards."""
    with lesson(toy_task(group, per_class)) as task:
        method.learn(task, **more)


Check = Callable[[Maker], None]


def checks_for(method: type[Method]) -> list[Check]:
    """The checks that apply to a method, by what it declares."""
    chosen: list[Check] = [
        check_nothing_is_predicted_before_something_is_learned,
        check_learns_what_it_is_taught,
        check_many_images_are_predicted_as_one_by_one,
        check_predicting_changes_nothing,
        check_the_same_seed_gives_the_same_state,
        check_a_state_restores_everything,
        check_a_restored_method_learns_on,
        check_a_damaged_state_is_refused,
        check_interrupted_learning_goes_on,
        check_the_given_backbone_stays_as_it_was,
        check_tasks_are_not_told_apart_by_how_images_come,
    ]
    if not method.grows:
        chosen.append(check_memory_does_not_grow_with_images)
    if method.buffer:
        chosen.append(check_images_of_earlier_tasks_are_counted)
    if method.again:
        chosen.append(check_classes_come_again)
    if method.trains_backbone:
        chosen.append(check_embeddings_of_earlier_weights_are_not_used)
    return chosen


def check_nothing_is_predicted_before_something_is_learned(make: Maker) -> None:
    method = make()
    try:
        method.predict(make.images(method, GROUPS[0]))
    except LearnerError as error:
        assert "learned nothing yet" in str(error), error
    else:
        raise AssertionError("a method that has learned nothing must say so")


def check_learns_what_it_is_taught(make: Maker) -> None:
    """The task just learned is known, and classes have the numbers of `classes`."""
    for i, group in enumerate(GROUPS):
        method = make.taught(i + 1)
        assert method.classes == [name for some in GROUPS[: i + 1] for name in some]
        assert len(method.bytes_per_task()) == i + 1 and min(method.bytes_per_task()) > 0
        labels = toy_images(group, per_class=5)[1]
        truth = torch.tensor([method.classes.index(label) for label in labels])
        answer = method.answer(make.images(method, group))
        assert answer.classes.dtype == torch.int64 and answer.classes.shape == truth.shape
        assert (answer.classes == truth).float().mean() > 0.8, (group, answer.classes)


def check_many_images_are_predicted_as_one_by_one(make: Maker) -> None:
    method = make.taught(2)
    together = method.predict(make.images(method, GROUPS[1]))
    alone = [method.predict(make.images(method, GROUPS[1], slice(i, i + 1))) for i in range(len(together))]
    assert torch.equal(together, torch.cat(alone))


def check_predicting_changes_nothing(make: Maker) -> None:
    method = make.taught(2)
    before = method.state()
    make.answers(method)
    assert method.state() == before


def check_the_same_seed_gives_the_same_state(make: Maker) -> None:
    """And the caller's random state is left as it was."""
    first, again = make.taught(2), make()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    for group in GROUPS[:2]:
        learn_tasks(again, group)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.state() == again.state() != make.taught(2, seed=1).state()


def check_a_state_restores_everything(make: Maker) -> None:
    method, other = make.taught(), make()
    other.restore(method.state())
    assert other.state() == method.state() and other.classes == method.classes
    assert other.bytes_per_task() == method.bytes_per_task()
    assert other.trained_parameters() == method.trained_parameters()
    assert all(torch.equal(a, b) for a, b in zip(make.answers(method), make.answers(other), strict=True))


def check_a_restored_method_learns_on(make: Maker) -> None:
    """As one that was never interrupted: all that it needs of earlier tasks is in its state."""
    other, whole = make(), make()
    other.restore(make.taught(2).state())
    learn_tasks(other, GROUPS[2])
    for group in GROUPS:
        learn_tasks(whole, group)
    assert other.state() == whole.state()


def check_a_damaged_state_is_refused(make: Maker) -> None:
    state = bytearray(make.taught(1).state())
    state[-1] ^= 1
    try:
        make().restore(bytes(state))
    except ModelFileError as error:
        assert "altered or damaged" in str(error), error
    else:
        raise AssertionError("a state that was altered must be refused")


def check_interrupted_learning_goes_on(make: Maker) -> None:
    """A process that ends amid training is followed by another that ends in the same bits."""
    with TemporaryDirectory() as folder:
        begun, checkpoint = make.taught(1), CheckpointFile(Path(folder) / "checkpoint", seconds=0)
        try:
            learn_tasks(begun, GROUPS[1], on_stage=_stop, checkpoint=checkpoint)
        except _Interrupted:
            begun = make.taught(1)
            learn_tasks(begun, GROUPS[1], checkpoint=checkpoint)
    assert begun.state() == make.taught(2).state()


class _Interrupted(Exception):
    pass


def _stop(stage: Stage) -> None:
    if stage.training and stage.training.step == 3:
        raise _Interrupted


def check_the_given_backbone_stays_as_it_was(make: Maker) -> None:
    given = toy_backbone()
    before = {name: tensor.clone() for name, tensor in given.vit.state_dict().items()}
    method = make(backbone=given)
    learn_tasks(method, GROUPS[0])
    assert all(torch.equal(before[name], tensor) for name, tensor in given.vit.state_dict().items())
    assert (method.backbone is given) != method.trains_backbone
    assert (method.backbone.fingerprint != given.fingerprint) == method.trains_backbone


def check_memory_does_not_grow_with_images(make: Maker) -> None:
    """Of a few images more may be kept than of fewer, but there is an end to it."""
    quick = {"epochs": 1} if hasattr(make.method.settings_class, "epochs") else {}
    states, counted = [], []
    for per_class in (40, 80):
        method = Maker(make.method, {**make.settings, **quick})()
        learn_tasks(method, GROUPS[0], per_class)
        states.append(len(method.state()))
        counted.append(method.bytes_per_task())
    assert counted[0] == counted[1] and abs(states[0] - states[1]) < 500, (counted, states)


def check_images_of_earlier_tasks_are_counted(make: Maker) -> None:
    """A buffer is part of the state, and of its bytes."""
    method = make.taught()
    assert method.buffer and len(method.state()) > 16 * 16 * 3 * len(GROUPS)
    assert sum(method.bytes_per_task()) <= len(method.state()) <= sum(method.bytes_per_task()) + 50_000


def check_classes_come_again(make: Maker) -> None:
    """Known classes beside new ones, then known ones alone: each task is known afterwards, no class twice; and
    a process that follows another, between tasks or amid the last, ends in the same bits.
    """
    tasks = [["ant", "bee"], ["bee", "cat", "dog"], ["ant", "cat"]]

    def taught(method: Method, first: int, last: int, **more: Any) -> Method:
        for i in range(first, last):
            images, labels = toy_images(tasks[i], seed=10 * i)
            with lesson(TaskData(f"task-{i}", tasks[i], ArrayImages(images), labels)) as task:
                method.learn(task, **more)
            answers = method.predict(make.images(method, tasks[i]))
            truth = torch.tensor([method.classes.index(name) for name in tasks[i] for _ in range(5)])
            assert (answers == truth).float().mean() > 0.8, (tasks[i], answers)
        return method

    whole, other = taught(make(), 0, 2), make()
    assert whole.classes == ["ant", "bee", "cat", "dog"]
    before = whole.state()
    other.restore(before)
    taught(whole, 2, 3)
    assert whole.classes == other.classes and len(whole.bytes_per_task()) == 3
    with TemporaryDirectory() as folder:
        checkpoint = CheckpointFile(Path(folder) / "checkpoint", seconds=0)
        try:
            taught(other, 2, 3, on_stage=_stop, checkpoint=checkpoint)
        except _Interrupted:
            other = make()
            other.restore(before)
            taught(other, 2, 3, checkpoint=checkpoint)
    assert other.state() == whole.state() != before


def check_tasks_are_not_told_apart_by_how_images_come(make: Maker) -> None:
    """Images of all tasks together get the answers that they get task by task."""
    method = make.taught()
    together = method.predict(make.images(method, [name for group in GROUPS for name in group]))
    pixels = [toy_images(group, per_class=5, seed=90)[0] for group in GROUPS]
    mixed = toy_images([name for group in GROUPS for name in group], per_class=5, seed=90)[0]
    see = make.see or PlainImages
    apart = [method.predict(see(method, ArrayImages(some))) for some in mixed.split([len(p) for p in pixels])]
    assert torch.equal(together, torch.cat(apart))


def check_embeddings_of_earlier_weights_are_not_used(make: Maker) -> None:
    """Test images that were seen before a task was learned are answered as if they were new."""
    method = make.taught(1)
    seen = make.images(method, GROUPS[0])
    before = seen.embed(torch.arange(len(seen)))
    learn_tasks(method, GROUPS[1])
    fresh = make.images(method, GROUPS[0])
    assert not torch.equal(before, fresh.embed(torch.arange(len(fresh))))
    assert torch.equal(seen.embed(torch.arange(len(seen))), fresh.embed(torch.arange(len(fresh))))
