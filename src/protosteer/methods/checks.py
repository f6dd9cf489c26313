"""Checks that every method must pass. A check takes a `Maker` and raises AssertionError.

    check_method(MyMethod)

They run on tiny images and a random ViT of two layers, within seconds, with the method's `test_settings`. Which of them
apply depends on what the method declares.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.backbones.prompting import Prompt
from protosteer.data.images import ArrayImages, ImageSet
from protosteer.errors import LearnerError, ModelFileError
from protosteer.methods.base import Images, Method, TrainingTask
from protosteer.methods.plain_images import PlainImages
from protosteer.methods.testing import GROUPS, toy_backbone, toy_images, toy_task
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage, Stage
from protosteer.streams.base import training_view


@dataclass(frozen=True)
class Maker:
    """Creates instances of a method, and remembers what they have learned.

    Attributes:
        method: The class.
        settings: Settings that differ from its `test_settings`.
        make_images: Wraps test images for a method; `PlainImages` computes every embedding itself.
        states: States by the number of tasks learned and the seed; minus the number, of an instance never restored.
    """

    method: type[Method]
    settings: Mapping[str, Any] = field(default_factory=dict)
    make_images: Callable[[Method, ImageSet], Images] = PlainImages
    states: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def __call__(self, seed: int = 0, backbone: Backbone | None = None) -> Method:
        """Create an instance that has learned nothing."""
        values = {**self.method.preset(None), **self.method.test_settings, **self.settings, "seed": seed}
        return self.method(backbone or toy_backbone(), self.method.settings_from(values))

    def after(self, tasks: int = len(GROUPS), seed: int = 0) -> Method:
        """Create an instance that has learned the first tasks; what was learned before is restored."""
        method = self(seed)
        start = max((n for n, s in self.states if s == seed and 0 < n <= tasks), default=0)
        if start:
            method.restore(self.states[start, seed])
        for i in range(start, tasks):
            learn_task(method, GROUPS[i])
            self.states[i + 1, seed] = method.state()
        return method

    def uninterrupted(self, tasks: int) -> bytes:
        """Return the state after the first tasks of an instance that is never restored."""
        if (-tasks, 0) not in self.states:
            method = self()
            for n, group in enumerate(GROUPS, 1):
                learn_task(method, group)
                self.states[-n, 0] = method.state()
        return self.states[-tasks, 0]

    def images(self, method: Method, classes: Sequence[str], rows: slice = slice(None)) -> Images:
        """Return test images of some classes, as a run passes them to the method."""
        return self.make_images(method, ArrayImages(toy_images(classes, per_class=5, seed=90)[0][rows]))

    def answers(self, method: Method) -> list[Tensor]:
        """Predict the test images of each task learned."""
        return [method.predict(self.images(method, group)) for group in GROUPS[: len(method.bytes_per_task())]]


def learn_task(
    method: Method,
    group: Sequence[str],
    per_class: int = 8,
    on_stage: OnStage | None = None,
    checkpoint: CheckpointFile | None = None,
) -> None:
    """Learn a task of these classes as a run does: afterwards its images cannot be read."""
    with training_view(toy_task(group, per_class), on_stage, checkpoint) as task:
        method.learn(task)


Check = Callable[[Maker], None]


def check_method(method: type[Method], **settings: Any) -> None:
    """Run all checks that apply to a method, with settings that differ from its `test_settings`."""
    make = Maker(method, settings)
    for check in checks_for(method):
        check(make)


def checks_for(method: type[Method]) -> list[Check]:
    """Return the checks that apply to a method, by what it declares."""
    checks: list[Check] = [
        check_predicting_before_learning_is_an_error,
        check_learns_each_task,
        check_batches_do_not_change_predictions,
        check_predicting_changes_nothing,
        check_seed_determines_the_state,
        check_state_restores_everything,
        check_restored_method_continues,
        check_damaged_state_is_rejected,
        check_interrupted_training_resumes,
        check_given_backbone_is_unchanged,
        check_predictions_do_not_depend_on_task_order,
    ]
    if not method.state_grows:
        checks.append(check_memory_is_bounded)
    if method.uses_rehearsal:
        checks.append(check_buffer_is_counted)
    if method.supports_repeated_classes:
        checks.append(check_repeated_classes)
    if method.trains_backbone:
        checks.append(check_stale_embeddings_are_not_used)
    if method.trains != "nothing" and hasattr(method.settings_class, "learning_rate"):
        checks.append(check_training_changes_what_predicts)
    return checks


def check_predicting_before_learning_is_an_error(make: Maker) -> None:
    """Check that a method that has learned nothing raises an error."""
    method = make()
    try:
        method.predict(make.images(method, GROUPS[0]))
    except LearnerError as error:
        assert error.code == "nothing-learned", error
    else:
        raise AssertionError("predict() must raise LearnerError before learn()")


def check_learns_each_task(make: Maker) -> None:
    """Check that a method predicts the task just learned; class numbers are positions in `classes`."""
    for i, group in enumerate(GROUPS):
        method = make.after(i + 1)
        assert method.classes == [name for names in GROUPS[: i + 1] for name in names]
        assert len(method.bytes_per_task()) == i + 1 and min(method.bytes_per_task()) > 0
        labels = toy_images(group, per_class=5)[1]
        truth = torch.tensor([method.classes.index(label) for label in labels])
        answer = method.answer(make.images(method, group))
        assert answer.classes.dtype == torch.int64 and answer.classes.shape == truth.shape
        assert (answer.classes == truth).float().mean() > 0.8, (group, answer.classes)
        if answer.scores is not None:
            assert answer.scores.shape == (len(truth), len(method.classes))
            assert torch.equal(answer.scores.argmax(dim=1), answer.classes)
            if answer.confidence is not None:
                assert torch.allclose(answer.scores.sum(dim=1).float(), torch.ones(len(truth)), atol=1e-4)


def check_batches_do_not_change_predictions(make: Maker) -> None:
    """Check that a batch of images gets the predictions of single images."""
    method = make.after(2)
    batch = method.predict(make.images(method, GROUPS[1]))
    answers = [method.predict(make.images(method, GROUPS[1], slice(i, i + 1))) for i in range(len(batch))]
    assert torch.equal(batch, torch.cat(answers))


def check_predicting_changes_nothing(make: Maker) -> None:
    """Check that the state after predicting is the state before."""
    method = make.after(2)
    state = method.state()
    make.answers(method)
    assert method.state() == state


def check_seed_determines_the_state(make: Maker) -> None:
    """Check that the same seed gives the same state, and the caller's random state is unchanged."""
    torch.manual_seed(7)
    rng_state = torch.get_rng_state()
    state = make.uninterrupted(2)
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert make.after(2).state() == state != make.after(2, seed=1).state()


def check_state_restores_everything(make: Maker) -> None:
    """Check that a restored method predicts and reports what the original does."""
    method, copy = make.after(), make()
    copy.restore(method.state())
    assert copy.state() == method.state() and copy.classes == method.classes
    assert copy.bytes_per_task() == method.bytes_per_task()
    assert copy.trained_parameters() == method.trained_parameters()
    assert all(torch.equal(a, b) for a, b in zip(make.answers(method), make.answers(copy), strict=True))


def check_restored_method_continues(make: Maker) -> None:
    """Check that a restored method learns the next task as an uninterrupted one does."""
    copy = make()
    copy.restore(make.after(2).state())
    learn_task(copy, GROUPS[2])
    assert copy.state() == make.uninterrupted(3)


def check_damaged_state_is_rejected(make: Maker) -> None:
    """Check that restoring altered bytes raises an error."""
    state = bytearray(make.after(1).state())
    state[-1] ^= 1
    try:
        make().restore(bytes(state))
    except ModelFileError:
        pass
    else:
        raise AssertionError("restore() must reject an altered state")


def check_interrupted_training_resumes(make: Maker) -> None:
    """Check that training that is interrupted and resumed ends bit-identically."""
    assert _learn_interrupted(make, make.after(1).state(), toy_task(GROUPS[1])).state() == make.after(2).state()


class _InterruptedError(Exception):
    pass


def _learn_interrupted(make: Maker, state: bytes, data: TrainingTask) -> Method:
    """Learn one task more than a state has, interrupted after three steps and resumed by a restored method."""

    def stop(stage: Stage) -> None:
        if stage.training and stage.training.step == 3:
            raise _InterruptedError

    with TemporaryDirectory() as folder:
        checkpoint = CheckpointFile(Path(folder) / "checkpoint", seconds=0)
        for on_stage in (stop, None):
            method = make()
            method.restore(state)
            with suppress(_InterruptedError), training_view(data, on_stage, checkpoint) as task:
                method.learn(task)
                break
    return method


def check_given_backbone_is_unchanged(make: Maker) -> None:
    """Check that learning changes a copy of the backbone, or none; never the backbone passed in."""
    backbone = toy_backbone()
    weights = {name: tensor.clone() for name, tensor in backbone.vit.state_dict().items()}
    method = make(backbone=backbone)
    learn_task(method, GROUPS[0])
    assert all(torch.equal(weights[name], tensor) for name, tensor in backbone.vit.state_dict().items())
    assert (method.backbone is backbone) != method.trains_backbone
    assert (method.backbone.fingerprint != backbone.fingerprint) == method.trains_backbone


def check_memory_is_bounded(make: Maker) -> None:
    """Check that the state has the same size for 40 and for 80 images per class."""
    one_epoch = {"epochs": 1} if hasattr(make.method.settings_class, "epochs") else {}
    states, sizes = [], []
    for per_class in (40, 80):
        method = Maker(make.method, {**make.settings, **one_epoch})()
        learn_task(method, GROUPS[0], per_class)
        states.append(len(method.state()))
        sizes.append(method.bytes_per_task())
    assert sizes[0] == sizes[1] and abs(states[0] - states[1]) < 500, (sizes, states)


def check_buffer_is_counted(make: Maker) -> None:
    """Check that a buffer is part of the state and of its bytes."""
    method = make.after()
    assert len(method.state()) > 16 * 16 * 3 * len(GROUPS)
    assert sum(method.bytes_per_task()) <= len(method.state()) <= sum(method.bytes_per_task()) + 50_000


def check_repeated_classes(make: Maker) -> None:
    """Check that known classes may come with new ones, or without; interruptions change nothing."""
    tasks = [["ant", "bee"], ["bee", "cat", "dog"], ["ant", "cat"]]

    method, states = make(), []
    for i, classes in enumerate(tasks):
        images, labels = toy_images(classes, seed=10 * i)
        data = TrainingTask(f"task-{i}", classes, ArrayImages(images), labels)
        with training_view(data) as task:
            method.learn(task)
        answers = method.predict(make.images(method, classes))
        truth = torch.tensor([method.classes.index(name) for name in classes for _ in range(5)])
        assert (answers == truth).float().mean() > 0.8, (classes, answers)
        states.append(method.state())
    assert method.classes == ["ant", "bee", "cat", "dog"] and len(method.bytes_per_task()) == 3
    assert _learn_interrupted(make, states[1], data).state() == states[2] != states[1]


def check_predictions_do_not_depend_on_task_order(make: Maker) -> None:
    """Check that mixed images of all tasks get the same predictions as the images of each task."""
    method, classes = make.after(), [name for group in GROUPS for name in group]
    pixels = toy_images(classes, per_class=5, seed=90)[0]
    parts = pixels.split([5 * len(group) for group in GROUPS])
    answers = [method.predict(make.make_images(method, ArrayImages(part))) for part in parts]
    assert torch.equal(method.predict(make.images(method, classes)), torch.cat(answers))


def check_stale_embeddings_are_not_used(make: Maker) -> None:
    """Check that test images that were embedded before a task are embedded again after it."""
    method = make.after(1)
    images = make.images(method, GROUPS[0])
    rows = torch.arange(len(images))
    old_embeddings = images.embed(rows)
    learn_task(method, GROUPS[1])
    new_embeddings = make.images(method, GROUPS[0]).embed(rows)
    assert not torch.equal(old_embeddings, new_embeddings) and torch.equal(images.embed(rows), new_embeddings)


@dataclass
class _Recorder:
    """Test images that record the embeddings and tokens that a method's training can change: all but plain ones."""

    images: Images
    trains_backbone: bool
    outputs: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.images)

    def pixels(self, rows: Tensor) -> Tensor:
        return self.images.pixels(rows)

    def embed(
        self, rows: Tensor, prompt: Prompt | None = None, key: str | None = None, backbone: Backbone | None = None
    ) -> Tensor:
        return self._record(self.images.embed(rows, prompt, key, backbone), prompt, backbone)

    def tokens(self, rows: Tensor, prompt: Tensor | None = None) -> Tensor:
        return self._record(self.images.tokens(rows, prompt), prompt, None)

    def _record(self, output: Tensor, prompt: Prompt | None, backbone: Backbone | None) -> Tensor:
        if self.trains_backbone or prompt is not None or backbone is not None:
            self.outputs.append(output)
        return output


def check_training_changes_what_predicts(make: Maker) -> None:
    """Check that a trained method predicts from other features than one whose learning rate is almost 0.

    A method that reads plain embeddings only trains what reads them, so its scores differ instead.
    """
    one_epoch = {"epochs": 1, "learning_rate": 1e-12}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that training changed nothing
        initial_method = Maker(make.method, {**make.settings, **one_epoch}).after(1)
    outputs = []
    for method in (make.after(1), initial_method):
        recorder = _Recorder(make.images(method, GROUPS[0]), method.trains_backbone)
        scores = method.answer(recorder).scores
        outputs.append(recorder.outputs or ([] if scores is None else [scores]))
    pairs = list(zip(*outputs, strict=False))
    is_close = [a.shape == b.shape and float((a - b).norm()) <= 1e-3 * float(b.norm()) for a, b in pairs]
    assert not all(is_close), "training changed nothing that predictions come from"
