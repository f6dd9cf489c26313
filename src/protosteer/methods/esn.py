"""ESN (Wang et al., AAAI 2023): an isolated classifier per task; the most confident one answers.

A classifier reads all output tokens of the frozen backbone under a shallow prompt: its own token attends to them in one
Transformer layer, and a linear head maps the result to logits z_t. The prompt is trained with the first task's
classifier and then fixed. Every later task trains only its classifier, by cross-entropy over its own classes. The
confidence of a classifier is its energy

    E_t = - tau log sum exp(z_t / tau).

To make energies comparable, all classifiers are trained towards the same one: the loss has the term
anchor_weight * mean (A_t - anchor)^2. In the authors' code and by default, A_t = - log sum exp(-z_t), which is close to
the smallest logit. With `anchor_kind=energy`, A_t is E_t at tau = 1, the energy that decides.

The temperature is voted on. Each task but the first searches the tau at which most of its images have the least energy
under its own classifier. Every tau that was found votes for the task of least energy. The task with most votes, the
earliest of equals, predicts the class.

Differences: classifiers read tokens after the last norm, and their weights start as torch's linear layers do; there, as
normal numbers of 0.02.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Method, Source, TrainingTask, register_method
from protosteer.methods.per_task_tuning import PromptTraining, tune
from protosteer.methods.training_utils import answer_by, number_labels, task_seed
from protosteer.paper.vit import Block
from protosteer.runtime.progress import counting
from protosteer.settings import setting
from protosteer.util.seeded import seeded

TEMPERATURES = (0.001, 0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # the code's "fast mode"


@dataclass(frozen=True)
class ESNSettings(PromptTraining):
    """Settings of ESN; defaults as in the authors' code (main.py, networks.py; epochs: its README, CIFAR-100)."""

    epochs: int = 30
    batch_size: int = 128
    prompt_length: int = 100
    anchor: float = -10.0
    anchor_weight: float = setting(0.1, at_least=0)
    anchor_kind: str = setting("authors", choices=("authors", "energy"))


class Classifier(nn.Module):
    """A token, the layer in which it attends to the backbone's tokens, and a head."""

    def __init__(self, backbone: Backbone, classes: int, generator: torch.Generator | None = None):
        super().__init__()
        config = backbone.vit.config
        self.token = nn.Parameter(backbone.vit.cls_token.detach().cpu().clone())  # [1, 1, D]
        layer_config = dataclasses.replace(config, mlp_dim=config.dim // 2, layer_scale=False, qkv_bias=True)
        self.layer = seeded(lambda: Block(layer_config), generator)
        self.head = seeded(lambda: nn.Linear(config.dim, classes), generator)
        self.to(backbone.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens [B, N, D] as [B, D]."""
        token = self.token.expand(len(tokens), -1, -1)
        return self.layer(torch.cat([token, tokens.to(self.token)], dim=1), queries=1)[:, 0]

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits [B, K] of tokens [B, N, D]."""
        return self.head(self.embed(tokens))


@register_method("esn")
class ESN(Method):
    """One classifier per task on a prompted backbone, chosen by energy."""

    source = Source(
        "Wang et al.",
        "Isolation and impartial aggregation: a paradigm of incremental learning without interference",
        "AAAI",
        2023,
    )
    trains = "a prompt, a classifier per task"
    settings_class = ESNSettings
    published = {"split-cifar100": {}, "five-datasets": {"epochs": 10}}
    published_source = "README of the authors' code (iamwangyabin/ESN)"
    grid = {"learning_rate": (0.01, 3e-3, 0.03)}
    state_fields = {"prompt": "once", "temperatures": "per task", "classifiers": "per task"}
    # With so few images, tasks can be separated only if energies come close to their anchor.
    test_settings = {
        "epochs": 20, "batch_size": 8, "prompt_length": 2, "learning_rate": 0.05, "gradient_clip": 1.0,
        "augmentation": "none", "anchor_kind": "energy",
    }  # fmt: skip

    def __init__(self, backbone: Backbone, settings: ESNSettings):
        super().__init__(backbone, settings)
        self.prompt = torch.zeros(backbone.prompt_shape(settings.prompt_length, deep=False))  # [1, L, D]
        self.classifiers = nn.ModuleList()  # one per task
        self.temperatures = torch.empty(0)  # of each task, [T]

    def learn(self, task: TrainingTask) -> None:
        """Train the task's classifier, with the prompt on the first task, and search its temperature."""
        s, classes = self.settings, number_labels(task, [])[0]
        self.generator.manual_seed(task_seed(s.seed, classes))
        classifier = Classifier(self.backbone, len(classes), self.generator)
        prompt, layer = self.prompt, dict(classifier.layer.named_parameters("layer"))
        parameters: dict[str, nn.Parameter] = {"token": classifier.token, **layer}
        if not self.tasks:
            start = seeded(lambda: nn.Linear(self.backbone.dim, s.prompt_length), self.generator).weight.detach()
            prompt = parameters["prompt"] = nn.Parameter(start.to(self.backbone.device)[None])

        def embed(images: Tensor) -> Tensor:
            return classifier.embed(self.backbone.tokens(images, prompt))

        def penalty(logits: Tensor) -> Tensor:
            energies = energy(logits if s.anchor_kind == "energy" else -logits)
            return s.anchor_weight * (energies - s.anchor).square().mean()

        tune(task, self.backbone, parameters, embed, classifier.head, s, self.generator, penalty)
        self.prompt = prompt.detach().cpu()
        self.classifiers.append(classifier.requires_grad_(False))
        self.tasks.append(classes)
        self.temperatures = torch.cat([self.temperatures, self.find_temperature(task)[None]])

    def find_temperature(self, task: TrainingTask) -> Tensor:
        """Find the temperature at which most of the newest task's images choose its classifier."""
        hits = torch.zeros(len(TEMPERATURES))
        report = counting(task.on_stage, task.name, "temperatures", len(task.train))
        for rows in torch.arange(len(task.train)).split(self.embed_batch_size):
            tokens = self.backbone.embed_set(task.train, self.prompt, rows=rows.tolist(), whole=True)
            logits = self.logits(tokens)
            hits += torch.stack([(least_energy(logits, t) == len(self.tasks) - 1).sum() for t in TEMPERATURES])
            report(int(rows[-1]) + 1)
        return torch.tensor(TEMPERATURES)[hits.argmax()]

    def logits(self, tokens: Tensor) -> list[Tensor]:
        """Compute the logits [B, K_t] of every task, from tokens [B, N, D] of the prompted backbone."""
        return [classifier(tokens).cpu() for classifier in self.classifiers]

    def answer(self, images: Images) -> Answer:
        """Predict by the classifier of the elected task."""
        batches = torch.arange(len(images)).split(self.embed_batch_size)  # all tokens at once are too many
        batch_logits = [self.logits(images.tokens(rows, self.prompt)) for rows in batches]
        logits = [torch.cat(parts) for parts in zip(*batch_logits, strict=True)]
        task_numbers = elect(logits, self.temperatures.unique().tolist())
        task_logits = [z.masked_fill((task_numbers != t)[:, None], -torch.inf) for t, z in enumerate(logits)]
        candidates = F.one_hot(task_numbers, len(self.tasks)).bool()
        return answer_by(torch.cat(task_logits, dim=1), candidates=candidates, prompts=torch.zeros_like(task_numbers))

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Create the classifiers and restore everything; see `Method.load_state_dict`."""
        classifiers = (Classifier(self.backbone, len(task), self.generator) for task in self.tasks)
        self.classifiers = nn.ModuleList(classifiers).requires_grad_(False)
        super().load_state_dict(tensors)

    def trained_parameters(self) -> int:
        """Return the size of the classifiers and the prompt."""
        count = sum(p.numel() for p in self.classifiers.parameters())
        return count + self.prompt.numel() if self.tasks else 0


def energy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute the energies [B] of logits [B, K]; lower is more confident."""
    return -temperature * (logits / temperature).logsumexp(dim=1)


def least_energy(logits: Sequence[Tensor], temperature: float) -> Tensor:
    """Return the task of least energy for each image, [B], from each task's logits [B, K_t]."""
    return torch.stack([energy(z, temperature) for z in logits]).argmin(dim=0)


def elect(logits: Sequence[Tensor], temperatures: Sequence[float]) -> Tensor:
    """Return the task with most of the temperatures' votes, the earliest of equals, [B]."""
    votes = torch.stack([least_energy(logits, t) for t in temperatures])  # [V, B]
    return F.one_hot(votes, len(logits)).sum(dim=0).argmax(dim=1)
