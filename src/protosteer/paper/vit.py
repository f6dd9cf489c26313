"""The Vision Transformer and its prompted forward pass.

Parameter names are timm's, so that its checkpoints load as they are. What differs from a plain ViT
is where prompts enter:

- A *deep* prompt [S, L, D] gives layer i the extra tokens p_i and throws away what comes out at
  their places. Such a token is never a query that matters: it acts only as L more keys and values
  of layer i, and is computed as exactly that. One of fewer than all layers belongs to the last ones;
  the layers before them are a *trunk* that no prompt changes, so that one run of it serves them all.
- A *shallow* prompt [1, L, D] enters once, before layer 1, and is carried through as tokens.
- Prompts come in after the position embeddings and carry none.
- With class-token pooling only the class token leaves the last layer, so only it is computed there.
- Who needs what comes out at a prompt's places calls `tokens`, which computes all of the last layer.
- A `Prefix` is no token: its keys and values enter the attention of some layers as they are.

Parameters are frozen unless somebody asks for their gradients; dropout and stochastic depth do not exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.paper.prefix import Prefix, Prompt


@dataclass(frozen=True)
class ViTConfig:
    """The shape of a ViT; everything but `heads` can be read off a state dict."""

    image_size: int
    patch_size: int
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    registers: int = 0
    layer_scale: bool = False
    pool: str = "token"  # "token": class token, then norm; "mean": patch mean, then fc_norm
    position_for_class: bool = True  # False: position embeddings belong to patches alone
    qkv_bias: bool = True

    @property
    def grid(self) -> int:
        """Patches along one side."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        return self.grid**2

    @property
    def operations(self) -> int:
        """Multiplications with an addition for one image, all tokens of all layers, without a prompt."""
        dim, tokens = self.dim, 1 + self.registers + self.patches
        layer = tokens * (4 * dim**2 + 2 * dim * self.mlp_dim) + 2 * tokens**2 * dim
        return self.patches * 3 * self.patch_size**2 * dim + self.depth * layer


class Attention(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.qkv_bias)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, prefix: Tensor | None, queries: int | None) -> Tensor:
        """x [B, N, D]; the first `queries` are queries.

        prefix: further places, [B or 1, L, D], or their keys and values themselves, [B or 1, 2, L, D].
        """
        dim = x.shape[-1]
        if queries is None:
            q, k, v = self._heads(self.qkv(x), 3)
        else:
            (q,) = self._heads(self._project(x[:, :queries], 0, dim), 1)
            k, v = self._heads(self._project(x, dim, 3 * dim), 2)
        if prefix is not None:
            whole = prefix.ndim == 4
            joint = prefix.transpose(1, 2).flatten(2) if whole else self._project(prefix, dim, 3 * dim)
            pk, pv = (t.expand(len(x), -1, -1, -1) for t in self._heads(joint, 2))
            k, v = torch.cat([k, pk], dim=2), torch.cat([v, pv], dim=2)
        out = F.scaled_dot_product_attention(q, k, v)  # [B, heads, queries, D / heads]
        return self.proj(out.transpose(1, 2).flatten(2))

    def _project(self, x: Tensor, start: int, end: int) -> Tensor:
        """Some rows of the joint q, k, v projection."""
        bias = None if self.qkv.bias is None else self.qkv.bias[start:end]
        return F.linear(x, self.qkv.weight[start:end], bias)

    def _heads(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """[B, N, parts * D] -> `parts` tensors [B, heads, N, D / heads]."""
        return x.unflatten(2, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


class LayerScale(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """One Transformer layer; `prompt`: its extra tokens or their keys and values; `queries`: who goes on."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        dim = config.dim
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(config)
        self.ls1 = LayerScale(dim) if config.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, config.mlp_dim)
        self.ls2 = LayerScale(dim) if config.layer_scale else nn.Identity()

    def forward(self, x: Tensor, prompt: Tensor | None = None, queries: int | None = None) -> Tensor:
        prefix = prompt if prompt is None or prompt.ndim == 4 else self.norm1(prompt)
        attended = self.ls1(self.attn(self.norm1(x), prefix, queries))
        x = x[:, :queries] + attended
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        size = config.patch_size
        self.proj = nn.Conv2d(3, config.dim, kernel_size=size, stride=size)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)  # [B, patches, D]


class ViT(nn.Module):
    """f_theta of the paper: images [B, 3, H, W] (and a prompt) -> one D-vector per image."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        dim = config.dim
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        if config.registers:
            self.reg_token = nn.Parameter(torch.zeros(1, config.registers, dim))
        positions = config.patches + config.position_for_class
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, dim))
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        if config.pool == "token":
            self.norm = nn.LayerNorm(dim, eps=1e-6)
        else:
            self.fc_norm = nn.LayerNorm(dim, eps=1e-6)
        self.requires_grad_(False)

    def forward(self, images: Tensor, prompt: Prompt | None = None) -> Tensor:
        """prompt: [S, L, D] for all images or [B, S, L, D], one each; of the last S layers, or 1: shallow.

        Or a `Prefix`.
        """
        return self.rest(self.trunk(images, 0), 0, prompt)

    def trunk(self, images: Tensor, layers: int) -> Tensor:
        """Tokens [B, N, D] after the first `layers` layers, without a prompt; not the last layer."""
        x = self.embed_patches(images)
        for block in self.blocks[:layers]:
            x = block(x)
        return x

    def rest(self, x: Tensor, done: int, prompt: Prompt | None = None) -> Tensor:
        """What `forward` gives, from the tokens that `trunk` gave after `done` layers."""
        x, last = self._before_last_layer(x, done, prompt)
        return self.pool(self.blocks[-1](x, last, 1 if self.config.pool == "token" else None))

    def tokens(self, images: Tensor, prompt: Prompt | None = None) -> Tensor:
        """All tokens [B, N, D] after the last layer and the norm: class, prompt (L), registers, patches."""
        x, last = self._before_last_layer(self.trunk(images, 0), 0, prompt)
        x = (
            self.blocks[-1](x, last)
            if last is None or last.ndim == 4
            else self.blocks[-1](_with_prompt(x, last))
        )
        return self.norm(x) if self.config.pool == "token" else self.fc_norm(x)

    def _before_last_layer(self, x: Tensor, done: int, prompt: Prompt | None) -> tuple[Tensor, Tensor | None]:
        """The tokens that enter the last layer, and what a prompt has for it: see `Attention.forward`."""
        depth = self.config.depth
        layers: list[Tensor | None] = [None] * depth
        if isinstance(prompt, Prefix):
            layers[: len(prompt.layers)] = self._check_prefix(prompt, len(x), done).layers
        elif prompt is not None:
            prompt = self._check_prompt(prompt, len(x), done)  # [B or 1, S, L, D]
            if prompt.shape[1] == 1:
                x = _with_prompt(x, prompt[:, 0])
            else:
                layers[depth - prompt.shape[1] :] = prompt.unbind(1)
        for i in range(done, depth - 1):
            x = self.blocks[i](x, layers[i])
        return x, layers[-1]

    def embed_patches(self, images: Tensor) -> Tensor:
        """Tokens [B, class + registers + patches, D] that enter layer 1."""
        size = self.config.image_size
        if images.ndim != 4 or tuple(images.shape[1:]) != (3, size, size):
            raise ValueError(f"images must be [B, 3, {size}, {size}], not {list(images.shape)}")
        patches = self.patch_embed(images)
        class_token = self.cls_token.expand(len(images), -1, -1)
        if self.config.position_for_class:
            x = torch.cat([class_token, patches], dim=1) + self.pos_embed
        else:
            x = torch.cat([class_token, patches + self.pos_embed], dim=1)
        if self.config.registers:
            registers = self.reg_token.expand(len(images), -1, -1)
            x = torch.cat([x[:, :1], registers, x[:, 1:]], dim=1)
        return x

    def pool(self, x: Tensor) -> Tensor:
        """Patches are always the last tokens: class token, prompt and registers stand before them."""
        if self.config.pool == "token":
            return self.norm(x[:, 0])
        return self.fc_norm(x[:, -self.config.patches :].mean(dim=1))

    def _check_prefix(self, prefix: Prefix, batch: int, done: int) -> Prefix:
        depth, dim = self.config.depth, self.config.dim
        wrong = [t for t in prefix.present if t.ndim != 4 or t.shape[1] != 2 or t.shape[3] != dim]
        if wrong or len(prefix.layers) > depth or len(prefix) not in (1, batch):
            shapes = [None if t is None else list(t.shape) for t in prefix.layers]
            raise ValueError(
                f"a prefix of {batch} images has [{batch} or 1, 2, L, {dim}] for up to {depth} layers, not {shapes}"
            )
        if any(layer is not None for layer in prefix.layers[:done]):
            raise ValueError(f"{done} layers are done, but the prefix enters before that")
        return prefix

    def _check_prompt(self, prompt: Tensor, batch: int, done: int) -> Tensor:
        depth, dim = self.config.depth, self.config.dim
        full = prompt if prompt.ndim == 4 else prompt.unsqueeze(0)
        if full.ndim != 4 or not 1 <= full.shape[1] <= depth or full.shape[3] != dim or not full.shape[2]:
            raise ValueError(
                f"prompt must be [S, L, {dim}] or [B, S, L, {dim}] with S up to {depth} (deep) "
                f"or 1 (shallow), not {list(prompt.shape)}"
            )
        if done > shared_layers(full, depth):
            raise ValueError(
                f"{done} layers are done, but the prompt {list(prompt.shape)} enters before that"
            )
        if prompt.ndim == 4 and len(prompt) != batch:
            raise ValueError(
                f"{len(prompt)} prompts for {batch} images; give one per image, or one [S, L, D]"
            )
        return full


def _with_prompt(x: Tensor, prompt: Tensor) -> Tensor:
    """Tokens with those of a prompt [B or 1, L, D] after the class token."""
    return torch.cat([x[:, :1], prompt.expand(len(x), -1, -1), x[:, 1:]], dim=1)


def shared_layers(prompt: Tensor, depth: int) -> int:
    """How many layers a prompt [..., S, L, D] leaves as they are without it."""
    layers = prompt.shape[-3]
    return 0 if layers == 1 else depth - layers


def resample_positions(pos_embed: Tensor, grid: int, has_class: bool) -> Tensor:
    """Position embeddings [1, (1 +) n², D] for `grid` x `grid` patches, by antialiased bicubic resizing."""
    prefix, patches = pos_embed[:, : int(has_class)], pos_embed[:, int(has_class) :]
    old = math.isqrt(patches.shape[1])
    if old == grid:
        return pos_embed
    square = patches.float().reshape(1, old, old, -1).permute(0, 3, 1, 2)
    square = F.interpolate(square, size=(grid, grid), mode="bicubic", antialias=True)
    patches = square.permute(0, 2, 3, 1).flatten(1, 2).to(pos_embed.dtype)
    return torch.cat([prefix, patches], dim=1)
