"""Small pictures of what a task was learned from, for `MODEL.thumbs`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from protosteer.data.images import FileImages
from protosteer.evidence.prototype_summary import exact_rows
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.model import thumbnails
from protosteer.model.thumbnails import Thumb
from protosteer.paper.task import task_seed
from protosteer.util.files import real, replacing
from protosteer.workflows.learn_folder import FolderScan, split

MOST = 10  # of each class and task
SIDE = 64  # pixels
_QUALITY = 80


def keep(path: Path, learner: Learner, found: FolderScan, holdout: float) -> int:
    """Beside the model file, add pictures of the folder that it was just taught; gives how many.

    Of each class they are images that the model keeps as points, which are its prototypes.
    """
    learned, _ = split(found.files, holdout, learner.settings.seed)
    digests = dict(zip(found.files.paths, found.digests, strict=True))
    seed = task_seed(learner.settings.seed, list(found.counts))
    rows = [row for name in found.counts for row in _chosen(learned.labels, name, seed)]
    images = FileImages([learned.paths[row] for row in rows], learner.backbone.preprocessing)
    new = [
        Thumb(learned.labels[row], digests[learned.paths[row]], _jpeg(images.pixels([i])[0]))
        for i, row in enumerate(rows)
    ]
    with replacing(real(path)):  # what was forgotten meanwhile must not come back
        memory = model_file.read(path).memory
        thumbnails.write(path, [*thumbnails.read(path, memory), *new])
        thumbnails.follow(path, memory)
    return len(new)


def _chosen(labels: Sequence[str], name: str, seed: int) -> list[int]:
    """Rows of a class's images that its sketch keeps as they are; of many, some that are evenly spread.

    seed: of the task.
    """
    rows = [row for row, label in enumerate(labels) if label == name]
    single = exact_rows(len(rows), seed)
    some = torch.linspace(0, len(single) - 1, min(MOST, len(single))).round().long()
    return [rows[row] for row in single[some].tolist()]


def _jpeg(pixels: Tensor) -> bytes:
    """pixels: uint8 [3, h, w]."""
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    image.thumbnail((SIDE, SIDE))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=_QUALITY)
    return stream.getvalue()
