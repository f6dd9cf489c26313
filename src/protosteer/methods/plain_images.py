"""Test images as a method sees them, without a cache: see `base.Images`."""

from __future__ import annotations

from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.backbones.prompting import Prompt
from protosteer.data.images import ImageSet
from protosteer.methods.base import Method


class PlainImages:
    """Test images without a cache: every embedding is computed, by the method's backbone."""

    def __init__(self, method: Method, images: ImageSet):
        self.method = method
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def pixels(self, rows: Tensor) -> Tensor:
        """Return the pixels of some rows."""
        return self.images.pixels(rows.tolist())

    def embed(
        self, rows: Tensor, prompt: Prompt | None = None, key: str | None = None, backbone: Backbone | None = None
    ) -> Tensor:
        """Embed some rows; see `Images.embed`."""
        return self.compute(rows, prompt, backbone)

    def tokens(self, rows: Tensor, prompt: Tensor | None = None) -> Tensor:
        """Return the output tokens of some rows."""
        return self.compute(rows, prompt, whole=True)

    def compute(
        self, rows: Tensor, prompt: Prompt | None, backbone: Backbone | None = None, whole: bool = False
    ) -> Tensor:
        """Compute embeddings [len(rows), D], or all tokens if `whole`."""
        backbone, batch = backbone or self.method.backbone, self.method.embed_batch_size
        return backbone.embed_set(self.images, prompt, batch, rows=rows.tolist(), whole=whole)
