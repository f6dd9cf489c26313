"""The list of backbones that have a short name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from protosteer.backbones import Backbone, hub, list_backbones
from protosteer.method.vit import ViT, ViTConfig
from protosteer.util.files import cache_dir
from weight_toys import HALF, IMAGENET, OWN, tiny_weights
from weight_toys import empty_caches as empty_caches  # a fixture for every test here


def test_the_list_needs_no_network_and_knows_what_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "assets").mkdir()
    about = OWN | {"name": "nano", "licence": "Apache-2.0"}
    tiny_weights(tmp_path / "assets" / "nano.safetensors", about)
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
