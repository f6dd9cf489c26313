"""The ONNX graph computes what the ViT does, under prompts of every kind."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from expect import expect_error
from protosteer.backbones import Backbone
from protosteer.data.transforms import Preprocessing
from protosteer.errors import WeightsError
from protosteer.export.onnx import slots
from protosteer.methods.adapters import AdaptedBlock, Adapter
from protosteer.methods.inflora import LowRankQKV
from protosteer.paper.vit import ViT, ViTConfig

pytest.importorskip("onnx", reason="onnx is not installed (extra `onnx`)")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra `onnx`)")
from protosteer.export.onnx_graph import network  # noqa: E402 (needs onnx)


def other_architecture(**changes: Any) -> Backbone:
    config = ViTConfig(image_size=16, patch_size=8, dim=24, depth=3, heads=3, mlp_dim=48)
    vit = ViT(replace(config, **changes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return Backbone("other", vit, Preprocessing(16, (0.5,) * 3, (0.5,) * 3))


def add_lora(vit: ViT) -> None:
    vit.blocks[1].attn.qkv = LowRankQKV(vit.blocks[1].attn.qkv, torch.randn(2, 24))


def add_adapter(vit: ViT) -> None:
    vit.blocks[2] = AdaptedBlock(vit.blocks[2], Adapter(24, 4), 0.1)


def add_hook(vit: ViT) -> None:
    vit.blocks[0].mlp.fc1.register_forward_hook(lambda _module, _inputs, out: out * 1.0001)


@pytest.mark.parametrize(
    ("change", "layer"),
    [(add_lora, "blocks.1.attn.qkv"), (add_adapter, "blocks.2"), (add_hook, "blocks.0.mlp.fc1")],
)
def test_a_backbone_that_computes_more_than_its_weights_is_rejected(change: Any, layer: str) -> None:
    """However little it changes: the graph has the plain layers alone."""
    backbone = other_architecture()
    change(backbone.vit)
    with expect_error("changed-backbone", WeightsError, layer=layer):
        network(backbone)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pool": "mean"},
        {"registers": 2, "layer_scale": True},
        {"position_for_class": False, "qkv_bias": False},
        {"registers": 1, "position_for_class": False, "pool": "mean"},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_graph_is_the_vit(changes: dict[str, Any], batch: int) -> None:
    backbone = other_architecture(**changes)
    session = onnxruntime.InferenceSession(network(backbone), providers=["CPUExecutionProvider"])
    images = torch.randn(batch, 3, 16, 16)
    shapes = [(3, 1), (3, 4), (2, 2), (1, 1), (1, 3)]
    prompts = [None, *(torch.randn(layers, length, 24) for layers, length in shapes)]
    tokens, enters = slots([p for p in prompts if p is not None], 3, 24)
    for row, prompt in enumerate(prompts):
        rows = [row] * batch
        feed = {"images": images.numpy(), "prompts": tokens[rows], "enters": enters[rows]}
        expected = backbone.vit(images, prompt)
        (found,) = session.run(None, feed)
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-5)
