"""Prefix tuning against attention written out, and what a prefix has in common with a prompt."""

import pytest
import torch
import torch.nn.functional as F

from expect import expect_error
from protosteer.errors import DataError
from protosteer.methods.prefix_vit import Prefix
from protosteer.methods.testing import toy_backbone

B, L, D = 3, 4, 24


def images() -> torch.Tensor:
    return torch.randn(B, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def numbers(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def written_out(vit, pixels, layers):
    """The whole network, one image and one head at a time."""
    out = []
    for b, x in enumerate(vit.embed_patches(pixels)):
        for block, prefix in zip(vit.blocks, layers, strict=True):
            q, k, v = block.attn.qkv(block.norm1(x)).chunk(3, dim=1)
            if prefix is not None:
                own = prefix[b if len(prefix) > 1 else 0]
                k, v = torch.cat([k, own[0]]), torch.cat([v, own[1]])
            heads = []
            for h in range(block.attn.heads):
                part = slice(h * 8, h * 8 + 8)
                weights = (q[:, part] @ k[:, part].T / 8**0.5).softmax(dim=1)
                heads.append(weights @ v[:, part])
            x = x + block.attn.proj(torch.cat(heads, dim=1))
            x = x + block.mlp(block.norm2(x))
        out.append(vit.norm(x))
    return torch.stack(out)


@pytest.mark.parametrize("layers", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("each", [False, True])
def test_a_prefix_is_keys_and_values_in_the_attention_of_its_layers(layers, each):
    backbone = toy_backbone()
    own = [numbers(B if each else 1, 2, L, D, seed=i) if i in layers else None for i in range(2)]
    expected = written_out(backbone.vit, images(), own)
    prefix = Prefix(tuple(own[: max(layers) + 1]))
    torch.testing.assert_close(backbone.embed(images(), prefix), expected[:, 0], atol=2e-5, rtol=1e-5)


def test_a_prefix_of_some_images_is_theirs():
    shared, own = numbers(1, 2, L, D), numbers(B, 2, L, D, seed=3)
    prefix = Prefix((shared, own))
    backbone = toy_backbone()
    some = backbone.embed(images()[1:], prefix[1:])
    torch.testing.assert_close(some, backbone.embed(images(), prefix)[1:], atol=1e-5, rtol=1e-5)
    assert (prefix.ndim, len(prefix), Prefix((shared, None)).ndim) == (4, B, 3)


def test_gradients_reach_a_prefix_through_a_frozen_backbone():
    own = numbers(1, 2, L, D).requires_grad_()
    toy_backbone().embed(images(), Prefix((own,))).sum().backward()
    assert own.grad is not None and bool((own.grad != 0).all())
    assert not toy_backbone().embed(images(), Prefix((own.detach(),))).requires_grad


def test_a_prefix_that_projected_tokens_give_is_a_deep_prompt():
    """A prompt's tokens, taken through a layer's norm and projection, are that layer's keys and values."""
    backbone = toy_backbone()
    prompt = numbers(2, L, D)
    layers = []
    for block, tokens in zip(backbone.vit.blocks, prompt, strict=True):
        _, k, v = block.attn.qkv(block.norm1(tokens)).chunk(3, dim=1)
        layers.append(torch.stack([k, v])[None])
    expected = backbone.embed(images(), prompt)
    torch.testing.assert_close(backbone.embed(images(), Prefix(tuple(layers))), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 2, L, D), (1, 3, L, D), (1, 2, L, D + 1)])
def test_a_prefix_of_another_shape_is_rejected(shape):
    with expect_error("bad-prefix-shape", DataError, shapes=[list(shape)]):
        toy_backbone().embed(images(), Prefix((torch.zeros(shape),)))
    with expect_error("bad-prefix-shape", DataError):
        toy_backbone().embed(images(), Prefix((torch.zeros(1, 2, L, D),) * 3))


def test_a_prefix_of_layers_that_are_done_is_rejected():
    backbone = toy_backbone()
    with expect_error("prompt-enters-trunk", DataError, layers=1):
        backbone.embed_tokens(backbone.trunk(images(), 1), 1, Prefix((torch.zeros(1, 2, L, D),)))


def test_attention_is_torchs_own():
    """The oracle above is right where torch has a function for it."""
    q, k, v = (numbers(1, 1, 5, 8, seed=i) for i in range(3))
    ours = (q[0, 0] @ k[0, 0].T / 8**0.5).softmax(dim=1) @ v[0, 0]
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v)[0, 0], ours)
