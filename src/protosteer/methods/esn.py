"""ESN (Wang et al., AAAI 2023): a classifier per task that no other disturbs; the surest of them answers.

A classifier reads all tokens that leave the frozen backbone under a shallow prompt: a token of its own
attends to them in one Transformer layer, and a linear head makes logits z_t of it. The prompt is trained with
the first task's classifier and stays; every later task trains its classifier alone, by cross-entropy over its
own classes. How sure a classifier is, is told by its energy

    E_t = - tau log sum exp(z_t / tau),

and to make energies comparable all classifiers are trained towards the same one: with tau = 1,
anchor_weight * mean (E_t - anchor)^2 is added to the loss. The temperature of an answer is voted on: each
task but the first looks for the tau at which most of its own images have the least energy under its own
classifier, and every tau that was found has a vote for the task of least energy. The task with most votes
says the class, of equals the earliest.

The authors' code anchors - log sum exp(-z_t), which is close to the smallest logit; here it is the energy by
which is decided. Also unlike there, classifiers read tokens after the last norm, gradients are clipped, and
images are augmented as for every other method here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Method, Source, TaskData
from protosteer.methods.per_task_tuning import PromptTraining, train_alone
from protosteer.methods.training_utils import answer_by, numbered, task_seed
from protosteer.paper.vit import Block
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage, Stage
from protosteer.settings import setting

TEMPERATURES = (0.001, 0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # the code's "fast mode"


@dataclass(frozen=True)
class ESNSettings(PromptTraining):
    """Those of the authors' code (main.py, networks.py; epochs: its README, for CIFAR-100)."""

    epochs: int = 30
    batch_size: int = 128
    prompt_length: int = 100
    anchor: float = -10.0
    anchor_weight: float = setting(0.1, at_least=0)


class Classifier(nn.Module):
    """A token, the layer in which it attends to an image's tokens, and a head."""

    def __init__(self, backbone: Backbone, classes: int):
        super().__init__()
        config = backbone.vit.config
        self.token = nn.Parameter(backbone.vit.cls_token.detach().cpu().clone())  # [1, 1, D]
        self.layer = Block(
            dataclasses.replace(config, mlp_dim=config.dim // 2, layer_scale=False, qkv_bias=True)
        )
        self.head = nn.Linear(config.dim, classes)
        self.to(backbone.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, N, D] -> [B, D]."""
        own = self.token.expand(len(tokens), -1, -1)
        return self.layer(torch.cat([own, tokens.to(self.token)], dim=1), queries=1)[:, 0]

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, N, D] -> logits [B, K]."""
        return self.head(self.embed(tokens))


class ESN(Method):
    name = "esn"
    source = Source(
        "Wang et al.",
        "Isolation and impartial aggregation: a paradigm of incremental learning without interference",
        "AAAI",
        2023,
    )
    trains = "a prompt, a classifier per task"
    settings_class = ESNSettings

    def __init__(self, backbone: Backbone, settings: ESNSettings):
        super().__init__(backbone, settings)
        self.prompt = torch.zeros(backbone.prompt_shape(settings.prompt_length, deep=False))  # [1, L, D]
        self.classifiers = nn.ModuleList()
        self.temperatures = torch.empty(0)  # [T]: what each task found

    def learn(
        self, task: TaskData, on_stage: OnStage | None = None, checkpoint: CheckpointFile | None = None
    ) -> None:
        s, classes = self.settings, numbered(task, [])[0]
        with torch.random.fork_rng():
            torch.manual_seed(task_seed(s.seed, classes))
            new = Classifier(self.backbone, len(classes))
            prompt, trained = self.prompt, {"token": new.token, **dict(new.layer.named_parameters("layer"))}
            if not self.tasks:
                small = nn.Linear(self.backbone.dim, s.prompt_length).weight.detach()
                prompt = trained["prompt"] = nn.Parameter(small.to(self.backbone.device)[None])

            def embed(images: Tensor) -> Tensor:
                return new.embed(self.backbone.tokens(images, prompt))

            def penalty(logits: Tensor) -> Tensor:
                return s.anchor_weight * (energy(logits) - s.anchor).square().mean()

            train_alone(task, self.backbone, trained, embed, new.head, s, on_stage, checkpoint, penalty)
        self.prompt = prompt.detach().cpu()
        self.classifiers.append(new.requires_grad_(False))
        self.tasks.append(classes)
        self.temperatures = torch.cat([self.temperatures, self.find_temperature(task, on_stage)[None]])

    def find_temperature(self, task: TaskData, on_stage: OnStage | None) -> Tensor:
        """At which the newest task's own images most often have the least energy under its classifier."""
        known = torch.zeros(len(TEMPERATURES))
        for rows in torch.arange(len(task.train)).split(self.embed_batch_size):
            tokens = self.backbone.embed_set(task.train, self.prompt, rows=rows.tolist(), whole=True)
            logits = self.logits(tokens)
            known += torch.stack([(surest(logits, t) == len(self.tasks) - 1).sum() for t in TEMPERATURES])
            if on_stage:
                on_stage(Stage(task.name, "temperatures", int(rows[-1]) + 1, len(task.train)))
        return torch.tensor(TEMPERATURES)[known.argmax()]

    def logits(self, tokens: Tensor) -> list[Tensor]:
        """[B, K_t] of every task, from tokens [B, N, D] of the prompted backbone."""
        return [classifier(tokens).cpu() for classifier in self.classifiers]

    def answer(self, images: Images) -> Answer:
        self.require_knowledge()
        batches = torch.arange(len(images)).split(self.embed_batch_size)  # all tokens at once are too many
        each = [self.logits(images.tokens(rows, self.prompt)) for rows in batches]
        logits = [torch.cat(parts) for parts in zip(*each, strict=True)]
        chosen = elected(logits, self.temperatures.unique().tolist())
        own = [z.masked_fill((chosen != t)[:, None], -torch.inf) for t, z in enumerate(logits)]
        candidates = F.one_hot(chosen, len(self.tasks)).bool()
        return answer_by(torch.cat(own, dim=1), candidates=candidates, prompts=torch.zeros_like(chosen))

    def tensors(self) -> dict[str, Tensor]:
        weights = {f"classifiers.{name}": t for name, t in self.classifiers.state_dict().items()}
        return {"prompt": self.prompt, "temperatures": self.temperatures, **weights}

    def put_back(self, tensors: dict[str, Tensor]) -> None:
        self.prompt, self.temperatures = tensors["prompt"], tensors["temperatures"]
        with torch.random.fork_rng():  # what is drawn for new classifiers is overwritten
            made = [Classifier(self.backbone, len(task)).requires_grad_(False) for task in self.tasks]
        self.classifiers = nn.ModuleList(made)
        prefix = "classifiers."
        weights = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        self.classifiers.load_state_dict(weights)

    def bytes_per_task(self) -> list[int]:
        """A classifier and a temperature; the first task brings the prompt too."""
        each = [4 + 4 * sum(p.numel() for p in one.parameters()) for one in self.classifiers]
        return [each[0] + self.prompt.nbytes, *each[1:]] if each else []

    def trained_parameters(self) -> int:
        count = sum(p.numel() for p in self.classifiers.parameters())
        return count + self.prompt.numel() if self.tasks else 0


def energy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[B] of logits [B, K]: the lower, the surer."""
    return -temperature * (logits / temperature).logsumexp(dim=1)


def surest(logits: Sequence[Tensor], temperature: float) -> Tensor:
    """[B]: the task of least energy, of those with logits [B, K_t]."""
    return torch.stack([energy(z, temperature) for z in logits]).argmin(dim=0)


def elected(logits: Sequence[Tensor], temperatures: Sequence[float]) -> Tensor:
    """[B]: the task with most of the temperatures' votes, the earliest of equals."""
    votes = torch.stack([surest(logits, t) for t in temperatures])  # [V, B]
    return F.one_hot(votes, len(logits)).sum(dim=0).argmax(dim=1)
