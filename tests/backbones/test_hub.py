"""Where weights are found, fetched from and put, without a network."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import tiny_backbone
from expect import expect_error
from protosteer.backbones import Backbone, full_name, list_backbones
from protosteer.backbones.registry import EARLIER
from protosteer.errors import WeightsError
from protosteer.paper.vit import ViT, ViTConfig
from protosteer.util.files import cache_dir
from weight_toys import HALF, IMAGENET, OWN, hub_config, statistics, tiny_weights
from weight_toys import empty_caches as empty_caches  # a fixture for every test here


def test_a_config_beside_the_file_is_read(tmp_path: Path) -> None:
    path = tiny_weights(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(hub_config())
    backbone = Backbone.load("deit_of_mine", path)  # the name alone would say ImageNet's statistics
    assert statistics(backbone) == HALF
    assert (backbone.preprocessing.crop, backbone.preprocessing.interpolation) == (0.95, "bilinear")


@pytest.mark.parametrize("alias", ["vit-tiny", "vit-small", "dinov2-small", "vit", "deit", "dino"])
def test_without_network_one_line_says_where_to_put_what(alias: str) -> None:
    full = full_name(alias)
    for name in (alias, full):
        with pytest.raises(WeightsError) as caught:
            Backbone.load(name)
        message = str(caught.value)
        assert str(cache_dir() / "weights" / f"{full}.safetensors") in message
        assert "weights=FILE" in message and "\n" not in message


def test_without_network_mae_names_its_authors_file() -> None:
    with expect_error("download-failed", WeightsError) as caught:
        Backbone.load("mae")
    message = str(caught.value)
    assert f"/mae_finetuned_vit_base.pth into {cache_dir() / 'weights'}" in message
    assert "https://" in message and "\n" not in message


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_put_into_the_cache_is_found_before_the_network(suffix: str) -> None:
    path = tiny_weights(cache_dir() / "weights" / f"deit_mine.x{suffix}")
    if suffix == ".pth":
        torch.save({"model": tiny_backbone().vit.state_dict()}, path)
    (path.parent / "config.json").write_text(hub_config())  # whose? Not to be believed in a shared folder
    backbone = Backbone.load("deit_mine.x", heads=3)
    assert (backbone.source, statistics(backbone)) == (path, IMAGENET)
    (path.parent / "deit_mine.x.json").write_text(hub_config())
    assert statistics(Backbone.load("timm/deit_mine.x", heads=3)) == HALF


def test_a_name_is_not_a_path(tmp_path: Path) -> None:
    tiny_weights(cache_dir() / "weights" / "a.safetensors", OWN)
    tiny_weights(tmp_path / "a.safetensors", OWN)
    for name in ("../../a", str(tmp_path / "a"), "x/../a"):
        with pytest.raises(WeightsError):
            Backbone.load(name)


def test_hub_files_are_fetched_and_then_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = tmp_path / "hub", []
    tiny_weights(folder / "model.safetensors")
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
    assert Backbone.load("vit_any.tag").fingerprint == backbone.fingerprint and len(asked) == 2


def test_a_name_that_the_hub_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    def unknown(*args: Any, **options: Any) -> None:
        raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unknown)
    with expect_error("unknown-backbone", WeightsError):
        Backbone.load("vti")


def test_mae_download_is_kept_only_with_its_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer(io.BytesIO):
        status_code = 200

        def raise_for_status(self) -> None:
            pass

        def iter_content(self, size: int) -> Iterator[bytes]:
            yield self.read()

    monkeypatch.setattr("requests.get", lambda url, **options: Answer(b"cut short"))
    with expect_error("download-failed", WeightsError):
        Backbone.load("mae")
    assert not list((cache_dir() / "weights").iterdir())
    monkeypatch.setattr("protosteer.data.downloads.file_hash", lambda path, algorithm: "1b25e9ff")
    with expect_error("damaged-weights", WeightsError):  # passed the check, so it got its name and was read
        Backbone.load("mae")
    assert (cache_dir() / "weights" / "mae_finetuned_vit_base.pth").is_file()


def test_the_list_needs_no_network_and_knows_what_is_on_disk() -> None:
    path = cache_dir() / "weights" / "mae_finetuned_vit_base.pth"
    path.parent.mkdir(parents=True)
    path.touch()
    mini, nano, tiny, small, dinov2, *papers = rows = list_backbones()
    assert [row.alias for row in rows[:5]] == ["mini", "nano", "vit-tiny", "vit-small", "dinov2-small"]
    assert [row.alias for row in papers] == ["vit", "deit", "dino", "mae"]
    assert [row.path for row in papers] == [None, None, None, path]
    for row in (mini, nano):
        loaded = Backbone.load(row.alias)
        assert row.on_disk and row.config == loaded.vit.config
        assert (row.parameters, row.preprocessing) == (loaded.parameters, loaded.preprocessing)
    assert [row.preprocessing.mean for row in (tiny, small, dinov2)] == [HALF[0], HALF[0], IMAGENET[0]]
    assert [row.preprocessing.mean for row in papers] == [HALF[0], *[IMAGENET[0]] * 3]
    with torch.device("meta"):
        base = ViT(ViTConfig(224, 16, 768, 12, 12, 3072))
    assert {row.parameters for row in papers} == {sum(p.numel() for p in base.parameters())}


@pytest.mark.parametrize(("fingerprint", "name"), EARLIER.items())
def test_earlier_weights_are_found_by_their_fingerprint(
    fingerprint: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    earlier = Backbone.load("mini", fingerprint=fingerprint)
    assert (earlier.name, earlier.fingerprint) == (name, fingerprint)
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)  # as in a wheel, which has them not
    with expect_error("replaced-weights", WeightsError):
        Backbone.load("mini", fingerprint=fingerprint)
    assert earlier.source is not None
    by_hand = cache_dir() / "weights" / f"{name}.safetensors"
    by_hand.parent.mkdir(parents=True)
    by_hand.write_bytes(earlier.source.read_bytes())
    assert Backbone.load("mini", fingerprint=fingerprint).source == by_hand


def test_earlier_weights_differ_from_those_that_ship() -> None:
    assert EARLIER and Backbone.load("mini").fingerprint not in EARLIER


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("PROTOSTEER_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "protosteer"
