"""What every rank of `test_data_parallel` computes; not a test itself.

    python rank_cases.py FOLDER

Writes the results of this rank to FOLDER/RANK.pt: by case, a dict of tensors.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from conftest import easy_task, tiny_backbone, train
from protosteer.backbones import Backbone
from protosteer.backbones.row_sharing import sharing_rows
from protosteer.data.decode_cache import DecodedCache
from protosteer.data.images import ArrayImages, Chosen, FileImages, ImageSet, Joined, LazyImages
from protosteer.evaluation.embedding_cache import EmbeddingCache
from protosteer.learner import Learner
from protosteer.methods import find_method
from protosteer.methods.prefix_vit import Prefix
from protosteer.paper.prompts import initial_prompt
from protosteer.paper.prototypes import Anchors
from protosteer.paper.trainer import Head
from protosteer.runtime.task_images import TaskImages
from protosteer.settings import Settings
from protosteer.streams.base import TrainingTask
from protosteer.util.distributed import ProcessGroup, join, process_group
from vit_toys import small

SETTINGS = Settings.preset("paper", epochs=3, batch_size=5, neck_hidden=16, augmentation="paper", prompt_start="random")
# Uneven shares, and fewer rows than ranks, of which the contrastive loss would have no gradient.
STEPS = [(1, 1, "cross-entropy"), (2, 2, "cross-entropy"), (5, 1, None), (8, 2, None)]
DTYPES = {"float64": torch.float64, "float32": torch.float32}

Case = dict[str, Tensor]


def earlier(dtype: torch.dtype) -> Anchors:
    draw = torch.Generator().manual_seed(1)
    return Anchors(torch.randn(4, 24, generator=draw).to(dtype), torch.full((4, 24), 0.1, dtype=dtype), torch.arange(4))


def one_step(backbone: Backbone, images: ImageSet, rows: Tensor, settings: Settings) -> Case:
    """The loss of one batch, its embeddings, and the gradients of everything that is trained."""
    dtype = backbone.vit.cls_token.dtype
    task_images = TaskImages(images, backbone, settings, "task")
    generator = torch.Generator().manual_seed(0)
    prompt = nn.Parameter(initial_prompt(backbone, settings, None, generator).to(dtype))
    head = Head(backbone.dim, 2, settings, generator).to(dtype)
    (tokens,) = task_images.views([rows], generator)
    embeddings = task_images.encoder.embed_tokens(tokens, settings.prompt_from_layer - 1, prompt)
    loss = head.loss(embeddings, rows % 2, earlier(dtype))
    loss.backward()
    parameters = [("prompt", prompt), *head.named_parameters()]
    gradients = {name: p.grad for name, p in parameters if p.grad is not None}
    return {"loss": loss.detach(), "embeddings": embeddings.detach(), **gradients}


def steps() -> dict[str, Case]:
    found = {}
    for dtype in DTYPES:
        for count, from_layer, loss in STEPS:
            backbone = small()
            backbone.vit.to(DTYPES[dtype])
            settings = SETTINGS.replace(prompt_from_layer=from_layer, **({"loss": loss} if loss else {}))
            rows = torch.randperm(16, generator=torch.Generator().manual_seed(count))[:count]
            images = ArrayImages(easy_task(["ant", "bee"])[0])
            found[f"step {dtype} {count}"] = one_step(backbone, images, rows, settings)
    return found


def training(seed: int = 3) -> Case:
    pixels, labels = easy_task(["ant", "bee"])
    numbers = torch.tensor([int(label == "bee") for label in labels])
    trained = train(tiny_backbone(), pixels, numbers, SETTINGS, seed=seed, anchors=earlier(torch.float32))
    return {"prompt": trained.prompt, "losses": torch.tensor([epoch.loss for epoch in trained.epochs])}


def embeddings(folder: Path) -> Case:
    backbone, draw = tiny_backbone(), torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (11, 3, 16, 16), generator=draw, dtype=torch.uint8)
    prompt = torch.randn(backbone.prompt_shape(3), generator=draw)
    files = FileImages([folder / f"{i}.png" for i in range(11)], backbone.preprocessing)
    array = ArrayImages(pixels)
    sets: dict[str, ImageSet] = {
        "array": array, "files": files, "cached": DecodedCache(files), "chosen": Chosen(array, range(11)),
        "joined": Joined([Chosen(array, [0, 1]), Chosen(files, range(2, 11))]),
        "lazy": LazyImages(11, lambda row: Image.open(folder / f"{row}.png"), backbone.preprocessing),
    }  # fmt: skip
    found = {}
    for name, images in sets.items():
        for rows in (None, [], [4], [7, 2], [3, 3, 10, 0, 1]):
            for given, whole in ((None, False), (prompt, False), (prompt, True)):
                done: list[int] = []
                one = backbone.embed_set(images, given, 3, done.append, rows, whole)
                assert done == sorted(done) and done[-1:] == [len(one)][: len(one)]
                found[f"{name} {rows} {given is None} {whole}"] = one
    prompts = torch.randn(11, *backbone.prompt_shape(2), generator=draw)
    return {**found, "a prompt each": backbone.embed_pixels(pixels, prompts)}


def learned() -> Case:
    images, labels = easy_task(["ant", "bee"])
    learner = Learner(tiny_backbone(), SETTINGS)
    record = learner.learn((images, labels), name="first")
    answers = torch.tensor([label == "ant" for label in learner.predict(images).labels])
    return {name: tensor.float() for name, tensor in record.tensors()} | {"answers": answers}


def write_images(folder: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (11, 3, 16, 16), generator=draw, dtype=torch.uint8)
    for i, image in enumerate(pixels):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{i}.png")


def all_cases(folder: Path) -> dict[str, Case]:
    return {
        **steps(), **methods(), **shared_rows(process_group()), "training": training(), "embeddings": embeddings(folder), "learned": learned()
    }  # fmt: skip


# One of each kind: the whole backbone, with a buffer, with a penalty on weights, two views and a loss of the whole
# batch, prompts by tokens, by prefixes; adapters, trained once or by all tasks; statistics of tokens by hooks.
METHODS = ("finetune", "er", "ewc", "co2l", "l2p", "dualprompt", "ease", "ssiat", "inflora")


def methods() -> dict[str, Case]:
    """What methods that train by `fit` answer after two tasks, of few steps, so that rounding does not grow.

    Not their weights: keys' biases have no effect and no gradient but rounding, which Adam scales up.
    """
    found = {}
    for name in METHODS:
        kind = find_method(name)
        # Adapters start at zero output, and a training that changes nothing warns.
        short = {"epochs": 1, "learning_rate": 1.0 if name == "ease" else 1e-3, "batch_size": 8}
        method = kind(tiny_backbone(), kind.settings_from({**kind.test_settings, **short}))
        for classes in (["ant", "bee"], ["cat", "dog"]):
            images, labels = easy_task(classes)
            method.learn(TrainingTask(classes[0], classes, ArrayImages(images), labels))
        pixels = ArrayImages(easy_task(["ant", "bee", "cat", "dog"], seed=40)[0])
        answer = method.answer(EmbeddingCache(method, pixels))
        scores = answer.classes if answer.scores is None else answer.scores
        found[name] = {"scores": scores, "embeddings": EmbeddingCache(method, pixels).embed(torch.arange(32))}
    return found


def shared_rows(group: ProcessGroup) -> dict[str, Case]:
    """Gradients, in double precision, of a loss of whole batches and a penalty on weights."""
    found = {}
    for count in (1, 2, 5, 8):
        for kind in ("none", "one", "each", "prefix"):
            backbone, draw = small().trainable_copy(), torch.Generator().manual_seed(count)
            backbone.vit.to(torch.float64)
            images = torch.randn(count, 3, 16, 16, generator=draw, dtype=torch.float64)
            shapes = {"one": (2, 1, 24), "each": (count, 2, 1, 24), "prefix": (count, 2, 1, 24)}
            given = torch.randn(shapes.get(kind, (1,)), generator=draw, dtype=torch.float64).requires_grad_()
            prompt: Any = {"none": None, "prefix": Prefix((given,))}.get(kind, given)
            with sharing_rows(group):
                z = backbone.embed(images, prompt)
                tokens = backbone.tokens(images, None)
            weight = backbone.vit.blocks[0].mlp.fc1.weight
            loss = (z @ z.T).square().mean() + tokens.norm() + weight.square().sum() + given.square().sum()
            loss.backward()
            gradients = {n: p.grad for n, p in backbone.vit.named_parameters() if p.grad is not None}
            found[f"rows {count} {kind}"] = {"z": z.detach(), "prompt": given.grad, **gradients}
    return found


if __name__ == "__main__":
    group = join()
    out = Path(sys.argv[1])
    torch.save(all_cases(out), out / f"{group.size}-{os.environ['RANK']}.pt")
    group.leave()
