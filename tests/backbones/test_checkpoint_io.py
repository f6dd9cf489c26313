"""Every container gives the same tensors; what is damaged or could run code is refused."""

import argparse
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expect import expect_error
from protosteer.backbones.build_vit import load_vit
from protosteer.backbones.checkpoint_io import read_checkpoint
from protosteer.errors import WeightsError
from protosteer.paper.vit import ViT
from timm_oracle import import_timm, timm_embedding
from weight_toys import StateDict, published, random_vit, to_flax, write_weights


@pytest.fixture
def vit() -> ViT:
    return random_vit()


@pytest.fixture
def state(vit: ViT) -> StateDict:
    return published(vit)


def prefixed(state: StateDict, prefix: str) -> StateDict:
    return {prefix + name: tensor for name, tensor in state.items()}


CONTAINERS: dict[str, tuple[str, Callable[[StateDict], Any]]] = {
    "safetensors": (".safetensors", dict),
    "bare pth": (".pth", OrderedDict),
    "deit": (".pth", lambda s: {"model": s}),
    "deit training": (".pth", lambda s: {"model": s, "epoch": 3, "args": argparse.Namespace(lr=0.1)}),
    "parallel": (".pth", lambda s: {"state_dict": prefixed(s, "module.")}),
    "dino training": (
        ".pth",
        lambda s: {
            "student": prefixed({name: tensor + 1 for name, tensor in s.items()}, "module.backbone."),
            "teacher": prefixed(s, "backbone.") | {"head.mlp.0.weight": torch.ones(3, 3)},
            "args": argparse.Namespace(arch="vit_base"),
        },
    ),
    "mask token": (".pth", lambda s: s | {"mask_token": torch.zeros(1, 24)}),
    "npz": (".npz", lambda s: to_flax(s, 3)),
    "npz, stacked": (".npz", lambda s: to_flax(s, 3, late=True, stacked=True)),
    "npz, late numbering": (".npz", lambda s: to_flax(s, 3, late=True, prefix="params/")),
    "npz, optimiser beside": (".npz", lambda s: to_flax(s, 3, prefix="opt/target/") | {"opt/step": np.ones(1)}),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_gives_the_same_vit(container: str, vit: ViT, state: StateDict, tmp_path: Path) -> None:
    suffix, pack = CONTAINERS[container]
    checkpoint = read_checkpoint(write_weights(tmp_path / f"w{suffix}", pack(state)))
    loaded, fingerprint = load_vit(checkpoint, heads=None if suffix == ".npz" else 3)
    assert loaded.config == vit.config
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in vit.state_dict().items())
    _, plain = load_vit(read_checkpoint(write_weights(tmp_path / "plain.safetensors", vit.state_dict())), heads=3)
    assert fingerprint == plain and not any(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("late", [False, True])
def test_npz_equals_timm_reading_it(late: bool, vit: ViT, state: StateDict, tmp_path: Path) -> None:
    timm = import_timm()
    path = write_weights(tmp_path / "w.npz", to_flax(state, 3, late=late, prefix="params/" if late else ""))
    model = timm.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, mlp_ratio=40 / 24, num_classes=0
    )
    model.load_pretrained(path)
    images = torch.randn(2, 3, 16, 16)
    loaded, _ = load_vit(read_checkpoint(path))
    assert (loaded(images) - timm_embedding(model, images)).abs().max() <= 1e-4


class Bomb:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("suffix", [".pth", ".npz"])
def test_code_in_a_file_is_refused_and_not_run(suffix: str, state: StateDict, tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "ran")
    arrays = to_flax(state, 3) | {"extra": np.array([bomb], dtype=object)}
    path = write_weights(tmp_path / f"w{suffix}", arrays if suffix == ".npz" else {"model": state, "x": bomb})
    for _ in range(2):
        with expect_error("damaged-weights", WeightsError) as caught:
            read_checkpoint(path)
        assert not bomb.target.exists() and "\n" not in str(caught.value)
        path.write_bytes(pickle.dumps(bomb, protocol=2))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".npz"])
@pytest.mark.parametrize("content", [b"", b"not weights", b"PK\x03\x04broken"])
def test_a_damaged_file_is_refused_in_one_line(suffix: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"w{suffix}"
    path.write_bytes(content)
    with expect_error("damaged-weights", WeightsError) as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_absent_file_and_unknown_kind(tmp_path: Path) -> None:
    with expect_error("missing-file", WeightsError):
        read_checkpoint(tmp_path / "w.pth")
    (tmp_path / "w.onnx").touch()
    with expect_error("unknown-format", WeightsError):
        read_checkpoint(tmp_path / "w.onnx")


def test_unknown_flax_parts_are_refused_by_name(state: StateDict, tmp_path: Path) -> None:
    arrays = to_flax(state, 3)
    arrays["Transformer/strange/kernel"] = np.ones(3, np.float32)
    del arrays["Transformer/encoderblock_1/MultiHeadDotProductAttention_1/key/bias"]
    with expect_error("other-architecture", WeightsError):
        load_vit(read_checkpoint(write_weights(tmp_path / "w.npz", arrays)))
    del arrays["Transformer/strange/kernel"]
    with expect_error("other-architecture", WeightsError):
        load_vit(read_checkpoint(write_weights(tmp_path / "w.npz", arrays)))


def test_half_precision_is_read_as_fp32(state: StateDict, vit: ViT, tmp_path: Path) -> None:
    halves = {name: tensor.half() for name, tensor in state.items()}
    loaded, _ = load_vit(read_checkpoint(write_weights(tmp_path / "w.safetensors", halves)), heads=3)
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.float32}
    assert torch.equal(loaded.norm.bias, vit.norm.bias.half().float())


def test_weights_do_not_change_when_their_file_does(state: StateDict, vit: ViT, tmp_path: Path) -> None:
    path = write_weights(tmp_path / "w.safetensors", state)
    loaded, _ = load_vit(read_checkpoint(path), heads=3)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(loaded.patch_embed.proj.weight, vit.patch_embed.proj.weight)
