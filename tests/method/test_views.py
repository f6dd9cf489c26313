"""Cached views: what the trunk gave for them is kept, and nothing else about training changes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from conftest import easy_task
from protosteer.backbones import Backbone
from protosteer.data.augment import Augmentation
from protosteer.data.images import ArrayImages
from protosteer.data.transforms import Preprocessing
from protosteer.errors import SettingsError, TrainingError
from protosteer.learner import Learner
from protosteer.method import views
from protosteer.method.training import Head, initial_prompt, train_prompt
from protosteer.method.views import CachedViews, FreshViews
from protosteer.method.vit import ViT, ViTConfig
from protosteer.running.resume import Bookmark
from protosteer.settings import Settings

QUICK = Settings(epochs=4, batch_size=8, neck_hidden=16, prompt_from_layer=3)


def backbone(scale: float = 1.0) -> Backbone:
    """Four layers, so that prompts can begin in the middle."""
    torch.manual_seed(3)
    vit = ViT(ViTConfig(image_size=16, patch_size=8, dim=24, depth=4, heads=3, mlp_dim=48))
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    vit.pos_embed.mul_(scale)
    return Backbone("deep", vit, Preprocessing(16, (0.5,) * 3, (0.5,) * 3))


def data() -> tuple[ArrayImages, torch.Tensor]:
    pixels, labels = easy_task(["ant", "bee"], per_class=8)
    return ArrayImages(pixels), torch.tensor([int(label == "bee") for label in labels])


def fresh(images: ArrayImages, kind: str = "paper", layers: int = 2) -> FreshViews:
    deep = backbone()
    return FreshViews(deep, images, Augmentation(deep.preprocessing, kind), layers)


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_views_that_never_change_train_as_if_they_were_not_cached(monkeypatch, layer):
    """Without augmentation all views are equal, so keeping them in full precision must change no bit."""
    monkeypatch.setattr(views, "KEPT", torch.float32)
    settings = QUICK.replace(augmentation="none", prompt_from_layer=layer)
    plain = train_prompt(backbone(), *data(), settings, seed=1)
    for count in (1, 3):
        cached = train_prompt(backbone(), *data(), settings.replace(cached_views=count), seed=1)
        assert torch.equal(cached.prompt, plain.prompt) and cached.epochs == plain.epochs


def test_sixteen_bits_round_and_no_more():
    settings = QUICK.replace(augmentation="none")
    plain, cached = (
        train_prompt(backbone(), *data(), settings.replace(cached_views=n), seed=1) for n in (0, 1)
    )
    assert not torch.equal(cached.prompt, plain.prompt)
    torch.testing.assert_close(cached.prompt, plain.prompt, atol=5e-3, rtol=0)


def test_tokens_are_the_trunks_outputs_of_every_view():
    images, _ = data()
    torch.manual_seed(9)
    cached = CachedViews(fresh(images), 3, batch_size=5)
    torch.manual_seed(9)
    one = fresh(images)
    for start in range(0, len(images), 5):  # a batch is read once, and all its views are drawn
        pixels = images.pixels(range(start, min(start + 5, len(images))))
        for view in range(3):
            expected = one.backbone.vit.trunk(one.augment(pixels), 2).half()
            assert torch.equal(cached.tokens[view, start : start + 5], expected)
    assert not torch.equal(cached.tokens[0], cached.tokens[1])


def test_epochs_meet_the_views_in_turn():
    images, _ = data()
    cached = CachedViews(fresh(images), 3, batch_size=64)
    rows = [torch.tensor([4, 1]), torch.tensor([0])]
    for epoch in range(7):
        got = list(cached.batches(epoch, rows))
        assert got[0].dtype == torch.float32
        for batch, some in zip(got, rows, strict=True):
            assert torch.equal(batch, cached.tokens[epoch % 3][some].float())


def test_training_equals_a_plain_loop_over_fixed_images(monkeypatch):
    """The twin keeps augmented images, not tokens, and runs every layer each time."""
    monkeypatch.setattr(views, "KEPT", torch.float32)
    deep, (images, labels) = backbone(), data()
    settings = QUICK.replace(cached_views=2, epochs=3, batch_size=16, warmup_fraction=0.0, weight_decay=0.0)
    settings = settings.replace(final_weight_decay=0.0, final_learning_rate=1e-3, gradient_clip=1e9)
    trained = train_prompt(deep, images, labels, settings, seed=5)

    torch.manual_seed(5)
    prompt = torch.nn.Parameter(initial_prompt(deep, settings, None))
    head = Head(deep.dim, 2, settings)
    augment = Augmentation(deep.preprocessing, "paper")
    seen = [augment(images.pixels(range(16))) for _ in range(2)]
    optimiser = torch.optim.AdamW([prompt, *head.parameters()], lr=1e-3, weight_decay=0.0)
    for epoch in range(3):
        order = torch.randperm(16)
        loss = head.loss(deep.embed(seen[epoch % 2][order], prompt), labels[order], None)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    torch.testing.assert_close(trained.prompt, prompt.detach(), atol=1e-6, rtol=0)


def test_images_are_read_once_however_many_epochs_there_are():
    class Counting(ArrayImages):
        read = 0

        def pixels(self, rows):
            Counting.read += len(rows)
            return super().pixels(rows)

    images, labels = data()
    train_prompt(backbone(), Counting(images.array), labels, QUICK.replace(cached_views=2))
    assert Counting.read == len(images)


def test_beyond_the_budget_tokens_lie_in_a_file_that_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(views.tempfile, "tempdir", str(tmp_path))
    images, _ = data()
    torch.manual_seed(2)
    in_memory = CachedViews(fresh(images), 2, batch_size=5)
    torch.manual_seed(2)
    in_file = CachedViews(fresh(images), 2, batch_size=5, budget=100)
    assert torch.equal(in_memory.tokens, in_file.tokens)
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert str(tmp_path) in mapped.read_text()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_told_at_once(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(views.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    images, _ = data()
    with pytest.raises(TrainingError, match="cached_views \\(now 2\\), or let TMPDIR name a larger disk"):
        CachedViews(fresh(images), 2, batch_size=5, budget=100)
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_sixteen_bits_cannot_hold_are_refused():
    with pytest.raises(TrainingError, match="cached_views = 0"):
        train_prompt(backbone(scale=1e6), *data(), QUICK.replace(cached_views=1))


def test_training_on_cached_views_goes_on_where_it_was(tmp_path):
    settings, path = QUICK.replace(cached_views=2, batch_size=5), tmp_path / "training.safetensors"
    whole = train_prompt(backbone(), *data(), settings, seed=3)

    def stop(progress):
        if progress.step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_prompt(backbone(), *data(), settings, seed=3, on_step=stop, bookmark=Bookmark(path, seconds=0))
    torch.randn(5)
    again = train_prompt(backbone(), *data(), settings, seed=3, bookmark=Bookmark(path, seconds=0))
    assert torch.equal(again.prompt, whole.prompt) and again.epochs == whole.epochs


def test_a_learner_tells_that_views_are_being_cached():
    pixels, labels = easy_task(["ant", "bee"], per_class=8)
    stages = []
    Learner(backbone(), QUICK.replace(cached_views=2)).learn((pixels, labels), on_stage=stages.append)
    told = list(dict.fromkeys(stage.doing for stage in stages))
    assert told == ["keys", "views", "training", "values"]
    assert [(s.done, s.total) for s in stages if s.doing == "views"] == [(16, 16)]


def test_presets():
    assert Settings.preset("paper", 12) == Settings()
    fast = Settings.preset("fast", 12, epochs=7)
    assert fast == Settings(prompt_from_layer=7, epochs=7)
    assert Settings.preset("fast", 3).prompt_from_layer == 2  # nano; a prompt cannot begin in the last layer
    assert Settings.preset("fast", 1).prompt_from_layer == 1
    with pytest.raises(SettingsError, match="preset 'quick' is unknown; choose one of paper, fast"):
        Settings.preset("quick", 12)
