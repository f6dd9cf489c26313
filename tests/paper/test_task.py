"""Algorithm 1: what one task leaves, step by step."""

import pytest
import torch

from conftest import easy_task, tiny_backbone
from protosteer.data.images import ArrayImages
from protosteer.errors import ProtosteerWarning
from protosteer.paper.prototypes import Anchors, centroids
from protosteer.paper.task import LearnedTask, learn_task, task_seed
from protosteer.paper.trainer import train_prompt
from protosteer.runtime.task_images import TaskImages
from protosteer.settings import Settings

QUICK = Settings.preset("paper", epochs=2, batch_size=8, neck_hidden=16, augmentation="crop", centroids=2)


def learn(settings: Settings = QUICK, **more: object) -> tuple[LearnedTask, TaskImages]:
    pixels, names = easy_task(["ant", "bee"])
    labels = torch.tensor([int(name == "bee") for name in names])
    images = TaskImages(ArrayImages(pixels), tiny_backbone(), settings, "task")
    return learn_task(images, labels, images.encoder, settings, seed=3, **more), images


def test_keys_prompt_values_and_prototypes_are_those_of_the_steps() -> None:
    start = torch.full(tiny_backbone().prompt_shape(1), 0.1)
    generator = torch.Generator().manual_seed(0)
    anchors = Anchors(torch.randn(5, 24, generator=generator), torch.full((5, 24), 0.1), torch.arange(5))
    task, images = learn(start=start, anchors=anchors)
    trained = train_prompt(images.encoder, images.views, task.labels, QUICK, start, anchors, seed=3)
    assert torch.equal(task.keys, images.embed(None))
    assert torch.equal(task.prompt, trained.prompt) and not torch.equal(task.prompt, start)
    assert torch.equal(task.values, images.embed(trained.prompt)) and task.training.epochs == trained.epochs
    for embeddings, found in ((task.keys, task.key_prototypes), (task.values, task.value_prototypes)):
        assert len(found) == 2
        for k, one in enumerate(found):
            assert torch.equal(one.means, centroids(embeddings[task.labels == k], 2, seed=3).means)


def test_without_prompts_it_is_the_training_free_baseline() -> None:
    task, _ = learn(QUICK.replace(prompts=False, centroids=1))
    assert task.prompt is None and task.values is task.keys
    for k, one in enumerate(task.value_prototypes):
        torch.testing.assert_close(one.means[0], task.keys[task.labels == k].mean(dim=0))


def test_keys_are_given_out_before_training() -> None:
    order: list[str] = []

    class Follow:
        def on_train_begin(self, state: object) -> None:
            order.append("training")

        def on_step_end(self, state: object) -> None: ...

    task, _ = learn(callbacks=[Follow()], on_keys=lambda keys: order.append(f"{len(keys)} keys"))
    assert order == [f"{len(task.labels)} keys", "training"]


def test_a_backbone_at_chance_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protosteer.paper.diagnostics.near_chance", lambda *_: "at chance")
    with pytest.warns(ProtosteerWarning, match="at chance"):
        learn(QUICK.replace(prompts=False))


def test_a_seed_belongs_to_the_classes_and_not_to_their_order() -> None:
    assert task_seed(0, ["a", "b"]) == task_seed(0, ["b", "a"]) != task_seed(1, ["a", "b"])
    assert task_seed(0, ["a"]) != task_seed(0, ["b"]) and 0 <= task_seed(0, ["a"]) < 2**63
