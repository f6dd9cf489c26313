"""A training that is resumed from any of its steps ends bit-identical to one that was not interrupted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import StepCallback, easy_task, tiny_backbone, train
from expect import expect_error
from protosteer.errors import ProtosteerWarning, TrainingError
from protosteer.learner import Learner
from protosteer.paper.prototypes import Anchors
from protosteer.paper.trainer import TrainedPrompt
from protosteer.runtime.callbacks import CheckpointCallback, ProgressCallback
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.settings import Settings
from protosteer.util.training_state import TrainingState

pytestmark = pytest.mark.slow

SETTINGS = Settings.preset("paper", epochs=3, batch_size=5, neck_hidden=16, augmentation="paper")
STEPS = 9


class Killed(Exception):
    pass


def resumed(path: Path, stop_after: int | None = None, seed: int = 3, **more: Any) -> TrainedPrompt:
    pixels, labels = easy_task(["ant", "bee"])
    numbers = torch.tensor([int(label == "bee") for label in labels])
    generator = torch.Generator().manual_seed(1)
    earlier = Anchors(torch.randn(4, 24, generator=generator), torch.full((4, 24), 0.1), torch.arange(4))

    def stop(state: TrainingState) -> None:
        if state.step == stop_after:
            raise Killed

    callbacks = [CheckpointCallback(CheckpointFile(path, **{"seconds": 0, **more}), {"seed": seed}), StepCallback(stop)]
    return train(tiny_backbone(), pixels, numbers, SETTINGS, anchors=earlier, seed=seed, callbacks=callbacks)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrainedPrompt:
    return resumed(tmp_path_factory.mktemp("whole") / "training.safetensors")


@pytest.mark.parametrize("step", [1, 3, 5, STEPS])  # within, and at the end of, an epoch of three
def test_training_resumes_from_any_step(tmp_path, whole, step):
    path = tmp_path / "training.safetensors"
    with pytest.raises(Killed):
        resumed(path, stop_after=step)
    torch.randn(7)  # another process has another random state
    again = resumed(path)
    assert torch.equal(again.prompt, whole.prompt) and again.epochs == whole.epochs


def test_several_interruptions(tmp_path, whole):
    path, spent = tmp_path / "training.safetensors", [0.0]
    for step in (2, 3, 7):
        with pytest.raises(Killed):
            resumed(path, stop_after=step)
        spent.append(CheckpointFile(path).seconds_spent())
    assert torch.equal(resumed(path).prompt, whole.prompt)
    assert spent == sorted(spent) and spent[1] > 0  # seconds of all processes together


def test_a_resumed_training_makes_only_the_steps_that_are_left(tmp_path):
    path, stages = tmp_path / "training.safetensors", []
    with pytest.raises(Killed):
        resumed(path, stop_after=6)
    pixels, _ = easy_task(["ant", "bee"])
    callbacks = [CheckpointCallback(CheckpointFile(path), {"seed": 3}), ProgressCallback("task", stages.append)]
    train(tiny_backbone(), pixels, torch.tensor([0] * 8 + [1] * 8), SETTINGS, seed=3, callbacks=callbacks)
    assert [stage.training.step for stage in stages] == [6, 7, 8, 9]  # first where it resumes
    assert len(stages[0].training.losses) == stages[0].training.epoch


def test_the_checkpoint_of_another_training_is_ignored(tmp_path):
    path = tmp_path / "training.safetensors"
    with pytest.raises(Killed):
        resumed(path, stop_after=4)
    other = resumed(path, seed=4)
    assert torch.equal(other.prompt, resumed(tmp_path / "new.safetensors", seed=4).prompt)


def test_it_is_written_when_due_and_removed_when_asked(tmp_path):
    checkpoint = CheckpointFile(tmp_path / "training.safetensors", seconds=1e9)
    resumed(checkpoint.path, seconds=1e9)
    assert not checkpoint.path.exists() and checkpoint.load() is None and checkpoint.seconds_spent() == 0.0
    checkpoint.save({"x": torch.ones(2)}, {"seconds": 2.5})
    loaded = checkpoint.load()
    assert loaded is not None and torch.equal(loaded[0]["x"], torch.ones(2)) and checkpoint.seconds_spent() == 2.5
    checkpoint.clear()
    checkpoint.clear()
    assert not checkpoint.path.exists()


def test_a_learner_resumes_a_task(tmp_path: Path):
    images, labels = easy_task(["ant", "bee"])
    whole = Learner(tiny_backbone(), SETTINGS)
    whole.learn((images, labels), name="first")

    def stop(stage: object) -> None:
        training = getattr(stage, "training", None)
        if training and training.step == 5:
            raise Killed

    learner, checkpoint = (Learner(tiny_backbone(), SETTINGS), CheckpointFile(tmp_path / "b.safetensors", seconds=0))
    with pytest.raises(Killed):
        learner.learn((images, labels), name="first", on_stage=stop, checkpoint=checkpoint)
    assert learner.classes == []
    record = learner.learn((images, labels), name="first", checkpoint=checkpoint)
    for (name, mine), (_, theirs) in zip(record.tensors(), whole.memory.tasks[0].tensors(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, whole, keep):
    path = tmp_path / "training.safetensors"
    with pytest.raises(Killed):
        resumed(path, stop_after=4)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.warns(ProtosteerWarning, match="is damaged"):
        again = resumed(path)
    assert torch.equal(again.prompt, whole.prompt) and again.epochs == whole.epochs


def test_a_forged_checkpoint_is_rejected(tmp_path):
    path = tmp_path / "training.safetensors"
    with pytest.raises(Killed):
        resumed(path, stop_after=4)
    saved = CheckpointFile(path).load()
    assert saved is not None
    tensors, about = saved
    fewer = {**about, "moments": ["step", "exp_avg"]}
    for changed, notes in (
        ({**tensors, "rng": torch.ones(3)}, about),
        ({"rng": tensors["rng"]}, about),
        (tensors, fewer),
    ):
        CheckpointFile(path).save(changed, notes)
        with expect_error("bad-checkpoint", TrainingError, path=path):
            resumed(path)
