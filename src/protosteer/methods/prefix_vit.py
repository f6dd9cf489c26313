"""Prefix tuning: keys and values, given as they are, that layers attend to beside their own tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from protosteer.errors import DataError
from protosteer.paper.vit import ViT


@dataclass(frozen=True)
class Prefix:
    """Extra keys and values of the first layers; `Backbone.embed` accepts it in place of a prompt.

    layers: Of each layer, [B, 2, L, D] for B images, [1, 2, L, D] for all, or None.
    """

    layers: tuple[Tensor | None, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of layers with extra keys and values."""
        return [layer for layer in self.layers if layer is not None]

    @property
    def requires_grad(self) -> bool:
        """Whether any layer's tensor requires its gradient."""
        return any(layer.requires_grad for layer in self.tensors)

    @property
    def ndim(self) -> int:
        """As a prompt has it: 4 if every image has its own, 3 if all share one."""
        return 4 if len(self) > 1 else 3

    def __len__(self) -> int:
        return max(map(len, self.tensors), default=1)

    def __getitem__(self, rows: Any) -> Prefix:
        return Prefix(tuple(t[rows] if t is not None and len(t) > 1 else t for t in self.layers))

    def to(self, tensor: Tensor) -> Prefix:
        """Return the prefix on the device and in the type of a tensor."""
        return self.map(lambda layer: layer.to(tensor))

    def map(self, change: Callable[[Tensor], Tensor]) -> Prefix:
        """Return the prefix with every tensor changed by a function."""
        return Prefix(tuple(None if layer is None else change(layer) for layer in self.layers))

    def embed_tokens(self, vit: ViT, x: Tensor, done: int) -> Tensor:
        """Embed [B, D] from the tokens x [B, N, D] after `done` layers, as `ViT.embed_tokens` does with a prompt.

        Raises:
            DataError: The prefix does not fit the ViT, or enters layers that are done.
        """
        self._check(vit, len(x), done)
        layers = [*self.layers, *[None] * (vit.config.depth - len(self.layers))]
        for i in range(done, vit.config.depth):
            layer, extra = layers[i], None
            if layer is not None:  # [B or 1, 2, L, D] -> 2 x [B or 1, heads, L, D / heads]
                extra = layer.unflatten(3, (vit.config.heads, -1)).permute(1, 0, 3, 2, 4).unbind(0)
            x = vit.blocks[i](x, queries=vit.queries(i), extra_kv=extra)
        return vit.pool(x)

    def _check(self, vit: ViT, batch: int, done: int) -> None:
        depth, dim = vit.config.depth, vit.config.dim
        misfits = [t for t in self.tensors if t.ndim != 4 or t.shape[1] != 2 or t.shape[3] != dim]
        if misfits or len(self.layers) > depth or len(self) not in (1, batch):
            shapes = [None if t is None else list(t.shape) for t in self.layers]
            message = (
                f"a prefix of {batch} images has [{batch} or 1, 2, L, {dim}] for up to {depth} layers, not {shapes}"
            )
            raise DataError(message, code="bad-prefix-shape", shapes=shapes)
        if any(layer is not None for layer in self.layers[:done]):
            message = f"{done} layers are done, but the prefix enters before that; run the ViT from its first layer"
            raise DataError(message, code="prompt-enters-trunk", layers=done)
