"""Base class of methods that adapt the backbone to the first task, and freeze it after that.

`first_session` names what is trained on the first task, under a head or neck that is discarded:

- "none": nothing.
- "prompt": the shared prompt of this package's preset `fast`, trained by the contrastive prototypical loss. With it, a
  method gets the adaptation that `protosteer --preset fast` has.
- "vpt": a deep prompt, by cross-entropy (VPT-Deep, Jia et al., ECCV 2022). It starts at zero as in LAMDA-PILOT, so its
  tokens stay equal.
- "adapter": adapters beside the MLPs, by cross-entropy (AdaptFormer, Chen et al., NeurIPS 2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.backbones.prompting import Prompt
from protosteer.data.decode_cache import cache_decoded
from protosteer.methods.adapters import new_adapters, with_adapters
from protosteer.methods.base import Images, Method, TrainingTask
from protosteer.methods.per_task_tuning import PromptTraining, tune_adapters, tune_deep_prompt
from protosteer.methods.training_utils import embed_task, number_labels, task_seed
from protosteer.paper.trainer import Head, train_prompt
from protosteer.runtime.callbacks import training_callbacks
from protosteer.runtime.task_images import TaskImages
from protosteer.settings import Settings, setting


@dataclass(frozen=True)
class FirstSessionSettings(PromptTraining):
    """How the first task adapts the backbone.

    `epochs`, `batch_size` and `learning_rate` of 0 stand for those of the kind of adaptation: of `fast` for "prompt", of
    `PromptTraining` for the others. "prompt" ignores `schedule`, `weight_decay` and `prompt_length`.
    """

    first_session: str = setting("none", choices=("none", "prompt", "vpt", "adapter"))
    epochs: int = setting(0, at_least=0)
    batch_size: int = setting(0, at_least=0)
    learning_rate: float = setting(0.0, at_least=0)
    adapter_width: int = setting(64, at_least=1, at_most=2**16)
    adapter_scale: float = 0.1

    def training(self) -> FirstSessionSettings:
        """Return these settings with the defaults of "vpt" and "adapter" in place of zeros."""
        names = ("epochs", "batch_size", "learning_rate")
        return self.replace(**{n: getattr(self, n) or getattr(PromptTraining, n) for n in names})

    def prompt_training(self) -> Settings:
        """Return the settings of "prompt": the preset `fast` but for values that are set here."""
        names = ("epochs", "batch_size", "learning_rate", "gradient_clip", "augmentation", "embed_batch_size", "seed")
        return Settings.preset("fast", **{n: getattr(self, n) for n in names if getattr(self, n)})


class FirstSession(Method):
    """Adapts the backbone to the first task, and embeds images by the adapted backbone.

    Attributes:
        adaptation: What the first task trained: a "prompt", the parameters of the adapters, or nothing.
        adapted_backbone: The backbone with its adapters; the given one if there are none.
    """

    settings_class = FirstSessionSettings
    state_fields = {"adaptation": "once"}
    settings: FirstSessionSettings

    def __init__(self, backbone: Backbone, settings: FirstSessionSettings):
        super().__init__(backbone, settings)
        self.adaptation: dict[str, Tensor] = {}
        self.adapted_backbone = backbone

    def adapt(self, task: TrainingTask) -> None:
        """Adapt to the task if it is the first; a single class is not adapted to."""
        kind, classes = self.settings.first_session, number_labels(task, [])[0]
        if self.tasks or kind == "none" or len(classes) == 1:
            return
        if kind == "prompt":
            self.adaptation["prompt"] = train_shared_prompt(task, self.backbone, self.settings.prompt_training())
        elif kind == "vpt":
            self.adaptation["prompt"] = tune_deep_prompt(task, self.backbone, self.settings.training())
        else:
            s = self.settings.training()
            adapters = tune_adapters(task, self.backbone, s, s.adapter_width, s.adapter_scale)
            self.adaptation = {name: tensor.cpu() for name, tensor in adapters.state_dict().items()}
        self._build_adapted()

    def _build_adapted(self) -> None:
        if self.adaptation and self.settings.first_session == "adapter":
            adapters = new_adapters(self.backbone, self.settings.adapter_width, self.generator)
            adapters.load_state_dict(self.adaptation)
            self.adapted_backbone = with_adapters(self.backbone, adapters, self.settings.adapter_scale, trainable=False)

    @property
    def features(self) -> Prompt | None:
        """What is read from the backbone, as its `prompt` argument: by default, the embedding under `adaptation`."""
        return self.adaptation.get("prompt")

    def embed_task(self, task: TrainingTask) -> Tensor:
        """Embed a task's images by the adapted backbone, [n, ...]."""
        return embed_task(task, self.adapted_backbone, self.embed_batch_size, "values", self.features)

    def embed(self, images: Images) -> Tensor:
        """Embed test images by the adapted backbone, [B, ...]; nothing is computed twice in a run."""
        rows, prompt = torch.arange(len(images)), self.features
        backbone = None if self.adapted_backbone is self.backbone else self.adapted_backbone
        if prompt is None and backbone is None:
            return images.embed(rows)
        return images.embed(rows, prompt, "adapted", backbone)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state and build the adapted backbone; see `Method.load_state_dict`."""
        super().load_state_dict(tensors)
        self._build_adapted()

    def trained_parameters(self) -> int:
        """Return the size of the adaptation and of the neck or head that was discarded."""
        if not self.adaptation:
            return 0
        dim, classes = self.backbone.dim, len(self.tasks[0])
        head_size = classes * dim + 1
        if self.settings.first_session == "prompt":
            neck = Head(dim, classes, self.settings.prompt_training(), self.generator)
            head_size = sum(p.numel() for p in neck.parameters())
        return head_size + sum(tensor.numel() for tensor in self.adaptation.values())


def train_shared_prompt(task: TrainingTask, backbone: Backbone, settings: Settings) -> Tensor:
    """Train a prompt [S, L, D] on a task as the first task of a `Learner` does.

    Args:
        task: The task, of two classes or more.
        backbone: The frozen backbone.
        settings: How to train.
    """
    classes, labels = number_labels(task, [])
    images = TaskImages(cache_decoded(task.train), backbone, settings, task.name, task.on_stage)
    run_key = {"settings": settings.to_dict(), "classes": classes, "images": len(labels)}
    callbacks = training_callbacks(task.name, run_key, task.on_stage, task.checkpoint)
    seed = task_seed(settings.seed, classes)
    return train_prompt(images.encoder, images.views, labels, settings, seed=seed, callbacks=callbacks).prompt
