"""DualPrompt (Wang et al., ECCV 2022): one prompt for all tasks in the first layers, one per task in the next.

Both are prefixes: keys and values that layers attend to beside their tokens. The general prompt (G) is in layers 1-2
and trained by every task. Each task has its own expert prompt (E) in layers 3-5, with a key k. Images of the current
task get its expert prompt, and the loss is

    cross-entropy + pull * (1 - cos(q, k)),

where the query q is an image's plain embedding. A test image gets the expert prompt whose key has the largest cosine
with its query. A linear head reads the embedding.

As in the official code (github.com/google-research/l2p), a task's expert prompt starts as a copy of the previous one,
with a new key. A prompt of L tokens is L / 2 keys and L / 2 values, an odd L rounded up. That is the paper's text, and
gives the 1.90 MB that the CPP paper reports for CIFAR-100. With `length=both` it is L of both, as in the official code.
Differences: every image is matched by itself, not with its batch. A backbone of fewer than five layers has the general prompt in all but its last layer at most, and
expert prompts after that: of three layers, in 1-2 and in 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones.prompting import Prompt
from protosteer.methods.base import Source, register_method
from protosteer.methods.prefix_vit import Prefix
from protosteer.methods.prompt_base import Prompted, draw_small, similarity
from protosteer.methods.training_utils import TrainingSettings
from protosteer.settings import setting


@dataclass(frozen=True)
class DualPromptSettings(TrainingSettings):
    """Settings of DualPrompt."""

    # Lengths, layers and the constant rate are the paper's, as the CPP paper's appendix repeats them.
    general_length: int = setting(5, at_least=1, at_most=4096)
    general_layers: int = setting(2, at_least=0)  # from the first
    expert_length: int = setting(20, at_least=1, at_most=4096)
    expert_layers: int = setting(3, at_least=1)  # after the general ones
    length: str = setting("split", choices=("split", "both"))  # half keys and half values, or L of both
    learning_rate: float = 0.005
    # The official code for CIFAR-100 has 24 images per device; L2P's authors used 128 in all.
    pull: float = setting(1.0, at_least=0)
    epochs: int = 5
    batch_size: int = 128
    weight_decay: float = 0.0
    gradient_clip: float = 1.0


@register_method("dualprompt")
class DualPrompt(Prompted):
    """A general prompt for all tasks, and an expert prompt per task."""

    source = Source(
        "Wang et al.", "DualPrompt: complementary prompting for rehearsal-free continual learning", "ECCV", 2022
    )
    trains = "a prompt for all tasks and one per task, head"
    settings_class = DualPromptSettings
    published = {
        "split-cifar100": {"batch_size": 24, "learning_rate": 0.0028125, "expert_length": 5, "length": "both"},
        "imagenet-r": {"epochs": 50, "batch_size": 24, "learning_rate": 0.00046875, "length": "both"},
        "imagenet-subset": {"epochs": 50},
    }
    published_source = (
        "the official code's configs as the port JH-LEE-KR/dualprompt-pytorch runs them, on one device: rates are times "
        "batch size / 256; CPP's appendix (ImageNet-subset)"
    )
    grid = {"learning_rate": (5e-3, 1.5e-3, 0.015)}
    test_settings = {**Prompted.test_settings, "expert_length": 4}
    settings: DualPromptSettings

    @property
    def layers(self) -> tuple[int, int]:
        """The number of layers with the general prompt, and of those after them with an expert prompt."""
        general_count = min(self.settings.general_layers, self.backbone.depth - 1)
        return general_count, min(self.settings.expert_layers, self.backbone.depth - general_count)

    def _rows(self, length: int) -> int:
        """Return how many keys, and as many values, a prefix of `length` tokens has."""
        return length if self.settings.length == "both" else (length + 1) // 2

    def new_shared(self) -> dict[str, Tensor]:
        """Initialise the general prompt."""
        shape = (self.layers[0], 2, self._rows(self.settings.general_length), self.backbone.dim)
        return {"general": draw_small(*shape, generator=self.generator)}

    def new_task_parameters(self) -> dict[str, Tensor]:
        """Start an expert prompt as a copy of the previous one, with a new key."""
        shape = (self.layers[1], 2, self._rows(self.settings.expert_length), self.backbone.dim)
        expert = self.past["experts"][-1].clone() if self.tasks else draw_small(*shape, generator=self.generator)
        return {"experts": expert, "keys": draw_small(self.backbone.dim, generator=self.generator)}

    def training_prompt(self, queries: Tensor) -> tuple[Prompt, Tensor]:
        """Return the current task's expert prompt, and the distance of its key to queries [B, D]."""
        cosines = similarity(queries, self.current["keys"].unsqueeze(0))
        return self._prefix(self.current["experts"].unsqueeze(0)), self.settings.pull * (1 - cosines).mean()

    def prompt(self, queries: Tensor) -> Prompt:
        """Return the expert prompt with the nearest key for each query [B, D]."""
        return self._prefix(self.past["experts"][self._match(queries)])

    def _match(self, queries: Tensor) -> Tensor:
        """Return the task with the nearest key, [B]."""
        return similarity(queries, self.past["keys"]).argmax(dim=1)

    def candidates(self, queries: Tensor) -> Tensor:
        """Return the task whose expert prompt each query gets, bool [B, T]."""
        return F.one_hot(self._match(queries), len(self.tasks)).bool()

    def _prefix(self, experts: Tensor) -> Prefix:
        """Join the general prompt and expert prompts [B or 1, layers, 2, rows, D]."""
        return Prefix((*self.shared["general"].unsqueeze(1), *experts.unbind(1)))
