"""L2P (Wang et al., CVPR 2022): every image selects prompts from a pool.

The pool holds M prompts of L tokens with a trained key each. An image's query q, its plain embedding, selects the N
prompts whose keys have the largest cosine with it. Their N * L tokens enter before layer 1, and the mean of their
output tokens goes to a linear head. The loss is

    cross-entropy + pull * sum over the N selected keys of (1 - cos(q, k)),

with the second term averaged over the batch. All tasks train the same pool.

As in the paper, and unlike the official code (github.com/google-research/l2p), every image selects for itself. In the
code, the prompts selected most often in a batch serve all of it, so test images would influence each other. The paper's
optional penalty on prompts that earlier tasks selected often is omitted, as in the code. For 5-datasets, the code gives
each task four prompts of its own in training; here all tasks train all. The query comes from the same
augmented view as the prompted pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.backbones.prompting import Prompt
from protosteer.errors import SettingsError
from protosteer.methods.base import Images, Source, register_method
from protosteer.methods.prompt_base import Prompted, draw_small, similarity
from protosteer.methods.training_utils import TrainingSettings
from protosteer.settings import setting


@dataclass(frozen=True)
class L2PSettings(TrainingSettings):
    """Settings of L2P.

    M, L and N are those of a port for CIFAR-100 (github.com/JH-LEE-KR/l2p-pytorch). The official code now has L = 10,
    N = 4 and pull = 1, but its authors call the paper's pull of 0.5 right (issue 10 there).
    """

    pool_size: int = setting(10, at_least=1, at_most=10_000)  # M
    prompt_length: int = setting(5, at_least=1, at_most=4096)  # L
    selected: int = setting(5, at_least=1)  # N
    pull: float = setting(0.5, at_least=0)
    # The official code: Adam, a batch of 128 (16 on each of 8 devices), and 0.03 * batch size / 256.
    epochs: int = 5
    batch_size: int = 128
    learning_rate: float = 0.015
    weight_decay: float = 0.0
    gradient_clip: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.selected > self.pool_size:
            message = f"selected = {self.selected}: must be at most pool_size = {self.pool_size}"
            raise SettingsError(message, code="pool-too-small", name="selected")


@register_method("l2p")
class L2P(Prompted):
    """A pool of prompts that all tasks train."""

    source = Source("Wang et al.", "Learning to prompt for continual learning", "CVPR", 2022)
    trains = "a pool of prompts, head"
    settings_class = L2PSettings
    published = {
        "split-cifar100": {"prompt_length": 10, "selected": 4, "pull": 1.0},
        "five-datasets": {"pool_size": 20, "prompt_length": 10, "selected": 4},
        "imagenet-r": {"epochs": 10, "batch_size": 32, "learning_rate": 0.001875, "pull": 0.1},
    }
    published_source = (
        "configs/*_l2p.py of the official code, with its README's 16 images on each of 8 devices; ImageNet-R, where it has "
        "none: LAMDA-PILOT, exps/l2p_inr.json"
    )
    grid = {"learning_rate": (0.015, 5e-3, 0.05)}
    test_settings = {
        **Prompted.test_settings, "epochs": 15, "pool_size": 4, "prompt_length": 2, "selected": 2, "pull": 0.1,
    }  # fmt: skip
    settings: L2PSettings

    def new_shared(self) -> dict[str, Tensor]:
        """Initialise the pool and its keys."""
        s, dim = self.settings, self.backbone.dim
        prompts = draw_small(s.pool_size, s.prompt_length, dim, generator=self.generator)
        return {"prompts": prompts, "keys": draw_small(s.pool_size, dim, generator=self.generator)}

    def prompt(self, queries: Tensor) -> Prompt:
        """Select the prompts of queries [B, D]."""
        return self._select(queries)[0]

    def training_prompt(self, queries: Tensor) -> tuple[Prompt, Tensor]:
        """Select prompts, and pull their keys towards queries [B, D]."""
        prompt, cosines = self._select(queries)
        return prompt, self.settings.pull * (1 - cosines).sum(dim=1).mean()

    def _select(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return shallow prompts [B, 1, N * L, D] and the cosines [B, N] of their keys."""
        matches = similarity(queries, self.shared["keys"]).topk(self.settings.selected, dim=1)
        return self.shared["prompts"][matches.indices].flatten(1, 2).unsqueeze(1), matches.values

    def features(self, source: Backbone | Images, images: Tensor, prompt: Prompt) -> Tensor:
        """Average the output tokens of the prompt, [B, D]; see `Prompted.features`."""
        assert isinstance(prompt, Tensor)
        length = self.settings.selected * self.settings.prompt_length
        return source.tokens(images, prompt)[:, 1 : 1 + length].mean(dim=1)
