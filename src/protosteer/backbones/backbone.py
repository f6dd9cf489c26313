"""A ViT with the preprocessing of its weights, and the embeddings it computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from protosteer.backbones.batch_embed import embed_batches, group_for, one_each
from protosteer.backbones.build_vit import fingerprint as weights_fingerprint
from protosteer.backbones.build_vit import load_vit
from protosteer.backbones.checkpoint_io import read_checkpoint
from protosteer.backbones.hub import config_beside, fetch_weights, find_weights
from protosteer.backbones.prompting import Prompt, all_tokens, run_rest
from protosteer.backbones.registry import AUTO, full_name, known_weights, preprocessing
from protosteer.data.images import ArrayImages, ImageSet
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError, SettingsError, WeightsError
from protosteer.paper.vit import ViT
from protosteer.util.distributed import ProcessGroup

# Bytes of a layer's widest result, for which a batch is best on a CPU. Above 32 MiB, from where on glibc
# takes fresh memory from the system for every result, embedding was a quarter slower; much smaller batches
# have too little to do.
_CPU_WIDEST = 10 * 2**20
# A prompt of more would take gigabytes, image by image.
MOST_PROMPT_TOKENS = 4096
PRECISIONS = ("auto", "fp32", "bf16")


class Backbone:
    """A frozen ViT with the preprocessing of its weights; only a `trainable_copy` ever changes."""

    def __init__(
        self,
        name: str,
        vit: ViT,
        preprocessing: Preprocessing,
        fingerprint: str | None = None,
        source: Path | None = None,
        precision: str = "auto",
    ):
        if precision not in PRECISIONS:
            raise SettingsError(
                f"precision {precision!r} is unknown; choose one of {', '.join(PRECISIONS)}",
                code="bad-setting",
                name="precision",
            )
        self.name = name
        self.vit = vit
        self.dim, self.depth, self.image_size = vit.config.dim, vit.config.depth, vit.config.image_size
        self.preprocessing = preprocessing
        self._fingerprint = fingerprint or weights_fingerprint(vit.state_dict(), vit.config)
        self.source = source
        self._precision = precision
        self.trainable = False

    @classmethod
    def load(
        cls,
        name: str,
        weights: str | Path | None = None,
        image_size: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        crop: float | None = None,
        heads: int | None = None,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        fingerprint: str | None = None,
    ) -> Backbone:
        """`name`: a short one (`list_backbones`), or a model on timm's hub; beside `weights=FILE`, any name.

        `image_size`: without it, that of the file; of a short name, 224.
        `fingerprint`: that they must have; others are refused before anything is made of them.
        `precision`: fp32, bf16, or auto: bf16 on a CUDA device that has it, fp32 elsewhere.
        """
        if name == AUTO:
            raise WeightsError(
                "'auto' is no backbone but a choice by images: see choose_backbone(folder)",
                code="unknown-backbone",
                name=name,
            )
        full, known = full_name(name), known_weights(name)
        known = None if known and known.shipped else known  # what is ours says all of itself
        path = Path(weights) if weights is not None else find_weights(full) or fetch_weights(full)
        checkpoint = read_checkpoint(path, config_beside(path))
        size = known.config.image_size if known and image_size is None else image_size
        vit, found = load_vit(checkpoint, heads, size, fingerprint)
        if known:
            known.check(vit.config, path)
        asked = {"mean": mean, "std": std, "crop": crop}
        told = checkpoint.about | {key: value for key, value in asked.items() if value is not None}
        how = preprocessing(full, path, vit.config.image_size, told)
        return cls(full, vit, how, found, path, precision).to(device)

    def trainable_copy(self) -> Backbone:
        """An independent backbone whose ViT can be trained as a whole."""
        copied = copy.copy(self)
        copied.vit = copy.deepcopy(self.vit).requires_grad_()
        copied.source, copied.trainable = None, True
        return copied

    def frozen_copy(self) -> Backbone:
        """An independent backbone that stays as this one is now."""
        copied = self.trainable_copy()
        copied.vit.requires_grad_(False)
        copied._fingerprint, copied.trainable = self.fingerprint, False
        return copied

    @property
    def fingerprint(self) -> str:
        """sha256 of the weights; those of a trainable copy as they are now."""
        if not self.trainable:
            return self._fingerprint
        return weights_fingerprint(self.vit.state_dict(), self.vit.config)

    @property
    def parameters(self) -> int:
        """How many numbers the ViT has."""
        return sum(p.numel() for p in self.vit.parameters())

    @property
    def device(self) -> torch.device:
        return self.vit.cls_token.device

    def batch_size(self, most: int) -> int:
        """How many images to embed at once: at most so many, on a CPU no more than is good for its memory."""
        if self.device.type != "cpu":
            return most
        config = self.vit.config
        widest = 4 * (1 + config.registers + config.patches) * max(config.mlp_dim, 3 * config.dim)
        return max(1, min(most, _CPU_WIDEST // widest))

    def to(self, device: str | torch.device) -> Backbone:
        self.vit.to(device)
        return self

    def prompt_shape(self, length: int, deep: bool = True, from_layer: int = 1) -> tuple[int, int, int]:
        """[S, L, D] of a prompt with `length` tokens, deep ones in the layers from `from_layer` on."""
        if not 1 <= length <= MOST_PROMPT_TOKENS:
            raise SettingsError(
                f"prompt length is {length}; it must lie in 1 to {MOST_PROMPT_TOKENS}",
                code="bad-setting",
                name="prompt_length",
            )
        if from_layer > 1 and not (deep and from_layer < self.depth):
            raise SettingsError(
                f"prompt_from_layer = {from_layer}: {self.name} has {self.depth} layers, so a deep prompt "
                f"may begin in layers 1 to {max(1, self.depth - 1)}, a shallow one in layer 1",
                code="bad-setting",
                name="prompt_from_layer",
            )
        return (self.depth - from_layer + 1 if deep else 1, length, self.dim)

    @property
    def precision(self) -> str:
        """What the ViT computes in: "fp32", or "bf16", which rounds more; weights stay as they are."""
        if self._precision != "auto":
            return self._precision
        return "bf16" if self.device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"

    def embed(self, images: Tensor, prompt: Prompt | None = None) -> Tensor:
        """Normalised images [B, 3, H, W] -> [B, D]; `prompt` [S, L, D] for all, or [B, S, L, D], one each;
        or a `CustomPrompt`.

        A graph is kept only if the prompt wants its gradient, or the backbone is a trainable copy.
        """
        return self.rest(self.trunk(images, 0), 0, prompt)

    def tokens(self, images: Tensor, prompt: Tensor | None = None) -> Tensor:
        """As `embed`, but all tokens [B, N, D]; the L tokens of a prompt come out at 1 : 1 + L."""
        with self._computing(prompt):
            own = None if prompt is None else prompt.to(self.vit.cls_token)
            return all_tokens(self.vit, self._moved(images), own).to(self.vit.cls_token.dtype)

    def trunk(self, images: Tensor, layers: int) -> Tensor:
        """Normalised images -> tokens [B, T, D] after the first `layers` layers, before any prompt."""
        with self._computing():
            return self.vit.trunk(self._moved(images), layers)

    def rest(self, tokens: Tensor, layers: int, prompt: Prompt | None = None) -> Tensor:
        """As `embed`, from what `trunk` gave for the same number of layers."""
        with self._computing(prompt) as own:
            moved = tokens.to(self.vit.cls_token, non_blocking=True)
            return run_rest(self.vit, moved, layers, own).to(self.vit.cls_token.dtype)

    @contextmanager
    def _computing(self, prompt: Prompt | None = None) -> Iterator[Prompt | None]:
        """In the backbone's precision, with a graph only where `embed` says so; gives the prompt, moved."""
        wanted = self.trainable or (prompt is not None and prompt.requires_grad)
        with (
            torch.set_grad_enabled(wanted and torch.is_grad_enabled()),
            nullcontext() if self.precision == "fp32" else torch.autocast(self.device.type, torch.bfloat16),
        ):
            yield None if prompt is None else prompt.to(self.vit.cls_token)

    def _moved(self, images: Tensor) -> Tensor:
        if not images.is_floating_point():
            raise DataError(
                f"images must be normalised, not {images.dtype}; use embed_pixels for uint8", code="bad-dtype"
            )
        return images.to(self.vit.cls_token, non_blocking=True)

    def embed_pixels(self, pixels: Tensor, prompt: Prompt | None = None, batch_size: int = 64) -> Tensor:
        """As `embed_set`, for uint8 [N, 3, h, w]."""
        return self.embed_set(ArrayImages(pixels.cpu()), prompt, batch_size)

    @torch.no_grad()
    def trunk_pixels(self, pixels: Tensor, layers: int, batch_size: int = 64) -> Tensor:
        """As `trunk`, for uint8 [N, 3, h, w]; never with a graph."""
        batches = pixels.split(self.batch_size(batch_size))
        images = (self.preprocessing(some, self.device) for some in batches)
        return torch.cat([self.trunk(some, layers) for some in images])

    @torch.no_grad()
    def embed_set(
        self,
        images: ImageSet,
        prompt: Prompt | None = None,
        batch_size: int = 64,
        on_batch: Callable[[int], None] | None = None,
        rows: Sequence[int] | None = None,
        whole: bool = False,
    ) -> Tensor:
        """All images of a set, or some `rows`, by the evaluation transform -> float32 [N, D] on the CPU.

        whole: all tokens of each image instead. Never with a graph. `on_batch` is told how many are done.
        """
        order = range(len(images)) if rows is None else rows
        if one_each(prompt) and len(prompt) != len(order):
            raise DataError(
                f"{len(prompt)} prompts for {len(order)} images; give one each, or one [S, L, D]",
                code="prompt-count",
            )
        group = ProcessGroup() if self.trainable else group_for(prompt)
        batch_size = min(self.batch_size(batch_size), max(1, -(-len(order) // group.size)))
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        found, done = torch.empty(0, self.dim), 0
        for part in embed_batches(self, images, prompt, batches, whole, group):
            found = found if done else part.new_empty(len(order), *part.shape[1:])
            found[done : done + len(part)] = part
            done += len(part)
            if on_batch:
                on_batch(done)
        return found

    def transform(self, image: Image.Image) -> Tensor:
        """A PIL image -> normalised [3, H, W], by the evaluation preprocessing of the weights."""
        return self.preprocessing(self.preprocessing.to_canvas(image).unsqueeze(0))[0]

    def describe(self) -> dict[str, Any]:
        """What a manifest should say of the backbone; plain data."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "source": self.source.name if self.source else None,
            "image_size": self.image_size,
            "dim": self.dim,
            "depth": self.depth,
            "heads": self.vit.config.heads,
            "preprocessing": self.preprocessing.to_dict(),
            "pool": self.vit.config.pool,
            "parameters": self.parameters,
            **({} if self.precision == "fp32" else {"precision": self.precision}),
        }

    def __repr__(self) -> str:
        return f"Backbone({self.name!r}, dim={self.dim}, depth={self.depth}, image_size={self.image_size})"
