"""The ONNX graph computes what the ViT does, under prompts of every kind."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from protosteer.backbones import Backbone
from protosteer.data.transforms import Preprocessing
from protosteer.export.onnx import slots
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
