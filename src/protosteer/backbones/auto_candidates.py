"""List the backbones that can be tried on a user's images."""

from __future__ import annotations

from dataclasses import replace

from protosteer.backbones.build_vit import load_vit
from protosteer.backbones.checkpoint_io import read_checkpoint
from protosteer.backbones.hub import config_beside, find_weights, names_on_disk
from protosteer.backbones.registry import KNOWN, NANO, NOT_STATED, BackboneInfo, known_weights, preprocessing
from protosteer.errors import WeightsError

TOO_SMALL = NANO  # for photographs; for digits or letters, pass its name


def candidates_on_disk() -> tuple[list[BackboneInfo], dict[str, str]]:
    """List all backbones on this disk but nano, and the names of unusable files with the reason."""
    usable: list[BackboneInfo] = []
    unusable: dict[str, str] = {}
    for name in names_on_disk():
        if name == TOO_SMALL:
            continue
        try:
            info = known_weights(name)
            usable.append(replace(info, path=find_weights(name)) if info else _describe(name))
        except WeightsError as error:
            unusable[name] = str(error)
    return usable, unusable


def worth_fetching() -> list[BackboneInfo]:
    """List small backbones that are worth a download and not on this disk."""
    return [info for info in KNOWN if info.worth_fetching and find_weights(info.name) is None]


def _describe(name: str) -> BackboneInfo:
    """Describe a file without a short name; raise `WeightsError` if `Backbone.load` would."""
    path = find_weights(name)
    assert path is not None
    checkpoint = read_checkpoint(path, config_beside(path))
    config = load_vit(checkpoint)[0].config
    preprocessing(name, path, config.image_size, checkpoint.about)
    return BackboneInfo(name, name, checkpoint.about.get("licence", NOT_STATED), config, path=path)
