"""What several test modules need: a backbone that costs nothing, easy images, the shared data folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protosteer.backbones import Backbone
from protosteer.data.images import ArrayImages
from protosteer.data.transforms import Preprocessing
from protosteer.learner import SeenImages
from protosteer.method.training import State, Trained, train_prompt
from protosteer.method.vit import ViT, ViTConfig
from protosteer.settings import Settings

# Tests work on tiny tensors, for which a second thread costs more than it brings.
torch.set_num_threads(1)

# These play whole commands and pages; `make test-fast` leaves them to `make test`.
END_TO_END = {
    "test_resume_training",
    "test_cli_images",
    "test_cli_runs",
    "test_contact_sheet",
    "test_demo",
    "test_docs",
    "test_onnx",
    "test_runs",
    "test_serve_teaching",
    "test_unknowns",
}

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in END_TO_END:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with real weights and data sets, which are not part of the repository."""
    folder = Path(os.environ.get("PROTOSTEER_SHARED", REPOSITORY.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared data: {folder} does not exist (set PROTOSTEER_SHARED)")
    return folder


def tiny_backbone(seed: int = 0, pool: str = "token") -> Backbone:
    """A random two-layer ViT for 16-px images; its embeddings depend on its images enough to learn from."""
    config = ViTConfig(image_size=16, patch_size=8, dim=24, depth=2, heads=3, mlp_dim=48, pool=pool)
    vit = ViT(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in vit.named_parameters():
            if not (name.startswith("norm") or ".norm" in name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    half = (0.5, 0.5, 0.5)
    return Backbone("tiny", vit, Preprocessing(16, half, half))


def easy_task(classes: list[str], per_class: int = 8, seed: int = 0) -> tuple[torch.Tensor, list[str]]:
    """uint8 [N, 3, 16, 16]: one random picture per class name, each image a noisy copy of it."""
    images, labels = [], []
    for name in classes:
        pattern = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31)
        picture = torch.randint(40, 216, (3, 16, 16), generator=pattern)
        noise = torch.Generator().manual_seed(seed + len(labels))
        copies = picture + torch.randint(-40, 40, (per_class, 3, 16, 16), generator=noise)
        images.append(copies.to(torch.uint8))
        labels += [name] * per_class
    return torch.cat(images), labels


def train(
    backbone: Backbone, pixels: torch.Tensor, labels: torch.Tensor, settings: Settings, **more: Any
) -> Trained:
    """`train_prompt` on images as a learner sees them."""
    images = SeenImages(ArrayImages(pixels), backbone, settings, "task")
    return train_prompt(backbone, images.views, labels, settings, **more)


class OnStep:
    """A listener that calls a function after every step."""

    def __init__(self, call: Callable[[State], None]):
        self.call = call

    def begin(self, state: State) -> None:
        pass

    def step(self, state: State) -> None:
        self.call(state)
