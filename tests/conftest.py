"""What several test modules need: a backbone that costs nothing, easy images, the shared data folder."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protosteer.backbones import MINI, Backbone, auto_candidates
from protosteer.data.images import ArrayImages
from protosteer.methods.checks import Maker
from protosteer.methods.testing import toy_backbone as tiny_backbone
from protosteer.methods.testing import toy_images as easy_task
from protosteer.paper.trainer import TrainedPrompt, train_prompt
from protosteer.runtime.task_images import TaskImages
from protosteer.settings import Settings
from protosteer.util.training_state import TrainingState

# Tests work on tiny tensors, for which a second thread costs more than it brings.
torch.set_num_threads(1)

# A model whose backbone a test does not care for begins with the one that is quick.
auto_candidates.TOO_SMALL = MINI

# No weights but those that are shipped, and no network, whatever this machine has. The hub's client reads this when
# it is imported, which nothing above does, and so does every command that a test starts.
_NOTHING = tempfile.TemporaryDirectory()
os.environ |= {"PROTOSTEER_CACHE": _NOTHING.name, "HF_HOME": _NOTHING.name, "HF_HUB_OFFLINE": "1"}

# Recorded results are fp32's; a test of bf16 asks for it.
os.environ["PROTOSTEER_PRECISION"] = "fp32"
assert "huggingface_hub" not in sys.modules

__all__ = ["StepCallback", "easy_task", "shared", "tiny_backbone", "train"]

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with real weights and data sets, which are not part of the repository."""
    folder = Path(os.environ.get("PROTOSTEER_SHARED", REPOSITORY.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared data: {folder} does not exist (set PROTOSTEER_SHARED)")
    return folder


def _share_states(maker: Maker, *args: Any, **named: Any) -> None:
    """Makers of one method under the same settings share what it has learned: training is most of a test's time."""
    _create_maker(maker, *args, **named)
    key = maker.method, *sorted(maker.settings.items())
    object.__setattr__(maker, "states", _STATES.setdefault(key, {}))


_STATES: dict[tuple[Any, ...], dict[tuple[int, int], bytes]] = {}
_create_maker, Maker.__init__ = Maker.__init__, _share_states  # type: ignore[method-assign]


def train(
    backbone: Backbone, pixels: torch.Tensor, labels: torch.Tensor, settings: Settings, **more: Any
) -> TrainedPrompt:
    """`train_prompt` on images as a learner sees them."""
    images = TaskImages(ArrayImages(pixels), backbone, settings, "task")
    return train_prompt(images.encoder, images.views, labels, settings, **more)


class StepCallback:
    """A callback that calls a function after every step."""

    def __init__(self, call: Callable[[TrainingState], None]):
        self.call = call

    def on_train_begin(self, state: TrainingState) -> None:
        pass

    def on_step_end(self, state: TrainingState) -> None:
        self.call(state)
