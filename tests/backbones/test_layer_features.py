"""Embeddings of several layers, against outputs that hooks collect from the blocks."""

import pytest
import torch
import torch.nn.functional as F

from protosteer.backbones import Backbone
from protosteer.backbones.layer_features import FeatureSpace, feature_spaces, layer_features, max_trunk
from protosteer.data.transforms import Preprocessing
from protosteer.paper.vit import ViT, ViTConfig

DEPTH, DIM = 6, 24


def random_vit(pool: str, registers: int = 0) -> ViT:
    torch.manual_seed(0)
    config = ViTConfig(16, 8, DIM, DEPTH, heads=3, mlp_dim=48, pool=pool, registers=registers)
    vit = ViT(config)
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return vit


def test_spaces_follow_from_the_depth():
    twelve = feature_spaces(ViTConfig(224, 16, 192, 12, 3, 768))
    token = [FeatureSpace(layer, "token") for layer in (12, 11, 10, 8)]
    assert twelve == (*token, FeatureSpace(10, "mean"), FeatureSpace(7, "mean"))
    assert max_trunk(ViTConfig(224, 16, 192, 12, 3, 768)) == 6
    mean = feature_spaces(ViTConfig(224, 16, 192, 12, 3, 768, pool="mean"))
    assert [(s.layer, s.pool) for s in mean][:2] == [(12, "mean"), (11, "mean")]
    for depth in range(1, 49):
        spaces = feature_spaces(ViTConfig(16, 8, DIM, depth, 3, 48))
        assert spaces[0] == FeatureSpace(depth, "token") and len(set(spaces)) == len(spaces)
        assert all(1 <= space.layer <= depth for space in spaces)
        assert all(space.layer < depth for space in spaces if space.pool == "mean")
        assert any(space.pool == "mean" for space in spaces) == (depth >= 6)


@pytest.mark.parametrize("prompt_layers", [None, 1, 4, DEPTH], ids=["none", "shallow", "late", "deep"])
@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize("pool", ["token", "mean"])
def test_each_space_is_the_normalised_token_of_its_layer(pool, registers, prompt_layers):
    vit, images = random_vit(pool, registers), torch.randn(3, 3, 16, 16)
    prompt = None if prompt_layers is None else torch.randn(prompt_layers, 2, DIM)
    outputs = []
    hooks = [block.register_forward_hook(lambda _, __, out: outputs.append(out)) for block in vit.blocks]
    expected = [vit(images, prompt)]
    for hook in hooks:
        hook.remove()
    for space in feature_spaces(vit.config)[1:]:
        tokens = outputs[space.layer - 1]
        pooled = tokens[:, 0] if space.pool == "token" else tokens[:, -vit.config.patches :].mean(dim=1)
        centred = pooled - pooled.mean(dim=1, keepdim=True)
        expected.append(F.normalize(centred, dim=1) * DIM**0.5)
    found = layer_features(vit, vit.embed_patches(images), 0, prompt).unflatten(1, (-1, DIM))
    torch.testing.assert_close(found[:, 0], expected[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found[:, 1:], torch.stack(expected[1:], dim=1), atol=1e-3, rtol=1e-3)


def test_a_backbone_reads_several_layers_with_the_same_weights_and_from_a_trunk():
    backbone = Backbone("random", random_vit("token"), Preprocessing(16, (0.5,) * 3, (0.5,) * 3))
    wide, images = backbone.reading("several"), torch.randn(4, 3, 16, 16)
    assert wide.vit is backbone.vit and wide.reading("several") is wide and wide.reading("last").width == DIM
    assert wide.width == DIM * len(feature_spaces(backbone.vit.config)) and wide.fingerprint == backbone.fingerprint
    embeddings = wide.embed(images)
    assert embeddings.shape == (4, wide.width) and torch.equal(embeddings[:, :DIM], backbone.embed(images))
    done = wide.max_trunk
    torch.testing.assert_close(wide.embed_tokens(wide.trunk(images, done), done), embeddings)
    pixels = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(wide.embed_pixels(pixels)[:, :DIM], backbone.embed_pixels(pixels))
