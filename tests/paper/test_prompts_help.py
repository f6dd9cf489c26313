"""That a learned prompt helps: a planted problem that only steered attention solves."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.transforms import Preprocessing
from protosteer.learner import Learner
from protosteer.paper.vit import ViT, ViTConfig
from protosteer.settings import Settings

# The library rightly warns that this backbone is at chance, and that an untrained prompt leaves it there.
pytestmark = pytest.mark.filterwarnings("ignore::protosteer.errors.ProtosteerWarning")

# What a token of the planted backbone can hold. Most features stay unused, so that a prompt drawn at random
# points nearly all into those, and hardly along STEER.
FEATURES = 32
COLOURS, SIDE, CLUTTER, STEER, OWN = range(3), 3, 4, 5, 6
# A token holds each feature with both signs: its mean is always 0, and layer norm does no more than scale it.
SIGNS = torch.tensor([1.0, -1.0])

TASKS = [("red", "green"), ("blue", "yellow")]
RGB = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0)}

SETTINGS = Settings.preset("paper", epochs=10, batch_size=16, neck_hidden=32, augmentation="none", centroids=2)


def token(feature: int) -> Tensor:
    return torch.kron(SIGNS, torch.eye(FEATURES)[feature])


def moving(*moves: tuple[int, int, float]) -> Tensor:
    """Weights that read a feature and write it to a place, times a factor: (from, to, factor)."""
    weights = torch.zeros(FEATURES, FEATURES)
    for source, target, factor in moves:
        weights[target, source] = factor
    return torch.kron(torch.outer(SIGNS, SIGNS) / 2, weights)


def planted_backbone() -> Backbone:
    """Two layers of attention alone, for images of 2 x 2 pixels, each of which is a patch.

    Layer 1: every token attends to all alike and takes over STEER, which no image has, only a prompt.
    Layer 2: the class token attends to CLUTTER by its OWN, to one SIDE by its STEER, and takes over colours.
    """
    vit = ViT(ViTConfig(image_size=2, patch_size=1, dim=2 * FEATURES, depth=2, heads=1, mlp_dim=1))
    with torch.no_grad():
        for name, parameter in vit.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        vit.patch_embed.proj.weight[:, :, 0, 0] = torch.stack([token(colour) for colour in COLOURS], dim=1)
        vit.cls_token[:] = token(OWN)
        places = [token(SIDE), -token(SIDE), token(CLUTTER), token(CLUTTER)]  # two above, two below
        vit.pos_embed[0, 1:] = torch.stack(places)
        first, second = (block.attn for block in vit.blocks)
        first.qkv.weight[:] = torch.cat([moving(), moving(), moving((STEER, STEER, 2.0))])
        query = moving((OWN, CLUTTER, 2.0), (STEER, SIDE, 3.0))
        key = moving((CLUTTER, CLUTTER, 1.0), (SIDE, SIDE, 1.0))
        value = moving(*((colour, colour, 1.0) for colour in COLOURS))
        second.qkv.weight[:] = torch.cat([query, key, value])
        for attention in (first, second):
            attention.proj.weight[:] = torch.eye(2 * FEATURES)
    half = (0.5, 0.5, 0.5)
    return Backbone("planted", vit, Preprocessing(2, half, half))


def exchanged(images: Tensor) -> Tensor:
    """The twins of these images: the two upper pixels change places, and so does the class."""
    return torch.cat([images[:, :, :1].flip(3), images[:, :, 1:]], dim=2)


def planted_task(one: str, other: str, per_class: int, seed: int) -> tuple[Tensor, list[str]]:
    """uint8 [N, 3, 2, 2], each image with its twin: two given colours above, two random ones below."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(per_class, 3, 2, 2, generator=generator)
    above = 0.2 + 0.6 * torch.tensor([RGB[one], RGB[other]]).T
    images[:, :, 0] = above + 0.1 * torch.randn(per_class, 3, 2, generator=generator)
    images = (255 * images.clamp(0, 1)).to(torch.uint8)
    labels = [f"{one} left of {other}"] * per_class + [f"{other} left of {one}"] * per_class
    return torch.cat([images, exchanged(images)]), labels


def accuracy(settings: Settings) -> float:
    """Percent of new images that are predicted right, after both tasks; chance is 25."""
    learner = Learner(planted_backbone(), settings)
    for seed, colours in enumerate(TASKS):
        learner.learn(planted_task(*colours, per_class=32, seed=seed))
    tests = [planted_task(*colours, per_class=50, seed=100 + i) for i, colours in enumerate(TASKS)]
    predicted = learner.predict(torch.cat([images for images, _ in tests])).labels
    truth = [label for _, labels in tests for label in labels]
    return 100 * sum(a == b for a, b in zip(predicted, truth, strict=True)) / len(truth)


def test_twins_differ_under_a_steering_prompt_alone():
    backbone = planted_backbone()
    images, _ = planted_task(*TASKS[0], per_class=20, seed=0)
    twins = exchanged(images)
    torch.testing.assert_close(backbone.embed_pixels(twins), backbone.embed_pixels(images))
    steering = torch.stack([token(STEER), torch.zeros(2 * FEATURES)])[:, None]
    seen = backbone.embed_pixels(images, steering)
    assert F.cosine_similarity(seen, backbone.embed_pixels(twins, steering)).max() < 0.7


def test_learned_prompts_beat_centroids_without_prompts():
    """The class is the order of the two upper colours, as in "red left of green"; the lower two are clutter.

    Without a prompt the class token attends to the clutter, and to both upper pixels equally little. So an
    image and its twin, which is of the other class, have the same embedding: whatever is read off it,
    centroids or anything else, is the same for both, and right for at most one of them.

    A prompt can write STEER into the class token in layer 1. Its query in layer 2 then prefers one upper
    pixel to the other and to the clutter, and the embedding shows the colour of that pixel: the class.
    """
    plain = accuracy(SETTINGS.replace(prompts=False))
    assert plain < 35 and accuracy(SETTINGS) > plain + 40


@pytest.mark.parametrize("start", ["zero", "random"])
def test_a_prompt_that_was_not_trained_does_not_help(start):
    assert accuracy(SETTINGS.replace(learning_rate=0, final_learning_rate=0, prompt_start=start)) < 35
