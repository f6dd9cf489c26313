"""What several test modules need: a backbone that costs nothing, easy images, the shared data folder."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protosteer.backbones import MINI, Backbone, candidates
from protosteer.data.images import ArrayImages
from protosteer.method.training import State, Trained, train_prompt
from protosteer.methods.toys import toy_backbone as tiny_backbone
from protosteer.methods.toys import toy_images as easy_task
from protosteer.running.seen import SeenImages
from protosteer.settings import Settings

# Tests work on tiny tensors, for which a second thread costs more than it brings.
torch.set_num_threads(1)

# A model whose backbone a test does not care for begins with the one that is quick.
candidates.TOO_SMALL = MINI

# No weights but those that are shipped, and no network, whatever this machine has. The hub's client reads this when
# it is imported, which nothing above does, and so does every command that a test starts.
_NOTHING = tempfile.TemporaryDirectory()
os.environ |= {"PROTOSTEER_CACHE": _NOTHING.name, "HF_HOME": _NOTHING.name, "HF_HUB_OFFLINE": "1"}
assert "huggingface_hub" not in sys.modules

# These play whole commands and pages, or train for seconds; `make test-fast` leaves them to `make test`.
END_TO_END = {
    "test_apart",
    "test_bench_matrix",
    "test_blurry_runs",
    "test_cli_adapting",
    "test_cli_correct",
    "test_cli_images",
    "test_cli_lists",
    "test_cli_ray",
    "test_cli_runs",
    "test_cli_stages",
    "test_cli_suggesting",
    "test_cli_together",
    "test_cli_torchrun",
    "test_contact_sheet",
    "test_demo",
    "test_docs",
    "test_esn",
    "test_faults",
    "test_fuzz",
    "test_gdumb",
    "test_indexfile",
    "test_joint",
    "test_label_studio",
    "test_mini_scores",
    "test_onnx",
    "test_plots",
    "test_pretrain_mini",
    "test_prompted",
    "test_rehearsal",
    "test_relations",
    "test_resume_training",
    "test_runs",
    "test_serve_connections",
    "test_serve_correcting",
    "test_serve_models",
    "test_serve_teaching",
    "test_sharing",
    "test_sklearn",
    "test_suggestions",
    "test_thumbnails",
    "test_unknowns",
}

__all__ = ["OnStep", "easy_task", "shared", "tiny_backbone", "train"]

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


def train(
    backbone: Backbone, pixels: torch.Tensor, labels: torch.Tensor, settings: Settings, **more: Any
) -> Trained:
    """`train_prompt` on images as a learner sees them."""
    images = SeenImages(ArrayImages(pixels), backbone, settings, "task")
    return train_prompt(images.encoder, images.views, labels, settings, **more)


class OnStep:
    """A listener that calls a function after every step."""

    def __init__(self, call: Callable[[State], None]):
        self.call = call

    def begin(self, state: State) -> None:
        pass

    def step(self, state: State) -> None:
        self.call(state)
