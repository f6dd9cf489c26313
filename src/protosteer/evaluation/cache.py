"""Embeddings of test images, each computed once per prompt for a whole run.

The backbone and every learned prompt are frozen, so an embedding that one evaluation made serves all later ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import ImageSet
from protosteer.inference import Embed
from protosteer.memory import Memory


class EmbeddingCache:
    def __init__(self, backbone: Backbone, images: ImageSet, batch_size: int):
        self.backbone = backbone
        self.images = images
        self.batch_size = batch_size
        self.forward_passes = 0
        self._known: dict[str | None, tuple[Tensor, Tensor]] = {}  # by task name; None: no prompt

    def embed(self, rows: Tensor, task: str | None, prompt: Tensor | None) -> Tensor:
        """[len(rows), D] under the prompt that belongs to the task's name."""
        if task not in self._known:
            empty = torch.zeros(len(self.images), self.backbone.dim)
            self._known[task] = empty, torch.zeros(len(self.images), dtype=torch.bool)
        embeddings, known = self._known[task]
        new = rows[~known[rows]]
        if len(new):
            embeddings[new] = self.backbone.embed_set(self.images, prompt, self.batch_size, rows=new.tolist())
            known[new] = True
            self.forward_passes += len(new)
        return embeddings[rows]

    def embedder(self, memory: Memory) -> Embed:
        """`embed` as `inference.match` calls it, by the numbers of the memory's tasks."""

        def embed(rows: Tensor, task: int | None) -> Tensor:
            if task is None:
                return self.embed(rows, None, None)
            return self.embed(rows, memory.tasks[task].name, memory.tasks[task].prompt)

        return embed
