"""`mini` before its training, and what it is asked to say.

It begins as DeiT-Tiny itself, cut to 64 pixels: the kernel of 16-pixel patches is folded into one of 8-pixel
patches, so that the student does with a small picture what the teacher does with the same picture enlarged
to 128 pixels. There the teacher is poor, for it knows its things at 224 pixels. The training makes up for
that: the student learns to say of a small picture what the teacher says at 224.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from mini_data import SIZE
from pretrain_nano import Reducer, edges, layout
from procedural import random_glyphs
from protosteer.data.transforms import Preprocessing, resize
from protosteer.method.vit import ViT, resample_positions

PATCH = 8
# Dimensions of each description of a glyph, and its squared length in the target.
EDGES, LAYOUT = (128, 0.6), (64, 0.4)
SAMPLE = 4000  # glyphs that tell the principal directions of descriptions


def fold(teacher: ViT, layers: Sequence[int]) -> ViT:
    """A student made of some of the teacher's layers, for pictures of SIZE pixels."""
    config = replace(teacher.config, image_size=SIZE, patch_size=PATCH, depth=len(layers))
    taken = {f"blocks.{old}.": f"blocks.{new}." for new, old in enumerate(layers)}
    state = {}
    for name, tensor in teacher.state_dict().items():
        prefix = ".".join(name.split(".")[:2]) + "." if name.startswith("blocks.") else ""
        if prefix in taken or not prefix:
            state[taken.get(prefix, "") + name.removeprefix(prefix)] = tensor.clone()
    state["pos_embed"] = resample_positions(state["pos_embed"], config.grid, config.position_for_class)
    state["patch_embed.proj.weight"] = fold_kernel(state["patch_embed.proj.weight"])
    student = ViT(config)
    student.load_state_dict(state)
    return student.requires_grad_(True)


def fold_kernel(kernel: Tensor) -> Tensor:
    """[D, 3, p, p] -> [D, 3, PATCH, PATCH]: gives for a patch what `kernel` gives for the patch enlarged."""
    points = torch.eye(PATCH**2).view(-1, 1, PATCH, PATCH)
    enlarged = F.interpolate(points, size=tuple(kernel.shape[2:]), mode="bicubic").flatten(1)
    return (kernel.flatten(2) @ enlarged.T).unflatten(2, (PATCH, PATCH))


class Glyphs:
    """Made-up glyphs as the student sees them, and the vectors that it should give for them.

    DeiT knows little of strokes, so the target is what `nano` learned: where edges of which direction are, and
    where which shades. Any turned copy of those descriptions is as good; taken is the one that is nearest to
    what the student says anyway.
    """

    def __init__(self, student: ViT, preprocessing: Preprocessing, gen: Generator):
        self.preprocessing = preprocessing
        drawn = random_glyphs(SAMPLE, gen)
        self.reduce_edges = Reducer(edges(drawn), EDGES[0])
        self.reduce_layout = Reducer(layout(drawn), LAYOUT[0])
        self.turn = torch.eye(student.config.dim)
        some = drawn[: SAMPLE // 4]
        with torch.no_grad():
            said = torch.cat([student(self.shown(part)) for part in some.split(50)])
        u, _, vh = torch.linalg.svd(self.target(some).T @ (said - said.mean(dim=0)))
        self.turn = u @ vh

    def shown(self, drawn: Tensor) -> Tensor:
        """0..1, of any size -> normalised [N, 3, SIZE, SIZE], as the package would show a picture file."""
        pixels = resize((drawn * 255).round().byte(), (SIZE, SIZE), "bicubic")
        return self.preprocessing.normalise(pixels.float() / 255)

    def target(self, drawn: Tensor) -> Tensor:
        """Unit vectors [N, D]."""
        parts = self.reduce_edges(edges(drawn)), self.reduce_layout(layout(drawn))
        scaled = [math.sqrt(share) * part for (_, share), part in zip((EDGES, LAYOUT), parts, strict=True)]
        return torch.cat(scaled, dim=1) @ self.turn


@dataclass(frozen=True)
class Scales:
    """What makes the teacher's numbers comparable: variances [D] of its class and its patch tokens; its head."""

    classes: Tensor
    patches: Tensor
    weight: Tensor  # [labels, D]
    bias: Tensor


def losses(
    tokens: Tensor, classes: Tensor, patches: Tensor, glyphs: Tensor, scales: Scales
) -> dict[str, Tensor]:
    """Parts of the loss of a batch of photographs, then glyphs.

    tokens [B, 1 + P, D]: the student's; classes [n, D], patches [n, P, D]: the teacher's; glyphs [B - n, D]: targets.

    - `tokens`: squared distance of class tokens, each dimension in units of the teacher's variance;
    - `labels`: how far the labels that the teacher's head reads from the student's class token diverge from those
      that it reads from the teacher's;
    - `patches`: as `tokens`, of patch tokens;
    - `glyphs`: one minus the cosine to the target.
    """
    said, drawn = tokens[:, 0].split([len(classes), len(glyphs)])
    read, truth = (F.log_softmax(x @ scales.weight.T + scales.bias, dim=1) for x in (said, classes))
    return {
        "tokens": ((said - classes).square() / scales.classes).mean(),
        "labels": F.kl_div(read, truth, log_target=True, reduction="batchmean"),
        "patches": ((tokens[: len(classes), 1:] - patches).square() / scales.patches).mean(),
        "glyphs": 1 - F.cosine_similarity(drawn, glyphs, dim=1).mean(),
    }
