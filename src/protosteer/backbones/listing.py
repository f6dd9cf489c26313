"""The backbones that have a short name, and whether their weights are on this disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protosteer.backbones.formats import read_checkpoint
from protosteer.backbones.hub import find_weights
from protosteer.backbones.names import NANO, PAPER_WEIGHTS, PaperWeights, preprocessing
from protosteer.backbones.weights import load_vit
from protosteer.data.transforms import Preprocessing


@dataclass(frozen=True)
class BackboneInfo:
    """One line of `protosteer backbones`. `path`: where the weights are, None if they are not on disk."""

    alias: str
    name: str
    parameters: int
    preprocessing: Preprocessing
    pool: str
    licence: str
    path: Path | None

    @property
    def on_disk(self) -> bool:
        return self.path is not None


def list_backbones() -> list[BackboneInfo]:
    """Looks at the disk alone, never at the network."""
    nano = find_weights(NANO)
    return ([] if nano is None else [_nano(nano)]) + [_paper(paper) for paper in PAPER_WEIGHTS]


def _nano(path: Path) -> BackboneInfo:
    checkpoint = read_checkpoint(path)
    parameters = sum(tensor.numel() for tensor in checkpoint.tensors.values())
    config = load_vit(checkpoint)[0].config
    how = preprocessing(NANO, path, config.image_size, checkpoint.about)
    return BackboneInfo(NANO, NANO, parameters, how, config.pool, checkpoint.about["licence"], path)


def _paper(paper: PaperWeights) -> BackboneInfo:
    path = find_weights(paper.name)
    how = preprocessing(paper.name, path, paper.image_size, {})
    return BackboneInfo(paper.alias, paper.name, paper.parameters, how, paper.pool, paper.licence, path)
