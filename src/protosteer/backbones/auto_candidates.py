"""Backbones that may be tried on a user's images, told before they are loaded."""

from __future__ import annotations

from dataclasses import replace

from protosteer.backbones.build_vit import load_vit
from protosteer.backbones.checkpoint_io import read_checkpoint
from protosteer.backbones.hub import config_beside, find_weights, names_on_disk
from protosteer.backbones.registry import KNOWN, NANO, NOT_STATED, BackboneInfo, known_weights, preprocessing
from protosteer.errors import WeightsError

TOO_SMALL = NANO  # for photographs; who has digits or letters may name it


def candidates_on_disk() -> tuple[list[BackboneInfo], dict[str, str]]:
    """All backbones on this disk but nano; and of files that cannot be used as one, their names and why."""
    found: list[BackboneInfo] = []
    refused: dict[str, str] = {}
    for name in names_on_disk():
        if name == TOO_SMALL:
            continue
        try:
            known = known_weights(name)
            found.append(replace(known, path=find_weights(name)) if known else _described(name))
        except WeightsError as error:
            refused[name] = str(error)
    return found, refused


def worth_fetching() -> list[BackboneInfo]:
    """The short list of those that are not on this disk."""
    return [known for known in KNOWN if known.worth_fetching and find_weights(known.name) is None]


def _described(name: str) -> BackboneInfo:
    """What a file without a short name says of itself; complains of one that `Backbone.load` would refuse."""
    path = find_weights(name)
    assert path is not None
    checkpoint = read_checkpoint(path, config_beside(path))
    config = load_vit(checkpoint)[0].config
    preprocessing(name, path, config.image_size, checkpoint.about)
    return BackboneInfo(name, name, checkpoint.about.get("licence", NOT_STATED), config, path=path)
