"""Training on a task alone against the same steps written out."""

import math

import torch
import torch.nn.functional as F

from protosteer.methods.per_task_tuning import CosineHead, PromptTraining, tune, tune_deep_prompt
from protosteer.methods.testing import GROUPS, toy_backbone, toy_task
from protosteer.methods.training_utils import task_seed

# One batch has all images, as they are: an epoch is a step, and nothing about it is random.
WHOLE = {"epochs": 4, "batch_size": 24, "augmentation": "none", "gradient_clip": 1e9, "prompt_length": 2}


def test_a_prompt_goes_down_the_cross_entropy_of_a_scaled_cosine():
    """SGD with momentum, weight decay and a rate that falls by the cosine, written out."""
    backbone, task = toy_backbone(), toy_task(GROUPS[1])
    settings = PromptTraining(**WHOLE)
    with torch.random.fork_rng():
        torch.manual_seed(task_seed(0, GROUPS[1]))
        head = CosineHead(24, 3, torch.device("cpu"))
    values = [torch.zeros(2, 2, 24), head.weight.detach().clone(), torch.ones(())]
    speeds = [torch.zeros_like(value) for value in values]
    images = backbone.preprocessing(task.train.pixels(list(range(24))))
    labels = torch.tensor([GROUPS[1].index(label) for label in task.train_labels])
    for step in range(4):
        prompt, weight, scale = (value.clone().requires_grad_() for value in values)
        embeddings = backbone.embed(images, prompt)
        cosine = torch.stack([F.cosine_similarity(embeddings, row[None]) for row in weight], dim=1)
        logits = scale * cosine
        loss = -(logits[range(24), labels] - logits.exp().sum(dim=1).log()).mean()
        gradients = torch.autograd.grad(loss, [prompt, weight, scale])
        rate = 0.01 * (1 + math.cos(math.pi * step / 3)) / 2
        for value, speed, gradient in zip(values, speeds, gradients, strict=True):
            speed.mul_(0.9).add_(gradient + 5e-4 * value)
            value.sub_(rate * speed)
    found = tune_deep_prompt(task, backbone, settings)
    assert found.norm() > 0.1
    torch.testing.assert_close(found, values[0], rtol=1e-3, atol=1e-4)


def test_a_penalty_counts():
    """With one on the size of logits they end up smaller."""
    backbone, task = toy_backbone(), toy_task(GROUPS[1])
    images = backbone.preprocessing(task.train.pixels(list(range(24))))
    sizes = []
    for penalty in (None, lambda logits: logits.square().mean()):
        torch.manual_seed(0)
        head = torch.nn.Linear(24, 3)
        tune(
            task,
            backbone,
            {},
            backbone.embed,
            head,
            PromptTraining(**WHOLE),
            torch.Generator().manual_seed(0),
            penalty=penalty,
        )
        sizes.append(float(head(backbone.embed(images)).detach().abs().mean()))
    assert sizes[1] < 0.9 * sizes[0]
