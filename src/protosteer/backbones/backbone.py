"""A frozen ViT with the preprocessing of its weights, which computes embeddings."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from protosteer.backbones.build_vit import fingerprint as weights_fingerprint
from protosteer.backbones.build_vit import load_vit
from protosteer.backbones.checkpoint_io import read_checkpoint
from protosteer.backbones.hub import config_beside, fetch_weights, find_weights
from protosteer.backbones.layer_features import feature_spaces, layer_features, max_trunk
from protosteer.backbones.precision import AUTO_PRECISION, FP32, auto_precision, check_precision
from protosteer.backbones.prompting import Prompt, all_tokens, run_rest
from protosteer.backbones.registry import AUTO, EARLIER, full_name, known_weights, preprocessing
from protosteer.backbones.row_sharing import embed_batches, group_for, one_each, share_rows
from protosteer.data.images import ArrayImages, ImageSet
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError, SettingsError, WeightsError
from protosteer.paper.vit import ViT
from protosteer.util.distributed import ProcessGroup

# Bytes of a layer's widest activation at which a batch is fastest on a CPU. Above 32 MiB, where glibc requests new
# memory for every activation, embedding was a quarter slower; much smaller batches have too little to do.
_CPU_ACTIVATION = 10 * 2**20
MAX_PROMPT_TOKENS = 4096  # more would take gigabytes per image


class Backbone:
    """A frozen ViT with the preprocessing of its weights; only a `trainable_copy` ever changes.

    Examples:
        >>> from PIL import Image
        >>> backbone = Backbone.load("nano")
        >>> image = backbone.transform(Image.new("RGB", (40, 40)))  # [3, H, W]
        >>> backbone.embed(image[None]).shape == (1, backbone.dim)
        True
    """

    def __init__(
        self,
        name: str,
        vit: ViT,
        preprocessing: Preprocessing,
        fingerprint: str | None = None,
        source: Path | None = None,
        precision: str = AUTO_PRECISION,
    ):
        self.name = name
        self.vit = vit
        self.dim, self.depth, self.image_size = vit.config.dim, vit.config.depth, vit.config.image_size
        self.preprocessing = preprocessing
        self._fingerprint = fingerprint or weights_fingerprint(vit.state_dict(), vit.config)
        self.source = source
        self._precision = check_precision(precision)
        self.trainable = False
        self.layers = "last"

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
        precision: str = AUTO_PRECISION,
        fingerprint: str | None = None,
    ) -> Backbone:
        """Load a backbone; weights that are not on this disk are downloaded.

        Args:
            name: A short name (`list_backbones`) or a model on timm's hub; with `weights=`, any name.
            weights: A weights file.
            image_size: In pixels; the file's by default, 224 for a short name.
            mean: Of each channel, if neither the file nor the name implies it.
            std: Of each channel, likewise.
            crop: Share of the resized image that the centre crop keeps, likewise.
            heads: Number of attention heads, likewise.
            device: Where to compute.
            precision: "fp32", "bf16", or "auto": bf16 if the processor or GPU has instructions for it, else fp32.
            fingerprint: The sha256 that the weights must have.

        Raises:
            WeightsError: The weights are unknown, missing, damaged or of another architecture.
        """
        if name == AUTO:
            message = "'auto' is no backbone but a choice by images: see choose_backbone(folder)"
            raise WeightsError(message, code="unknown-backbone", name=name)
        complete_name, info = full_name(name), known_weights(name)
        if info and info.shipped:  # its file holds all metadata
            info, complete_name = None, EARLIER.get(fingerprint or "", complete_name)
        path = Path(weights) if weights is not None else find_weights(complete_name) or fetch_weights(complete_name)
        checkpoint = read_checkpoint(path, config_beside(path))
        size = info.config.image_size if info and image_size is None else image_size
        vit, actual = load_vit(checkpoint, heads, size, fingerprint)
        if info:
            info.check(vit.config, path)
        arguments = {"mean": mean, "std": std, "crop": crop}
        metadata = checkpoint.about | {key: value for key, value in arguments.items() if value is not None}
        transform = preprocessing(complete_name, path, vit.config.image_size, metadata)
        return cls(complete_name, vit, transform, actual, path, precision).to(device)

    def trainable_copy(self) -> Backbone:
        """Return an independent backbone whose ViT can be trained."""
        return self._with(vit=copy.deepcopy(self.vit).requires_grad_(), source=None, trainable=True)

    def frozen_copy(self) -> Backbone:
        """Return an independent, frozen backbone with the current weights."""
        vit = copy.deepcopy(self.vit).requires_grad_(False)
        return self._with(vit=vit, source=None, trainable=False, _fingerprint=self.fingerprint)

    def _with(self, **attributes: Any) -> Backbone:
        """Return a backbone that has these attributes, and shares the others."""
        backbone = copy.copy(self)
        vars(backbone).update(attributes)
        return backbone

    def reading(self, layers: str) -> Backbone:
        """Return this backbone with embeddings of the "last" layer, or of "several" side by side; weights are shared.

        Those of several layers are [B, S * D]; the first D numbers are the embedding of the last layer.
        """
        return self if layers == self.layers else self._with(layers=layers)

    @property
    def width(self) -> int:
        """Return the width of an embedding: D, or S * D of several layers."""
        return self.dim if self.layers == "last" else self.dim * len(feature_spaces(self.vit.config))

    @property
    def max_trunk(self) -> int:
        """Return how many first layers `trunk` may compute separately from an embedding."""
        return self.depth if self.layers == "last" else max_trunk(self.vit.config)

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of the weights; for a trainable copy, of its current ones."""
        if not self.trainable:
            return self._fingerprint
        return weights_fingerprint(self.vit.state_dict(), self.vit.config)

    @functools.cached_property
    def parameters(self) -> int:
        """Return the number of parameters."""
        return sum(p.numel() for p in self.vit.parameters())

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.vit.cls_token.device

    def batch_size(self, limit: int) -> int:
        """Return how many images to embed at once: at most `most`, on a CPU fewer if activations are large."""
        if self.device.type != "cpu":
            return limit
        config = self.vit.config
        widest = 4 * (1 + config.registers + config.patches) * max(config.mlp_dim, 3 * config.dim)
        return max(1, min(limit, _CPU_ACTIVATION // widest))

    def to(self, device: str | torch.device) -> Backbone:
        """Move the weights to a device, and return this backbone."""
        self.vit.to(device)
        return self

    def prompt_shape(self, length: int, deep: bool = True, from_layer: int = 1) -> tuple[int, int, int]:
        """Return the shape [S, L, D] of a prompt.

        Args:
            length: Tokens per layer.
            deep: Give every layer tokens of its own, else the first one alone.
            from_layer: First layer with tokens, counted from 1.

        Raises:
            SettingsError: The ViT has no such layers, or the prompt is too long.
        """
        if not 1 <= length <= MAX_PROMPT_TOKENS:
            message = f"prompt length is {length}; it must lie in 1 to {MAX_PROMPT_TOKENS}"
            raise SettingsError(message, code="bad-setting", name="prompt_length")
        if from_layer > 1 and not (deep and from_layer < self.depth):
            message = (
                f"prompt_from_layer = {from_layer}: {self.name} has {self.depth} layers, so a deep prompt "
                f"may begin in layers 1 to {max(1, self.depth - 1)}, a shallow one in layer 1"
            )
            raise SettingsError(message, code="bad-setting", name="prompt_from_layer")
        return (self.depth - from_layer + 1 if deep else 1, length, self.dim)

    @property
    def precision(self) -> str:
        """Return the precision of computations, "fp32" or "bf16"; weights and embeddings are fp32 in both."""
        return auto_precision(self.device) if self._precision == AUTO_PRECISION else self._precision

    def in_precision(self, precision: str) -> Backbone:
        """Return a backbone that shares these weights and computes in another precision: "fp32", "bf16" or "auto".

        Raises:
            SettingsError: There is no such precision.
        """
        return self if precision == self._precision else self._with(_precision=check_precision(precision))

    def with_auto_as_fp32(self) -> Backbone:
        """Return this backbone in fp32 if its precision is "auto"; else return it unchanged."""
        is_fixed = self._precision != AUTO_PRECISION or self.precision == FP32
        return self if is_fixed else self.in_precision(FP32)

    def embed(self, images: Tensor, prompt: Prompt | None = None) -> Tensor:
        """Embed normalised images [B, 3, H, W] to [B, D].

        Gradients flow only if the prompt requires them, or the backbone is a trainable copy.

        Args:
            images: Normalised, see `transform`.
            prompt: [S, L, D] for all images, [B, S, L, D] with one per image, or a `CustomPrompt`.

        Raises:
            DataError: The images are not floats.
        """
        return share_rows(
            self.vit, images, prompt, lambda rank_images, p: self.embed_tokens(self.trunk(rank_images, 0), 0, p)
        )

    def tokens(self, images: Tensor, prompt: Tensor | None = None) -> Tensor:
        """Embed images as `embed` does, but return all tokens [B, N, D]; a prompt's L tokens are at 1 : 1 + L."""
        return share_rows(self.vit, images, prompt, self._tokens)

    def _tokens(self, images: Tensor, prompt: Tensor | None) -> Tensor:
        with self._computing(prompt):
            device_prompt = None if prompt is None else prompt.to(self.vit.cls_token)
            return all_tokens(self.vit, self._to_device(images), device_prompt).to(self.vit.cls_token.dtype)

    def trunk(self, images: Tensor, layers: int) -> Tensor:
        """Compute tokens [B, T, D] of normalised images after the first `layers` layers, before any prompt."""
        with self._computing():
            return self.vit.trunk(self._to_device(images), layers)

    def embed_tokens(self, tokens: Tensor, layers: int, prompt: Prompt | None = None) -> Tensor:
        """Finish `embed` from the tokens that `trunk` returned for the same number of layers."""
        with self._computing(prompt) as device_prompt:
            device_tokens = tokens.to(self.vit.cls_token, non_blocking=True)
            if self.layers == "last":
                return run_rest(self.vit, device_tokens, layers, device_prompt).to(self.vit.cls_token.dtype)
            assert device_prompt is None or isinstance(device_prompt, Tensor)
            return layer_features(self.vit, device_tokens, layers, device_prompt).to(self.vit.cls_token.dtype)

    @contextmanager
    def _computing(self, prompt: Prompt | None = None) -> Iterator[Prompt | None]:
        """Set precision and gradients as `embed` documents; yield the prompt on the right device."""
        gradients = self.trainable or (prompt is not None and prompt.requires_grad)
        with (
            torch.set_grad_enabled(gradients and torch.is_grad_enabled()),
            nullcontext() if self.precision == FP32 else torch.autocast(self.device.type, torch.bfloat16),
        ):
            yield None if prompt is None else prompt.to(self.vit.cls_token)

    def _to_device(self, images: Tensor) -> Tensor:
        if not images.is_floating_point():
            raise DataError(
                f"images must be normalised, not {images.dtype}; use embed_pixels for uint8", code="bad-dtype"
            )
        return images.to(self.vit.cls_token, non_blocking=True)

    def embed_pixels(self, pixels: Tensor, prompt: Prompt | None = None, batch_size: int = 64) -> Tensor:
        """Embed pixels uint8 [N, 3, h, w] as `embed_set` does."""
        return self.embed_set(ArrayImages(pixels.cpu()), prompt, batch_size)

    @torch.no_grad()
    def trunk_pixels(self, pixels: Tensor, layers: int, batch_size: int = 64) -> Tensor:
        """Compute `trunk` for uint8 [N, 3, h, w], without gradients."""
        batches = pixels.split(self.batch_size(batch_size))
        images = (self.preprocessing(batch, self.device) for batch in batches)
        return torch.cat([self.trunk(batch, layers) for batch in images])

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
        """Embed images with the evaluation preprocessing, without gradients.

        Args:
            images: The images.
            prompt: As in `embed`.
            batch_size: Images per forward pass, at most.
            on_batch: Called with the number of images done.
            rows: Row numbers of the images; None for all.
            whole: Return all tokens instead.

        Returns:
            float32 [N, D] on the CPU, [N, S * D] of several layers, or [N, T, D] if `whole`.

        Raises:
            DataError: There is neither one prompt nor one per image.
        """
        order = range(len(images)) if rows is None else rows
        if one_each(prompt) and len(prompt) != len(order):
            message = f"{len(prompt)} prompts for {len(order)} images; give one each, or one [S, L, D]"
            raise DataError(message, code="prompt-count")
        group = ProcessGroup() if self.trainable else group_for(prompt)
        batch_size = min(self.batch_size(batch_size), max(1, -(-len(order) // group.size)))
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        embeddings, count = torch.empty(0, self.width), 0
        for part in embed_batches(self, images, prompt, batches, whole, group):
            embeddings = embeddings if count else part.new_empty(len(order), *part.shape[1:])
            embeddings[count : count + len(part)] = part
            count += len(part)
            if on_batch:
                on_batch(count)
        return embeddings

    def transform(self, image: Image.Image) -> Tensor:
        """Preprocess a PIL image as for evaluation: normalised pixels [3, H, W]."""
        return self.preprocessing(self.preprocessing.to_canvas(image).unsqueeze(0))[0]

    def describe(self) -> dict[str, Any]:
        """Describe the backbone as plain data for a manifest."""
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
            **({} if self.precision == FP32 else {"precision": self.precision}),
        }

    def __repr__(self) -> str:
        return f"Backbone({self.name!r}, dim={self.dim}, depth={self.depth}, image_size={self.image_size})"
