"""The backbones that come with the package are what their model cards say."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protosteer.backbones import MINI, NANO, Backbone, find_weights

CARDS = Path(__file__).resolve().parents[2] / "docs" / "reference"


@pytest.mark.parametrize(("name", "most"), [(MINI, 12e6), (NANO, 2e6)])
def test_the_file_is_that_of_the_card_small_and_decoded_exactly(name: str, most: float) -> None:
    path = find_weights(name)
    assert path is not None and path.stat().st_size <= most
    card = (CARDS / f"{name}.md").read_text(encoding="utf-8")
    assert f"`{hashlib.sha256(path.read_bytes()).hexdigest()}`" in card
    backbone, stored = Backbone.load(name), load_file(path)
    assert f"{backbone.parameters / 1e6:.2f} M parameters" in card
    for key, weight in backbone.vit.state_dict().items():
        assert stored[key].dtype == torch.float16 and torch.equal(weight, stored[key].float()), key


def test_no_layer_of_mini_is_made_of_its_teachers_weights(shared: Path) -> None:
    teacher = load_file(shared / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors")
    matrices = {
        key: weight
        for key, weight in Backbone.load(MINI).vit.state_dict().items()
        if key.startswith("blocks.") and weight.ndim == 2
    }
    assert len(matrices) == 48
    for key, weight in matrices.items():
        alike = torch.cosine_similarity(weight.flatten(), teacher[key].float().flatten(), dim=0)
        assert abs(float(alike)) < 0.1, key
