"""What a file tells the backbone; embedding that never touches the weights; copies that may be trained."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from conftest import tiny_backbone
from expect import expect_error
from protosteer.backbones import Backbone
from protosteer.backbones.prompting import all_tokens
from protosteer.data.images import ArrayImages
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError, SettingsError
from protosteer.paper.vit import ViT, ViTConfig
from weight_toys import IMAGENET, OWN, statistics, tiny_weights


def test_a_file_of_our_own_carries_everything(tmp_path: Path) -> None:
    path = tiny_weights(tmp_path / "small.safetensors", OWN)
    backbone = Backbone.load("small", weights=str(path))
    told = {key: OWN[key] for key in ("image_size", "mean", "std", "crop", "interpolation")}
    assert backbone.preprocessing.to_dict() == told
    assert (backbone.dim, backbone.depth, backbone.image_size, backbone.vit.config.heads) == (24, 2, 16, 3)
    assert backbone.source == path and backbone.fingerprint == tiny_backbone().fingerprint


def test_arguments_win(tmp_path: Path) -> None:
    path = tiny_weights(tmp_path / "small.safetensors", OWN)
    backbone = Backbone.load("small", path, image_size=32, mean=[0, 0, 0], std=[1, 1, 1], crop=0.8, heads=2)
    assert statistics(backbone) == ((0, 0, 0), (1, 1, 1))
    assert (backbone.preprocessing.crop, backbone.vit.config.heads) == (0.8, 2)
    assert backbone.image_size == backbone.preprocessing.image_size == 32
    assert backbone.embed(torch.zeros(1, 3, 32, 32)).shape == (1, 24)


def test_embed_keeps_a_graph_only_for_a_prompt_that_wants_it() -> None:
    backbone, images = tiny_backbone(), torch.randn(2, 3, 16, 16)
    prompt = torch.randn(backbone.prompt_shape(3))
    assert not backbone.embed(images).requires_grad
    assert not backbone.embed(images.requires_grad_(), prompt).requires_grad
    prompt.requires_grad_()
    assert backbone.embed(images, prompt).requires_grad
    with torch.no_grad():
        assert not backbone.embed(images, prompt).requires_grad


def test_embed_gradient_reaches_the_prompt_and_nothing_else() -> None:
    backbone = tiny_backbone()
    before = {name: tensor.clone() for name, tensor in backbone.vit.state_dict().items()}
    images = torch.randn(2, 3, 16, 16)
    prompt = torch.randn(backbone.prompt_shape(1), dtype=torch.float64, requires_grad=True)
    (backbone.embed(images, prompt) @ torch.randn(24)).sum().backward()
    assert prompt.grad is not None and prompt.grad.dtype == torch.float64 and prompt.grad.abs().max() > 0
    assert all(p.grad is None for p in backbone.vit.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in backbone.vit.state_dict().items())


def test_a_trainable_copy_learns_and_leaves_the_original_as_it_was() -> None:
    backbone, images = tiny_backbone(), torch.randn(2, 3, 16, 16)
    before = {name: tensor.clone() for name, tensor in backbone.vit.state_dict().items()}
    embeddings, copied = backbone.embed(images), backbone.trainable_copy()
    assert copied.fingerprint == backbone.fingerprint
    torch.testing.assert_close(copied.embed(images), embeddings, atol=1e-5, rtol=0)
    optimizer = torch.optim.SGD(copied.vit.parameters(), lr=0.1)
    (copied.embed(images) @ torch.randn(24)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in copied.vit.patch_embed.parameters())
    optimizer.step()
    assert copied.fingerprint != backbone.fingerprint == tiny_backbone().fingerprint
    assert (copied.embed(images) - embeddings).abs().max() > 1e-3
    assert torch.equal(backbone.embed(images), embeddings)
    assert all(torch.equal(before[name], tensor) for name, tensor in backbone.vit.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in backbone.vit.parameters())


def test_a_trainable_copy_keeps_a_graph_only_while_training(pixels: Tensor) -> None:
    backbone, images = tiny_backbone(), torch.randn(2, 3, 16, 16)
    copied = backbone.trainable_copy()
    for compute in (copied.embed, copied.tokens, lambda images: copied.trunk(images, 1)):
        assert compute(images).requires_grad
        with torch.no_grad():
            assert not compute(images).requires_grad
    assert not copied.embed_pixels(pixels).requires_grad and not copied.trunk_pixels(pixels, 1).requires_grad
    assert not backbone.embed(images).requires_grad and not backbone.tokens(images).requires_grad


def test_a_head_on_prompt_outputs_trains_the_prompt_alone() -> None:
    backbone, images = tiny_backbone(), torch.randn(2, 3, 16, 16)
    prompt = torch.randn(2, *backbone.prompt_shape(3), requires_grad=True)
    outputs = backbone.tokens(images, prompt)[:, 1:4]
    torch.testing.assert_close(outputs, all_tokens(backbone.vit, images, prompt)[:, 1:4])
    (outputs.mean(dim=1) @ torch.randn(24)).sum().backward()
    assert prompt.grad is not None and prompt.grad.abs().amax(dim=-1).min() > 0
    assert all(p.grad is None for p in backbone.vit.parameters())


def test_embed_moves_other_floats_and_refuses_pixels() -> None:
    backbone, images = tiny_backbone(), torch.randn(2, 3, 16, 16)
    assert torch.equal(backbone.embed(images.double()), backbone.embed(images))
    for compute in (backbone.embed, backbone.tokens):
        with expect_error("bad-dtype", DataError):
            compute(torch.zeros(2, 3, 16, 16, dtype=torch.uint8))


@pytest.fixture
def pixels() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (7, 3, 20, 16), generator=generator).to(torch.uint8)


@pytest.mark.parametrize("kind", ["none", "one", "each"])
def test_sets_are_embedded_in_batches_as_if_at_once(kind: str, pixels: Tensor) -> None:
    backbone = tiny_backbone()
    shape = backbone.prompt_shape(2)
    prompt = {"none": None, "one": torch.randn(shape), "each": torch.randn(7, *shape)}[kind]
    expected = backbone.embed(backbone.preprocessing(pixels), prompt)
    done: list[int] = []
    found = backbone.embed_set(ArrayImages(pixels), prompt, batch_size=3, on_batch=done.append)
    assert done == [3, 6, 7] and found.dtype == torch.float32 and not found.requires_grad
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(backbone.embed_pixels(pixels, prompt, 2), expected, atol=1e-5, rtol=0)


def test_some_rows_of_a_set_their_tokens_and_too_few_prompts(pixels: Tensor) -> None:
    backbone, rows = tiny_backbone(), [5, 0, 5]
    found = backbone.embed_set(ArrayImages(pixels), rows=rows, batch_size=2)
    torch.testing.assert_close(found, backbone.embed_pixels(pixels)[rows], atol=1e-5, rtol=0)
    assert backbone.embed_set(ArrayImages(pixels), rows=[]).shape == (0, 24)
    prompts = torch.randn(3, *backbone.prompt_shape(1), requires_grad=True)
    tokens = backbone.embed_set(ArrayImages(pixels), prompts, batch_size=2, rows=rows, whole=True)
    expected = backbone.tokens(backbone.preprocessing(pixels)[rows], prompts)
    torch.testing.assert_close(tokens, expected, atol=1e-5, rtol=0)
    assert expected.requires_grad and not tokens.requires_grad
    with expect_error("prompt-count", DataError):
        backbone.embed_pixels(pixels, prompts)


def test_transform_is_the_evaluation_preprocessing() -> None:
    backbone = tiny_backbone()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    expected = (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - 0.5) / 0.5
    torch.testing.assert_close(backbone.transform(image), expected)


def test_description_is_plain_data(tmp_path: Path) -> None:
    backbone = Backbone.load("small", tiny_weights(tmp_path / "small.safetensors", OWN))
    told = json.loads(json.dumps(backbone.describe()))
    assert told["fingerprint"] == backbone.fingerprint
    assert (told["source"], told["parameters"]) == ("small.safetensors", backbone.parameters)
    assert backbone.parameters == sum(tensor.numel() for tensor in backbone.vit.state_dict().values())
    assert str(tmp_path) not in json.dumps(told)


def test_prompt_shapes_and_moving() -> None:
    backbone = tiny_backbone()
    assert backbone.prompt_shape(5) == (2, 5, 24) and backbone.prompt_shape(5, deep=False) == (1, 5, 24)
    with pytest.raises(SettingsError):
        backbone.prompt_shape(0)
    assert backbone.to("cpu") is backbone and backbone.device == torch.device("cpu")


def test_a_batch_is_no_larger_than_is_good_for_a_processor() -> None:
    def of(dim: int, size: int) -> Backbone:
        config = ViTConfig(size, 16, dim, depth=1, heads=3, mlp_dim=4 * dim)
        return Backbone("wide", ViT(config), Preprocessing(size, (0.5,) * 3, (0.5,) * 3))

    assert of(192, 224).batch_size(64) == 17  # 197 tokens of 768 floats each, 10 MiB
    assert of(192, 224).batch_size(5) == 5 and of(48, 32).batch_size(64) == 64 and of(3072, 448).batch_size(64) == 1


def test_real_deit_tiny_by_the_contract(shared: Path) -> None:
    path = shared / "weights" / "deit_tiny_patch16_224.safetensors"
    if not path.is_file():
        pytest.skip("no DeiT-Tiny weights in the shared folder")
    backbone = Backbone.load("deit_tiny_patch16_224", weights=path, image_size=64)
    assert (backbone.dim, backbone.depth, backbone.image_size, backbone.vit.config.heads) == (192, 12, 64, 3)
    assert statistics(backbone) == IMAGENET and backbone.embed(torch.randn(2, 3, 64, 64)).isfinite().all()
