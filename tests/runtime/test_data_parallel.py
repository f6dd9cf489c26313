"""Several processes give what one gives: embeddings, losses, gradients, prompts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from conftest import easy_task, tiny_backbone, train
from protosteer.backbones import Backbone
from protosteer.data.decode_cache import DecodedCache
from protosteer.data.images import ArrayImages, Chosen, FileImages, ImageSet, Joined, LazyImages
from protosteer.errors import DataError, LearnerError
from protosteer.learner import Learner
from protosteer.methods import find_method
from protosteer.paper.prompts import initial_prompt
from protosteer.paper.prototypes import Anchors
from protosteer.paper.trainer import Head
from protosteer.runtime.task_images import TaskImages
from protosteer.settings import Settings
from protosteer.streams.base import TrainingTask
from protosteer.util.distributed import World
from vit_toys import small
from world_toys import alone, count_held, team

pytestmark = pytest.mark.slow

SETTINGS = Settings.preset(
    "paper", epochs=3, batch_size=5, neck_hidden=16, augmentation="paper", prompt_start="random"
)


@pytest.fixture(scope="module", params=[2, 3])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with team(request.param) as met:
        yield met


def earlier(dtype: torch.dtype) -> Anchors:
    draw = torch.Generator().manual_seed(1)
    return Anchors(
        torch.randn(4, 24, generator=draw).to(dtype), torch.full((4, 24), 0.1, dtype=dtype), torch.arange(4)
    )


def one_step(backbone: Backbone, images: ImageSet, rows: Tensor, settings: Settings) -> dict[str, Tensor]:
    """The loss of one batch, its embeddings, and the gradients of everything that is trained."""
    dtype = backbone.vit.cls_token.dtype
    seen = TaskImages(images, backbone, settings, "task")
    torch.manual_seed(0)
    prompt = nn.Parameter(initial_prompt(backbone, settings, None).to(dtype))
    head = Head(backbone.dim, 2, settings).to(dtype)
    (tokens,) = seen.views([rows])
    embeddings = seen.encoder.rest(tokens, settings.prompt_from_layer - 1, prompt)
    loss = head.loss(embeddings, rows % 2, earlier(dtype))
    loss.backward()
    gradients = {
        name: p.grad for name, p in [("prompt", prompt), *head.named_parameters()] if p.grad is not None
    }
    return {"loss": loss.detach(), "embeddings": embeddings.detach(), **gradients}


# Uneven shares, and fewer rows than processes, of which the contrastive loss would have no gradient.
@pytest.mark.parametrize(
    ("count", "from_layer", "loss"),
    [(1, 1, "cross-entropy"), (2, 2, "cross-entropy"), (5, 1, None), (8, 2, None)],
)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_a_step_is_that_of_one_process(
    world: World, count: int, loss: str | None, dtype: torch.dtype, close: float, from_layer: int
) -> None:
    backbone = small()
    backbone.vit.to(dtype)
    images = ArrayImages(easy_task(["ant", "bee"])[0])
    settings = SETTINGS.replace(prompt_from_layer=from_layer, **({"loss": loss} if loss else {}))
    rows = torch.randperm(16, generator=torch.Generator().manual_seed(count))[:count]
    together = one_step(backbone, images, rows, settings)
    with alone():
        expected = one_step(backbone, images, rows, settings)
    assert len(together["embeddings"]) == count and together.keys() == expected.keys()
    for name, value in expected.items():
        error, greatest = (together[name] - value).abs().max(), value.abs().max()
        assert value.dtype == dtype and greatest > 0
        assert error <= close * greatest, f"{name}: {error} of {greatest}"


def test_a_training_ends_in_the_same_prompt(world: World) -> None:
    pixels, labels = easy_task(["ant", "bee"])
    numbers, more = (
        torch.tensor([int(label == "bee") for label in labels]),
        {"prototypes": earlier(torch.float32)},
    )
    together = train(tiny_backbone(), pixels, numbers, SETTINGS, seed=3, **more)
    with alone():
        expected = train(tiny_backbone(), pixels, numbers, SETTINGS, seed=3, **more)
        other = train(tiny_backbone(), pixels, numbers, SETTINGS, seed=4, **more)
    torch.testing.assert_close(together.prompt, expected.prompt, atol=1e-4, rtol=0)
    assert [e.loss for e in together.epochs] == pytest.approx([e.loss for e in expected.epochs], abs=1e-4)
    assert (other.prompt - expected.prompt).abs().max() > 1e-3


def test_sets_are_embedded_together(world: World, tmp_path: Path) -> None:
    backbone, draw = tiny_backbone(), torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (11, 3, 16, 16), generator=draw, dtype=torch.uint8)
    prompt = torch.randn(backbone.prompt_shape(3), generator=draw)
    paths = [tmp_path / f"{i}.png" for i in range(11)]
    for path, image in zip(paths, pixels, strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    files, array = FileImages(paths, backbone.preprocessing), ArrayImages(pixels)
    sets: list[ImageSet] = [
        array, files, DecodedCache(files), Chosen(array, range(11)),
        Joined([Chosen(array, [0, 1]), Chosen(files, range(2, 11))]),
    ]  # fmt: skip
    for images in sets:
        for rows in (None, [], [4], [7, 2], [3, 3, 10, 0, 1]):
            for under, whole in ((None, False), (prompt, False), (prompt, True)):
                done: list[int] = []
                found = backbone.embed_set(images, under, 3, done.append, rows, whole)
                with alone():
                    expected = backbone.embed_set(images, under, 3, rows=rows, whole=whole)
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
                assert done == sorted(done) and done[-1:] == [len(expected)][: len(expected)]


def test_a_prompt_for_each_image_stays_here(world: World) -> None:
    backbone, pixels = tiny_backbone(), easy_task(["ant"])[0][:4]
    prompts = torch.randn(4, *backbone.prompt_shape(2), generator=torch.Generator().manual_seed(0))
    found = backbone.embed_pixels(pixels, prompts)
    with alone():
        torch.testing.assert_close(found, backbone.embed_pixels(pixels, prompts))


def test_a_learner_learns_the_same(world: World) -> None:
    images, labels = easy_task(["ant", "bee"])
    together, expected = (Learner(tiny_backbone(), SETTINGS) for _ in range(2))
    record = together.learn((images, labels), name="first")
    with alone():
        other = expected.learn((images, labels), name="first")
        answers, wanted = together.predict(images), expected.predict(images)
    for (name, mine), (_, theirs) in zip(record.tensors(), other.tensors(), strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), atol=2e-3, rtol=2e-3, msg=name)
    assert answers.labels == wanted.labels


def test_images_are_gone_when_the_leader_has_none_of_them(world: World) -> None:
    def held() -> list[float]:
        gc.collect()
        world.ask(count_held, ())
        told: list[float] = world.gathered(torch.zeros(1), [1] * world.size)[1:].tolist()
        return told

    backbone, before = tiny_backbone(), held()
    images = ArrayImages(easy_task(["ant"])[0])
    for _ in range(2):  # lent once
        backbone.embed_set(images)
        assert held() == [count + 2 for count in before]
    del images
    assert held() == [count + 1 for count in before]


def test_what_cannot_be_shared_out_is_refused_in_one_line(world: World) -> None:
    backbone = tiny_backbone()
    one = Image.new("RGB", (16, 16))
    with pytest.raises(
        DataError, match="LazyImages cannot be shared out among processes; give files or an array"
    ):
        backbone.embed_set(LazyImages(1, lambda row: one, backbone.preprocessing))
    images, labels = easy_task(["ant", "bee"])
    finetune = find_method("finetune")
    method = finetune(backbone, finetune.settings_class(epochs=1))
    with pytest.raises(LearnerError, match="trained by one process only; run it without torchrun"):
        method.learn(TrainingTask("first", ["ant", "bee"], ArrayImages(images), labels))
