"""DualPrompt: one prompt for all tasks in the first layers, one for each task in the next (Wang et al., ECCV
2022).

Both are prefixes: keys and values that the layers attend to beside their tokens. The general prompt (G) enters
layers 1-2 and is trained by every task. Each task has an expert prompt (E) of its own in layers 3-5, and a key k
for it. While a task is learned, its images get its expert prompt, and the loss is

    cross-entropy + pull * (1 - cos(q, k)),

where the query q is an image's embedding by the frozen backbone. An image of unknown task gets the expert prompt
whose key has the largest cosine with its query. A linear head reads the embedding.

As in the official code (github.com/google-research/l2p), a task's expert prompt starts as the one before it, its
key anew. Unlike there, every image is matched for itself, not with its batch. A prompt of L tokens is L / 2 keys
and L / 2 values (1.90 MB for CIFAR-100, which the CPP paper tells, are so many; the official code has L of
both); an odd L is rounded up. A backbone of fewer than five layers has the general prompt in all but its
last at most, the expert ones behind it: of three layers, in 1-2 and in 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones.prompting import Prompt
from protosteer.methods.base import Source
from protosteer.methods.prefix_vit import Prefix
from protosteer.methods.prompt_base import Prompted, similarity, small
from protosteer.methods.training_utils import Training
from protosteer.settings import setting


@dataclass(frozen=True)
class DualPromptSettings(Training):
    # Lengths, layers and the constant rate: the paper's, as the CPP paper's appendix repeats them.
    general_length: int = setting(5, at_least=1, at_most=4096)
    general_layers: int = setting(2, at_least=0)  # from the first
    expert_length: int = setting(20, at_least=1, at_most=4096)
    expert_layers: int = setting(3, at_least=1)  # behind the general ones
    learning_rate: float = 0.005
    # The official code for CIFAR-100; it has 24 images per device, and 128 in all are what L2P's authors used.
    pull: float = setting(1.0, at_least=0)
    epochs: int = 5
    batch_size: int = 128
    weight_decay: float = 0.0
    gradient_clip: float = 1.0


class DualPrompt(Prompted):
    name = "dualprompt"
    source = Source(
        "Wang et al.",
        "DualPrompt: complementary prompting for rehearsal-free continual learning",
        "ECCV",
        2022,
    )
    trains = "a prompt for all tasks and one per task, head"
    settings_class = DualPromptSettings
    settings: DualPromptSettings

    @property
    def layers(self) -> tuple[int, int]:
        """How many layers have the general prompt, and how many behind them an expert one."""
        general = min(self.settings.general_layers, self.backbone.depth - 1)
        return general, min(self.settings.expert_layers, self.backbone.depth - general)

    def new_shared(self) -> dict[str, Tensor]:
        return {"general": small(self.layers[0], 2, half(self.settings.general_length), self.backbone.dim)}

    def new_own(self) -> dict[str, Tensor]:
        shape = (self.layers[1], 2, half(self.settings.expert_length), self.backbone.dim)
        expert = self.kept["experts"][-1].clone() if self.tasks else small(*shape)
        return {"experts": expert, "keys": small(self.backbone.dim)}

    def training_prompt(self, queries: Tensor) -> tuple[Prompt, Tensor]:
        cosines = similarity(queries, self.own["keys"].unsqueeze(0))
        return self._prefix(self.own["experts"].unsqueeze(0)), self.settings.pull * (1 - cosines).mean()

    def prompt(self, queries: Tensor) -> Prompt:
        return self._prefix(self.kept["experts"][self._match(queries)])

    def _match(self, queries: Tensor) -> Tensor:
        """The task [B] whose key is nearest."""
        return similarity(queries, self.kept["keys"]).argmax(dim=1)

    def candidates(self, queries: Tensor) -> Tensor:
        return F.one_hot(self._match(queries), len(self.tasks)).bool()

    def _prefix(self, experts: Tensor) -> Prefix:
        """experts: [B or 1, layers, 2, L / 2, D]."""
        return Prefix((*self.shared["general"].unsqueeze(1), *experts.unbind(1)))


def half(length: int) -> int:
    """How many keys, and as many values, a prefix of `length` tokens has."""
    return (length + 1) // 2
