"""Training that goes on from any of its steps ends in the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import easy_task, tiny_backbone
from protosteer.data.images import ArrayImages
from protosteer.learner import Learner
from protosteer.method.anchors import Anchors
from protosteer.method.training import Trained, train_prompt
from protosteer.running.progress import Progress
from protosteer.running.resume import Bookmark
from protosteer.settings import Settings

SETTINGS = Settings(epochs=3, batch_size=5, neck_hidden=16, augmentation="paper")
STEPS = 9


class Killed(Exception):
    pass


def train(
    bookmark: Bookmark | None, stop_after: int | None = None, seed: int = 3, settings=SETTINGS
) -> Trained:
    images, labels = easy_task(["ant", "bee"])
    numbers = torch.tensor([0 if label == "ant" else 1 for label in labels])
    generator = torch.Generator().manual_seed(1)
    anchors = Anchors(torch.randn(4, 24, generator=generator), torch.full((4, 24), 0.1), torch.arange(4))

    def on_step(progress: Progress) -> None:
        if progress.step == stop_after:
            raise Killed

    return train_prompt(
        tiny_backbone(), ArrayImages(images), numbers, settings, None, anchors, seed, on_step, bookmark
    )


@pytest.mark.parametrize("step", [1, 3, 5, STEPS])  # within, and at the end of, an epoch of three
def test_training_goes_on_from_any_step(tmp_path, step):
    whole = train(None)
    path = tmp_path / "training.safetensors"
    with pytest.raises(Killed):
        train(Bookmark(path, seconds=0), stop_after=step)
    torch.randn(7)  # another process has another random state
    again = train(Bookmark(path, seconds=0))
    assert torch.equal(again.prompt, whole.prompt) and again.epochs == whole.epochs
    assert again.seconds > 0


def test_several_interruptions(tmp_path):
    whole, path = train(None), tmp_path / "training.safetensors"
    for step in (2, 3, 7):
        with pytest.raises(Killed):
            train(Bookmark(path, seconds=0), stop_after=step)
    assert torch.equal(train(Bookmark(path, seconds=0)).prompt, whole.prompt)


def test_it_does_go_on_and_does_not_begin_anew(tmp_path):
    path, first = tmp_path / "training.safetensors", []
    with pytest.raises(Killed):
        train(Bookmark(path, seconds=0), stop_after=6)
    images, labels = easy_task(["ant", "bee"])
    train_prompt(
        tiny_backbone(), ArrayImages(images), torch.tensor([0] * 8 + [1] * 8), SETTINGS, seed=3,
        on_step=lambda p: first.append(p.step), bookmark=Bookmark(path, seconds=0),
    )  # fmt: skip
    assert first[0] == 7 and labels[0] == "ant"
    assert Bookmark(path).seconds_spent() > 0


def test_a_bookmark_of_another_training_is_left_alone(tmp_path):
    path = tmp_path / "training.safetensors"
    with pytest.raises(Killed):
        train(Bookmark(path, seconds=0), stop_after=4)
    other = train(Bookmark(path, seconds=0), seed=4)
    assert torch.equal(other.prompt, train(None, seed=4).prompt)


def test_it_is_written_when_due_and_removed_when_asked(tmp_path):
    bookmark = Bookmark(tmp_path / "training.safetensors", seconds=1e9)
    train(bookmark)
    assert not bookmark.path.exists() and bookmark.load() is None and bookmark.seconds_spent() == 0.0
    bookmark.save({"x": torch.ones(2)}, {"seconds": 2.5})
    loaded = bookmark.load()
    assert loaded is not None and torch.equal(loaded[0]["x"], torch.ones(2))
    assert bookmark.seconds_spent() == 2.5
    bookmark.clear()
    bookmark.clear()
    assert not bookmark.path.exists()


def test_a_learner_goes_on_with_a_task(tmp_path: Path):
    images, labels = easy_task(["ant", "bee"])
    whole = Learner(tiny_backbone(), SETTINGS)
    whole.learn((images, labels), name="first")

    def stop(stage: object) -> None:
        training = getattr(stage, "training", None)
        if training and training.step == 5:
            raise Killed

    learner, bookmark = Learner(tiny_backbone(), SETTINGS), Bookmark(tmp_path / "b.safetensors", seconds=0)
    with pytest.raises(Killed):
        learner.learn((images, labels), name="first", on_stage=stop, bookmark=bookmark)
    assert learner.classes == []
    record = learner.learn((images, labels), name="first", bookmark=bookmark)
    for (name, mine), (_, theirs) in zip(record.tensors(), whole.memory.tasks[0].tensors(), strict=True):
        assert torch.equal(mine, theirs), name
