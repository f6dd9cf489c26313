"""Names, places and preprocessing of weights; embedding that never touches them. All without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from test_weights import to_flax
from torch import Tensor

from conftest import tiny_backbone
from protosteer.backbones import PAPER_WEIGHTS, Backbone, find_weights, hub, list_backbones
from protosteer.backbones.formats import METADATA_KEY
from protosteer.data.images import ArrayImages
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError, SettingsError, WeightsError
from protosteer.method.vit import ViT, ViTConfig
from protosteer.util.files import cache_dir

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
OWN = {
    "heads": 3,
    "image_size": 16,
    "mean": [0.1, 0.2, 0.3],
    "std": [0.4, 0.5, 0.6],
    "crop": 0.5,
    "interpolation": "bilinear",
    "name": "small",
    "licence": "Apache-2.0",
}


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights on disk but a test's own, and no network."""

    def offline(*args: Any, **options: Any) -> Any:
        raise ConnectionError("no network\nin tests")

    monkeypatch.setenv("PROTOSTEER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: None)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", offline)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    monkeypatch.setattr("pooch.retrieve", offline)


def weights(path: Path, about: dict[str, Any] | None = None, pool: str = "token") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = None if about is None else {METADATA_KEY: json.dumps(about)}
    save_file(tiny_backbone(pool=pool).vit.state_dict(), path, metadata=metadata)
    return path


def statistics(backbone: Backbone) -> tuple[Sequence[float], Sequence[float]]:
    return backbone.preprocessing.mean, backbone.preprocessing.std


def test_a_file_of_our_own_carries_everything(tmp_path: Path) -> None:
    path = weights(tmp_path / "small.safetensors", OWN)
    backbone = Backbone.load("small", weights=str(path))
    told = {key: OWN[key] for key in ("image_size", "mean", "std", "crop", "interpolation")}
    assert backbone.preprocessing.to_dict() == told
    assert (backbone.dim, backbone.depth, backbone.image_size, backbone.vit.config.heads) == (24, 2, 16, 3)
    assert backbone.source == path
    assert backbone.fingerprint == tiny_backbone().fingerprint


def test_arguments_win(tmp_path: Path) -> None:
    path = weights(tmp_path / "small.safetensors", OWN)
    backbone = Backbone.load("small", path, image_size=32, mean=[0, 0, 0], std=[1, 1, 1], crop=0.8, heads=2)
    assert statistics(backbone) == ((0, 0, 0), (1, 1, 1))
    assert (backbone.preprocessing.crop, backbone.vit.config.heads) == (0.8, 2)
    assert backbone.image_size == backbone.preprocessing.image_size == 32
    assert backbone.embed(torch.zeros(1, 3, 32, 32)).shape == (1, 24)


def hub_config(crop: float = 0.95) -> str:
    trained = {
        "mean": HALF[0],
        "std": HALF[1],
        "crop_pct": crop,
        "interpolation": "bilinear",
        "input_size": [3, 16, 16],
    }
    content = {
        "architecture": "x",
        "global_pool": "token",
        "model_args": {"num_heads": 3},
        "pretrained_cfg": trained,
    }
    return json.dumps(content)


def test_a_config_beside_the_file_is_read(tmp_path: Path) -> None:
    path = weights(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(hub_config())
    backbone = Backbone.load("deit_of_mine", path)  # the name alone would say ImageNet's statistics
    assert statistics(backbone) == HALF
    assert (backbone.preprocessing.crop, backbone.preprocessing.interpolation) == (0.95, "bilinear")


@pytest.mark.parametrize(
    "name, expected, crop",
    [
        ("deit_tiny_patch16_224", IMAGENET, 0.9),
        ("deit3_small_patch16_224.fb_in1k", IMAGENET, 0.9),
        ("vit_small_patch8_224.dino", IMAGENET, 0.9),
        ("dino_vitbase16_pretrain", IMAGENET, 0.9),
        ("vit_base_patch14_reg4_dinov2.lvd142m", IMAGENET, 1.0),
        ("vit_large_patch16_224.mae", IMAGENET, 0.9),
        ("mae_finetuned_vit_large", IMAGENET, 0.875),
        ("vit_tiny_patch16_224.augreg_in21k", HALF, 0.9),
        ("vit_base_patch32_224.orig_in21k", HALF, 0.9),
    ],
)
def test_a_usual_name_tells_the_statistics(name: str, expected: Any, crop: float, tmp_path: Path) -> None:
    backbone = Backbone.load(name, weights(tmp_path / "w.safetensors"), heads=3)
    assert statistics(backbone) == expected
    assert (backbone.preprocessing.crop, backbone.preprocessing.interpolation) == (crop, "bicubic")


def test_googles_npz_means_half(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", **to_flax(tiny_backbone().vit.state_dict(), heads=3))
    assert statistics(Backbone.load("b16", tmp_path / "w.npz")) == HALF


@pytest.mark.parametrize("name", ["shop", "maestro", "vit_of_mine"])
def test_statistics_that_nothing_tells_are_asked_for(name: str, tmp_path: Path) -> None:
    path = weights(tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match=f"'{name}'.*pass mean= and std="):
        Backbone.load(name, path, heads=3)
    assert statistics(Backbone.load(name, path, heads=3, mean=HALF[0], std=HALF[1])) == HALF


def test_short_names_mean_the_papers_checkpoints() -> None:
    assert {paper.alias: paper.name for paper in PAPER_WEIGHTS} == {
        "vit": "vit_base_patch16_224.augreg_in21k_ft_in1k",
        "deit": "deit_base_patch16_224.fb_in1k",
        "dino": "vit_base_patch16_224.dino",
        "mae": "mae_finetuned_vit_base",
    }


def test_another_architecture_does_not_pass_under_a_short_name(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="width 24, depth 2"):
        Backbone.load("deit", weights(tmp_path / "w.safetensors"), heads=3)
    with pytest.raises(WeightsError, match="self-supervised"):
        Backbone.load("mae", weights(tmp_path / "w.safetensors"), heads=3)


@pytest.mark.parametrize("alias", ["vit", "deit", "dino"])
def test_without_network_one_line_says_where_to_put_what(alias: str) -> None:
    full = {paper.alias: paper.name for paper in PAPER_WEIGHTS}[alias]
    for name in (alias, full):
        with pytest.raises(WeightsError) as caught:
            Backbone.load(name)
        message = str(caught.value)
        assert str(cache_dir() / "weights" / f"{full}.safetensors") in message
        assert "weights=FILE" in message and "\n" not in message


def test_without_network_mae_names_its_authors_file() -> None:
    with pytest.raises(WeightsError) as caught:
        Backbone.load("mae")
    message = str(caught.value)
    assert f"put mae_finetuned_vit_base.pth into {cache_dir() / 'weights'}" in message
    assert "https://" in message and "\n" not in message


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_put_into_the_cache_is_found_before_the_network(suffix: str) -> None:
    path = weights(cache_dir() / "weights" / f"deit_mine.x{suffix}")
    if suffix == ".pth":
        torch.save({"model": tiny_backbone().vit.state_dict()}, path)
    (path.parent / "config.json").write_text(
        hub_config()
    )  # whose is it? Not to be believed in a shared folder
    backbone = Backbone.load("deit_mine.x", heads=3)
    assert (backbone.source, statistics(backbone)) == (path, IMAGENET)
    (path.parent / "deit_mine.x.json").write_text(hub_config())
    assert statistics(Backbone.load("timm/deit_mine.x", heads=3)) == HALF


def test_a_name_is_not_a_path(tmp_path: Path) -> None:
    weights(cache_dir() / "weights" / "a.safetensors", OWN)
    weights(tmp_path / "a.safetensors", OWN)
    for name in ("../../a", str(tmp_path / "a"), "x/../a"):
        with pytest.raises(WeightsError):
            Backbone.load(name)


def test_hub_files_are_fetched_and_then_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = tmp_path / "hub", []
    weights(folder / "model.safetensors")
    (folder / "config.json").write_text(hub_config())

    def download(repo: str, file: str) -> str:
        asked.append((repo, file))
        return str(folder / file)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *args, **options: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    backbone = Backbone.load("vit_any.tag")
    assert asked == [("timm/vit_any.tag", "config.json"), ("timm/vit_any.tag", "model.safetensors")]
    assert (backbone.preprocessing.crop, backbone.vit.config.heads) == (0.95, 3)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo, file: str(folder / file))
    assert Backbone.load("vit_any.tag").fingerprint == backbone.fingerprint
    assert len(asked) == 2


def test_a_name_that_the_hub_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    def unknown(*args: Any, **options: Any) -> None:
        raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unknown)
    with pytest.raises(WeightsError, match="no backbone is called 'vti': use nano, vit, deit, dino, mae"):
        Backbone.load("vti")


def test_mae_download_is_kept_only_with_its_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def retrieve(url: str, known_hash: None, fname: str, path: Path) -> str:
        path.mkdir(parents=True, exist_ok=True)
        (path / fname).write_bytes(b"cut short")
        return str(path / fname)

    monkeypatch.setattr("pooch.retrieve", retrieve)
    with pytest.raises(WeightsError, match="md5 .* does not begin with 1b25e9"):
        Backbone.load("mae")
    assert not list((cache_dir() / "weights").iterdir())
    monkeypatch.setattr("pooch.file_hash", lambda path, alg: "1b25e9ff")
    with pytest.raises(WeightsError, match="damaged"):  # passed the check, so it got its name and was read
        Backbone.load("mae")
    assert (cache_dir() / "weights" / "mae_finetuned_vit_base.pth").is_file()


def test_the_list_needs_no_network_and_knows_what_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "assets").mkdir()
    about = OWN | {"name": "nano", "licence": "Apache-2.0"}
    weights(tmp_path / "assets" / "nano.safetensors", about)
    monkeypatch.setattr(hub.resources, "files", lambda package: tmp_path)
    path = cache_dir() / "weights" / "mae_finetuned_vit_base.pth"
    path.parent.mkdir(parents=True)
    path.touch()
    rows = {row.alias: row for row in list_backbones()}
    assert list(rows) == ["nano", "vit", "deit", "dino", "mae"]
    assert [alias for alias, row in rows.items() if row.on_disk] == ["nano", "mae"]
    nano = Backbone.load("nano")
    assert (rows["nano"].parameters, rows["nano"].preprocessing) == (nano.parameters, nano.preprocessing)
    assert (rows["nano"].licence, nano.name) == ("Apache-2.0", "nano")
    assert (rows["vit"].preprocessing.mean, rows["dino"].preprocessing.mean) == (HALF[0], IMAGENET[0])
    assert (rows["mae"].pool, rows["mae"].licence, rows["mae"].preprocessing.image_size) == (
        "mean",
        "CC-BY-NC-4.0",
        224,
    )
    with torch.device("meta"):
        base = ViT(ViTConfig(224, 16, 768, 12, 12, 3072))
    assert {row.parameters for row in rows.values()} - {nano.parameters} == {
        sum(p.numel() for p in base.parameters())
    }


def test_shipped_nano_loads() -> None:
    path = find_weights("nano")
    if path is None:
        pytest.skip("nano.safetensors is not built yet")
    backbone = Backbone.load("nano")
    size = backbone.image_size
    assert backbone.embed(torch.zeros(2, 3, size, size)).shape == (2, backbone.dim)
    assert list_backbones()[0].parameters == backbone.parameters


def test_real_deit_tiny_by_the_contract(shared: Path) -> None:
    path = shared / "weights" / "deit_tiny_patch16_224.safetensors"
    if not path.is_file():
        pytest.skip("no DeiT-Tiny weights in the shared folder")
    backbone = Backbone.load("deit_tiny_patch16_224", weights=path, image_size=64)
    assert (backbone.dim, backbone.depth, backbone.image_size, backbone.vit.config.heads) == (192, 12, 64, 3)
    assert statistics(backbone) == IMAGENET
    assert backbone.embed(torch.randn(2, 3, 64, 64)).isfinite().all()


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
    torch.testing.assert_close(outputs, backbone.vit.tokens(images, prompt)[:, 1:4])
    (outputs.mean(dim=1) @ torch.randn(24)).sum().backward()
    assert prompt.grad is not None and prompt.grad.abs().amax(dim=-1).min() > 0
    assert all(p.grad is None for p in backbone.vit.parameters())


def test_embed_moves_other_floats_and_refuses_pixels() -> None:
    backbone, images = tiny_backbone(), torch.randn(2, 3, 16, 16)
    assert torch.equal(backbone.embed(images.double()), backbone.embed(images))
    for compute in (backbone.embed, backbone.tokens):
        with pytest.raises(DataError, match="uint8"):
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
    assert done == [3, 6, 7]
    assert found.dtype == torch.float32 and not found.requires_grad
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        backbone.embed_pixels(pixels, prompt, batch_size=2), expected, atol=1e-5, rtol=0
    )


def test_some_rows_of_a_set(pixels: Tensor) -> None:
    backbone, rows = tiny_backbone(), [5, 0, 5]
    found = backbone.embed_set(ArrayImages(pixels), rows=rows, batch_size=2)
    torch.testing.assert_close(found, backbone.embed_pixels(pixels)[rows], atol=1e-5, rtol=0)
    assert backbone.embed_set(ArrayImages(pixels), rows=[]).shape == (0, 24)


def test_embedding_a_set_leaves_no_graph(pixels: Tensor) -> None:
    backbone = tiny_backbone()
    prompt = torch.randn(backbone.prompt_shape(1), requires_grad=True)
    assert not backbone.embed_set(ArrayImages(pixels), prompt).requires_grad
    with pytest.raises(DataError, match="2 prompts for 7 images"):
        backbone.embed_pixels(pixels, torch.randn(2, *backbone.prompt_shape(1)))


def test_transform_is_the_evaluation_preprocessing() -> None:
    backbone = tiny_backbone()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    expected = (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - 0.5) / 0.5
    torch.testing.assert_close(backbone.transform(image), expected)


def test_description_is_plain_data(tmp_path: Path) -> None:
    backbone = Backbone.load("small", weights(tmp_path / "small.safetensors", OWN))
    told = json.loads(json.dumps(backbone.describe()))
    assert told["fingerprint"] == backbone.fingerprint
    assert (told["source"], told["parameters"]) == ("small.safetensors", backbone.parameters)
    assert backbone.parameters == sum(tensor.numel() for tensor in backbone.vit.state_dict().values())
    assert str(tmp_path) not in json.dumps(told)


def test_prompt_shapes_and_moving() -> None:
    backbone = tiny_backbone()
    assert backbone.prompt_shape(5) == (2, 5, 24)
    assert backbone.prompt_shape(5, deep=False) == (1, 5, 24)
    with pytest.raises(SettingsError):
        backbone.prompt_shape(0)
    assert backbone.to("cpu") is backbone and backbone.device == torch.device("cpu")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("PROTOSTEER_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "protosteer"


def test_a_moved_file_keeps_its_fingerprint(tmp_path: Path) -> None:
    path = weights(tmp_path / "small.safetensors", OWN)
    first = Backbone.load("small", path)
    moved = shutil.move(path, tmp_path / "other.safetensors")
    assert Backbone.load("renamed", moved).fingerprint == first.fingerprint


def test_precision_rounds_the_arithmetic_and_nothing_else(pixels: Tensor) -> None:
    full, rounded = tiny_backbone(), tiny_backbone()
    rounded._precision = "bf16"
    images = full.preprocessing(pixels)
    prompt = torch.randn(full.prompt_shape(1)).requires_grad_()
    for given in (None, prompt):
        one, other = full.embed(images, given), rounded.embed(images, given)
        assert other.dtype == torch.float32 and not torch.equal(one, other)
        torch.testing.assert_close(one, other, atol=0.1, rtol=0.05)
    rounded.embed(images, prompt).sum().backward()
    assert prompt.grad is not None and prompt.grad.dtype == torch.float32
    assert all(parameter.dtype == torch.float32 for parameter in rounded.vit.parameters())
    assert rounded.describe()["precision"] == "bf16" and "precision" not in full.describe()


def test_precision_is_full_on_the_cpu_unless_asked_for() -> None:
    assert Backbone.load("nano").precision == "fp32"
    assert Backbone.load("nano", precision="bf16").precision == "bf16"
    with pytest.raises(SettingsError, match="precision 'fp8' is unknown; choose one of auto, fp32, bf16"):
        Backbone.load("nano", precision="fp8")


def test_a_batch_is_no_larger_than_is_good_for_a_processor() -> None:
    def of(dim: int, size: int) -> Backbone:
        config = ViTConfig(size, 16, dim, depth=1, heads=3, mlp_dim=4 * dim)
        return Backbone("wide", ViT(config), Preprocessing(size, (0.5,) * 3, (0.5,) * 3))

    assert of(192, 224).batch_size(64) == 17  # 197 tokens of 768 floats each, 10 MiB
    assert of(192, 224).batch_size(5) == 5 and of(48, 32).batch_size(64) == 64
    assert of(3072, 448).batch_size(64) == 1
