"""The Vision Transformer f_theta and its prompted forward pass (Sec. 3.3, Eq. 3).

Parameter names are timm's, so that its checkpoints load as they are. Prompts enter after the position embeddings:

- A *deep* prompt [S, L, D] gives layer i the extra tokens p_i and discards their outputs. So p_i needs no queries: it is
  computed as L more keys and values of layer i. A prompt of S < depth layers enters the last S layers. The layers
  before them are the *trunk*: no prompt enters it, so that its output is computed once for all prompts.
- A *shallow* prompt [1, L, D] enters once, before layer 1, and is carried through as tokens.

With class-token pooling only the class token leaves the last layer, so only it is computed there. There is no dropout
and no stochastic depth. Parameters are frozen unless a caller sets `requires_grad`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.errors import DataError

KeysValues = tuple[Tensor, Tensor]  # [B or 1, heads, L, D / heads] each


@dataclass(frozen=True)
class ViTConfig:
    """The shape of a ViT; everything but `heads` can be read off a state dict."""

    image_size: int
    patch_size: int
    dim: int  # D
    depth: int
    heads: int
    mlp_dim: int
    registers: int = 0
    layer_scale: bool = False
    pool: str = "token"  # "token": class token, then norm; "mean": patch mean, then fc_norm
    position_for_class: bool = True  # False: only patches have position embeddings
    qkv_bias: bool = True

    @property
    def grid(self) -> int:
        """Number of patches along one side."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        return self.grid**2


class Attention(nn.Module):
    """Multi-head self-attention over the tokens and, optionally, extra keys and values."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.qkv_bias)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, extra_kv: KeysValues | None, queries: int | None) -> Tensor:
        """Map tokens x [B, N, D] to [B, queries, D]: outputs of the first `queries` tokens (None: all N)."""
        if queries is None or not self._is_sliceable():
            q, k, v = self._split_heads(self.qkv(x), 3)  # [B, heads, N, D / heads] each
            q = q[:, :, :queries]
        else:
            (q,) = self._split_heads(self._project(x[:, :queries], 0, x.shape[-1]), 1)
            k, v = self.keys_values(x)
        if extra_kv is not None:
            prompt_k, prompt_v = (t.expand(len(x), -1, -1, -1) for t in extra_kv)  # [B, heads, L, D / heads] each
            k, v = torch.cat([k, prompt_k], dim=2), torch.cat([v, prompt_v], dim=2)
        out = attend(q, k, v)  # [B, heads, queries, D / heads]
        return self.proj(out.transpose(1, 2).flatten(2))  # [B, queries, D]

    def keys_values(self, x: Tensor) -> KeysValues:
        """Project tokens x [B, N, D] to their keys and values, [B, heads, N, D / heads] each."""
        k, v = self._split_heads(self._project(x, x.shape[-1], 3 * x.shape[-1]), 2)
        return k, v

    def _project(self, x: Tensor, start: int, end: int) -> Tensor:
        """Apply rows `start` to `end` of the joint q, k, v projection: [B, N, D] -> [B, N, end - start]."""
        if not self._is_sliceable():
            return self.qkv(x)[..., start:end]
        bias = None if self.qkv.bias is None else self.qkv.bias[start:end]
        return F.linear(x, self.qkv.weight[start:end], bias)

    def _is_sliceable(self) -> bool:
        """Tell whether `qkv` is a plain linear layer, so that rows of its weight can be used alone; with LoRA it is not."""
        return type(self.qkv) is nn.Linear and not is_changed(self.qkv)

    def _split_heads(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Split [B, N, parts * D] into `parts` tensors [B, heads, N, D / heads]."""
        return x.unflatten(2, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def is_changed(module: nn.Module) -> bool:
    """Tell whether a module has a hook or a replaced `forward`, so that it may compute something else than its class."""
    attributes = vars(module)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in attributes or any(attributes[name] for name in hooks)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v of queries, keys and values [B, heads, N, d].

    On a CPU, torch's fused kernel computes bf16 no faster than fp32. Two matrix products take half its time, and even
    less in the backward pass (docs/explanation/performance.md).
    """
    if q.dtype != torch.bfloat16 or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v)
    return ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).softmax(dim=-1) @ v


class LayerScale(nn.Module):
    """One learned factor per dimension."""

    def __init__(self, dim: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Scale tokens [B, N, D]."""
        return x * self.gamma


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [B, N, D] to [B, N, D]."""
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """One Transformer layer: attention, then an MLP."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        dim = config.dim
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(config)
        self.ls1 = LayerScale(dim) if config.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, config.mlp_dim)
        self.ls2 = LayerScale(dim) if config.layer_scale else nn.Identity()

    def forward(
        self,
        x: Tensor,
        prompt: Tensor | None = None,
        queries: int | None = None,
        extra_kv: KeysValues | None = None,
    ) -> Tensor:
        """Map tokens x [B, N, D] to [B, queries, D].

        Args:
            x: The tokens.
            prompt: This layer's prompt tokens [B or 1, L, D].
            queries: How many first tokens to compute; None: all N.
            extra_kv: Keys and values to attend to, [B or 1, heads, L, D / heads] each; instead of `prompt`.
        """
        if prompt is not None:
            extra_kv = self.attn.keys_values(self.norm1(prompt))
        return self.feed_forward(x[:, :queries] + self.ls1(self.attn(self.norm1(x), extra_kv, queries)))

    def feed_forward(self, x: Tensor) -> Tensor:
        """Apply the second half of the layer, the MLP, to tokens [B, N, D]."""
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """The linear map from patches to tokens, as a convolution."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.proj = nn.Conv2d(3, config.dim, kernel_size=config.patch_size, stride=config.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to tokens [B, patches, D]."""
        return self.proj(images).flatten(2).transpose(1, 2)


class ViT(nn.Module):
    """f_theta: maps images [B, 3, H, W], with or without a prompt, to embeddings [B, D]."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        dim = config.dim
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        if config.registers:
            self.reg_token = nn.Parameter(torch.zeros(1, config.registers, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, config.patches + config.position_for_class, dim))
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        if config.pool == "token":
            self.norm = nn.LayerNorm(dim, eps=1e-6)
        else:
            self.fc_norm = nn.LayerNorm(dim, eps=1e-6)
        self.requires_grad_(False)

    def forward(self, images: Tensor, prompt: Tensor | None = None) -> Tensor:
        """Embed normalised images [B, 3, H, W] as [B, D], under a prompt or none: see `embed_tokens`."""
        return self.embed_tokens(self.trunk(images, 0), 0, prompt)

    def trunk(self, images: Tensor, layers: int) -> Tensor:
        """Compute the tokens [B, N, D] after the first `layers` layers, without a prompt, from images [B, 3, H, W]."""
        x = self.embed_patches(images)
        for block in self.blocks[:layers]:
            x = block(x)
        return x

    def embed_tokens(self, x: Tensor, layers: int, prompt: Tensor | None = None) -> Tensor:
        """Run the layers after the first `layers` ones on tokens x [B, N, D]: embeddings [B, D].

        Args:
            x: The output of `trunk`.
            layers: The number of layers that `trunk` ran.
            prompt: [S, L, D] for all images, or [B, S, L, D] with one per image. S = 1: shallow; else deep, of the last S
                layers.

        Raises:
            DataError: The prompt does not fit the ViT, or enters one of the first `layers` layers.
        """
        x, prompts = self.enter_prompt(x, layers, prompt)
        for i in range(layers, self.config.depth):
            x = self.blocks[i](x, prompts[i], self.queries(i))
        return self.pool(x)

    def embed_patches(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to the tokens [B, N, D] that enter layer 1: class token, registers, patches."""
        size = self.config.image_size
        if images.ndim != 4 or tuple(images.shape[1:]) != (3, size, size):
            message = f"images must be preprocessed to [B, 3, {size}, {size}], not {list(images.shape)}"
            raise DataError(message, code="bad-image-shape", size=size)
        patches = self.patch_embed(images)  # [B, patches, D]
        class_token = self.cls_token.expand(len(images), -1, -1)  # [B, 1, D]
        if self.config.position_for_class:
            x = torch.cat([class_token, patches], dim=1) + self.pos_embed
        else:
            x = torch.cat([class_token, patches + self.pos_embed], dim=1)
        return insert_tokens(x, self.reg_token) if self.config.registers else x

    def enter_prompt(self, x: Tensor, layers: int, prompt: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """Return the tokens after `layers` layers, a shallow prompt inserted, and each layer's prompt [B or 1, L, D] or None.

        A shallow prompt is part of the tokens from here on; a deep one enters layer by layer.
        """
        depth = self.config.depth
        if prompt is None:
            return x, [None] * depth
        prompt = self._check_prompt(prompt, len(x), layers)  # [B or 1, S, L, D]
        if prompt.shape[1] == 1:
            return insert_tokens(x, prompt[:, 0]), [None] * depth
        return x, [*[None] * (depth - prompt.shape[1]), *prompt.unbind(1)]

    def queries(self, layer: int) -> int | None:
        """Return how many first tokens a layer must compute: 1 in the last layer if the class token is pooled; None: all."""
        return 1 if layer == self.config.depth - 1 and self.config.pool == "token" else None

    def pool(self, x: Tensor) -> Tensor:
        """Pool the last layer's tokens [B, N, D] to embeddings [B, D]; class token, prompt and registers precede patches."""
        if self.config.pool == "token":
            return self.norm(x[:, 0])
        return self.fc_norm(x[:, -self.config.patches :].mean(dim=1))

    def _check_prompt(self, prompt: Tensor, batch: int, layers: int) -> Tensor:
        """Check that a prompt fits the ViT and enters none of the first `layers` layers; return it as [B or 1, S, L, D]."""
        depth, dim, shape = self.config.depth, self.config.dim, list(prompt.shape)
        batched = prompt if prompt.ndim == 4 else prompt.unsqueeze(0)
        fits = batched.ndim == 4 and 1 <= batched.shape[1] <= depth and batched.shape[2] and batched.shape[3] == dim
        if not fits or (prompt.ndim == 4 and len(prompt) != batch):
            message = f"prompt must be [S, L, {dim}] or [{batch}, S, L, {dim}], S at most {depth}, not {shape}"
            raise DataError(message, code="bad-prompt-shape", shape=shape)
        if layers > shared_layers(batched, depth):
            message = f"prompt {shape} enters before layer {layers + 1}; run the ViT from an earlier layer"
            raise DataError(message, code="prompt-enters-trunk", layers=layers)
        return batched


def insert_tokens(x: Tensor, tokens: Tensor) -> Tensor:
    """Insert tokens [B or 1, L, D] after the class token of x [B, N, D]."""
    return torch.cat([x[:, :1], tokens.expand(len(x), -1, -1), x[:, 1:]], dim=1)


def shared_layers(prompt: Tensor, depth: int) -> int:
    """Return how many first layers of `depth` a prompt [..., S, L, D] does not enter: none if it is shallow."""
    layers = prompt.shape[-3]
    return 0 if layers == 1 else depth - layers
