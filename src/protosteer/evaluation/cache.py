"""Embeddings of test images, each computed once per prompt for a whole run.

The backbone and every learned prompt are frozen, so an embedding that one evaluation made serves all later ones,
and those of a process that went on after the first was killed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import ImageSet


class EmbeddingCache:
    """The `Images` of `methods.base` for one task's test images."""

    def __init__(self, backbone: Backbone, images: ImageSet, batch_size: int):
        self.backbone = backbone
        self.images = images
        self.batch_size = batch_size
        self.forward_passes = 0  # made
        self.asked = 0  # what would have been made without a cache
        self._known: dict[str, tuple[Tensor, Tensor]] = {}  # by key: embeddings [N, D], which are known [N]
        self._new: dict[str, list[Tensor]] = {}  # rows embedded since `take_new`

    def __len__(self) -> int:
        return len(self.images)

    def embed(self, rows: Tensor, key: str | None, prompt: Tensor | None) -> Tensor:
        """[len(rows), D] under the prompt that the key names; no key, no prompt."""
        name = _name(key)
        embeddings, known = self._of(name)
        self.asked += len(rows)
        new = rows[~known[rows]]
        if len(new):
            embeddings[new] = self.backbone.embed_set(self.images, prompt, self.batch_size, rows=new.tolist())
            known[new] = True
            self._new.setdefault(name, []).append(new)
            self.forward_passes += len(new)
        return embeddings[rows]

    def take_new(self) -> dict[str, Tensor]:
        """What was embedded since the last call, for `put`."""
        taken: dict[str, Tensor] = {}
        for name, parts in self._new.items():
            rows = torch.cat(parts)
            taken |= {f"rows/{name}": rows, f"embeddings/{name}": self._known[name][0][rows]}
        self._new = {}
        return taken

    def put(self, taken: Mapping[str, Tensor]) -> None:
        """Embeddings that an interrupted process had made."""
        for part, rows in taken.items():
            kind, _, name = part.partition("/")
            if kind == "rows":
                embeddings, known = self._of(name)
                embeddings[rows] = taken[f"embeddings/{name}"]
                known[rows] = True

    def _of(self, name: str) -> tuple[Tensor, Tensor]:
        if name not in self._known:
            empty = torch.zeros(len(self.images), self.backbone.dim)
            self._known[name] = empty, torch.zeros(len(self.images), dtype=torch.bool)
        return self._known[name]


def _name(key: str | None) -> str:
    return "plain" if key is None else f"prompt {key}"
