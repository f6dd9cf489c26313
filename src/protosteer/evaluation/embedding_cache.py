"""A cache of test embeddings: each is computed once per prompt for a whole run.

With a frozen backbone and prompt, an embedding serves all later evaluations, also those of a resumed run. Embeddings are
keyed by the fingerprint of the weights, so those of a backbone that was trained since are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.backbones.prompting import Prompt
from protosteer.data.images import ImageSet
from protosteer.methods.base import Method
from protosteer.methods.layer_tokens import LayerTokens
from protosteer.methods.plain_images import PlainImages


class EmbeddingCache(PlainImages):
    """One task's test images for a method: see `methods.base.Images`.

    Attributes:
        forward_passes: How many images were embedded.
        requests: How many would have been embedded without a cache.
    """

    def __init__(self, method: Method, images: ImageSet):
        super().__init__(method, images)
        self.forward_passes = 0
        self.requests = 0
        self._version = ""  # fingerprint of the current weights
        self._known: dict[str, tuple[Tensor, Tensor]] = {}  # by name: embeddings [N, D], and which are known [N]
        self._new: dict[str, list[Tensor]] = {}  # rows embedded since `take_new`

    def embed(
        self, rows: Tensor, prompt: Prompt | None = None, key: str | None = None, backbone: Backbone | None = None
    ) -> Tensor:
        """Embed some rows, or look them up; see `Images.embed`."""
        self.requests += len(rows)
        if key is None and (prompt is not None or backbone is not None):
            return self.compute(rows, prompt, backbone)
        name = self._name(key) if backbone is None else f"backbone {key}"
        used = backbone or self.method.backbone
        width = prompt.layers * used.dim if isinstance(prompt, LayerTokens) else used.width
        if name in self._known and self._known[name][0].shape[1] != width:
            del self._known[name]  # restored from a folder that was altered
        known = self._known[name][1] if name in self._known else torch.zeros(len(self), dtype=torch.bool)
        new = rows[~known[rows]]
        if len(new):
            own = prompt[~known[rows]] if prompt is not None and prompt.ndim == 4 else prompt
            self._add(name, new, self.compute(new, own, backbone))
            self._new.setdefault(name, []).append(new)
        if name not in self._known:
            return torch.empty(0, width)
        return self._known[name][0][rows]

    def tokens(self, rows: Tensor, prompt: Tensor | None = None) -> Tensor:
        """Return the output tokens of some rows; they are not cached."""
        self.requests += len(rows)
        return super().tokens(rows, prompt)

    def compute(
        self, rows: Tensor, prompt: Prompt | None, backbone: Backbone | None = None, whole: bool = False
    ) -> Tensor:
        """Compute and count."""
        self.forward_passes += len(rows)
        return super().compute(rows, prompt, backbone, whole)

    def take_new(self) -> dict[str, Tensor]:
        """Return what was embedded since the last call, for `put`."""
        taken: dict[str, Tensor] = {}
        for name, parts in self._new.items():
            rows = torch.cat(parts)
            taken |= {f"rows/{name}": rows, f"embeddings/{name}": self._known[name][0][rows]}
        self._new = {}
        return taken

    def put(self, taken: Mapping[str, Tensor]) -> None:
        """Restore what `take_new` returned, in an earlier process; raises ValueError if it is of other images."""
        for part, rows in taken.items():
            kind, _, name = part.partition("/")
            if kind == "rows":
                new = taken[f"embeddings/{name}"]
                backbone = self.method.backbone
                widths = [layers * backbone.dim for layers in range(1, backbone.depth + 2)]
                fits = rows.ndim == 1 and new.ndim == 2 and len(new) == len(rows) and new.shape[1] in widths
                fits = fits and (name not in self._known or self._known[name][0].shape[1] == new.shape[1])
                if not fits or rows.dtype != torch.long or new.dtype != torch.float32:
                    raise ValueError(f"embeddings are {new.dtype} {list(new.shape)}")
                if len(rows) and not (rows.min() >= 0 and rows.max() < len(self)):
                    raise ValueError("embeddings of images that are none of the task's")
                self._add(name, rows, new)

    def _name(self, key: str | None) -> str:
        """Return the cache key; drop embeddings of earlier weights."""
        name = "plain" if key is None else f"prompt {key}"
        if not self.method.trains_backbone:
            return name
        version = self.method.backbone.fingerprint
        if version != self._version:
            self._known = {n: kept for n, kept in self._known.items() if n.startswith((version, "backbone "))}
            self._new = {n: rows for n, rows in self._new.items() if n in self._known}
            self._version = version
        return f"{version} {name}"

    def _add(self, name: str, rows: Tensor, new: Tensor) -> None:
        if name not in self._known:
            self._known[name] = new.new_zeros(len(self), new.shape[1]), torch.zeros(len(self), dtype=torch.bool)
        embeddings, known = self._known[name]
        embeddings[rows] = new
        known[rows] = True


class CacheRows:
    """Some rows of a cache as test images."""

    def __init__(self, cache: EmbeddingCache, rows: Tensor):
        self.cache = cache
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def pixels(self, rows: Tensor) -> Tensor:
        """Return the pixels of some rows."""
        return self.cache.pixels(self.rows[rows])

    def embed(
        self, rows: Tensor, prompt: Prompt | None = None, key: str | None = None, backbone: Backbone | None = None
    ) -> Tensor:
        """Embed some rows; see `Images.embed`."""
        return self.cache.embed(self.rows[rows], prompt, key, backbone)

    def tokens(self, rows: Tensor, prompt: Tensor | None = None) -> Tensor:
        """Return the output tokens of some rows; they are not cached."""
        return self.cache.tokens(self.rows[rows], prompt)
