"""Procedural glyphs as `mini` sees them, and the target embeddings for them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from mini_data import SIZE
from pretrain_nano import Reducer, edges, layout
from procedural import random_glyphs
from protosteer.data.transforms import Preprocessing, resize
from protosteer.paper.vit import ViT

# Dimensions of each description of a glyph, and its squared length in the target.
EDGES, LAYOUT = (128, 0.6), (64, 0.4)
SAMPLE = 4000  # glyphs that tell the principal directions of descriptions


class Glyphs:
    """Targets for glyphs: a histogram of edges and a thumbnail, as `nano` learned them, for a teacher knows little of
    strokes. Any rotation of these targets is as good; the one nearest to the embeddings of a ViT is used.
    """

    def __init__(self, vit: ViT, preprocessing: Preprocessing, gen: Generator):
        self.preprocessing = preprocessing
        glyphs = random_glyphs(SAMPLE, gen)
        self.reduce_edges = Reducer(edges(glyphs), EDGES[0])
        self.reduce_layout = Reducer(layout(glyphs), LAYOUT[0])
        self.turn = torch.eye(vit.config.dim)
        sample = glyphs[: SAMPLE // 4]
        with torch.no_grad():
            embeddings = torch.cat([vit(self.as_images(part)) for part in sample.split(50)])
        u, _, vh = torch.linalg.svd(self.target(sample).T @ (embeddings - embeddings.mean(dim=0)))
        self.turn = u @ vh

    def normalised(self, pixels: Tensor) -> Tensor:
        """uint8 -> what a ViT takes."""
        return self.preprocessing.normalise(pixels.float() / 255)

    def as_images(self, glyphs: Tensor) -> Tensor:
        """0..1, of any size -> normalised [N, 3, SIZE, SIZE], as the package would show a picture file."""
        return self.normalised(resize((glyphs * 255).round().byte(), (SIZE, SIZE), "bicubic"))

    def target(self, glyphs: Tensor) -> Tensor:
        """Unit vectors [N, D]."""
        parts = self.reduce_edges(edges(glyphs)), self.reduce_layout(layout(glyphs))
        scaled = [math.sqrt(share) * part for (_, share), part in zip((EDGES, LAYOUT), parts, strict=True)]
        return torch.cat(scaled, dim=1) @ self.turn

    def loss(self, embeddings: Tensor, glyphs: Tensor) -> Tensor:
        """Return one minus the mean cosine between embeddings [N, D] of glyphs and their targets."""
        return 1 - F.cosine_similarity(embeddings, self.target(glyphs), dim=1).mean()
