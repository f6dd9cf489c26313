"""Thumbnails of images that a task was learned from, for `MODEL.thumbs`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from protosteer.data.class_folders import rows_by_label
from protosteer.evidence.prototype_summary import EXACT_PROTOTYPES, exact_rows
from protosteer.model import thumbnails
from protosteer.model.thumbnails import Thumb
from protosteer.model.transaction import transaction
from protosteer.paper.task import task_seed
from protosteer.workflows.learn_folder import TaskSlot

MAX_THUMBNAILS = EXACT_PROTOTYPES  # of each class and task
SIDE = 64  # pixels
_JPEG_QUALITY = 80


def keep_thumbnails(path: Path, slot: TaskSlot) -> int:
    """Add thumbnails of a task that was just learned to the file beside its model; return how many.

    Of each class they are images that the model keeps as prototypes.
    """
    scan = slot.scan
    seed = task_seed(slot.base.settings.seed, list(scan.counts))
    with transaction(path) as change:  # classes forgotten meanwhile must not come back
        memory = change.read().memory
        kept_out = any(task.name == slot.name and task.metadata.held_out for task in memory.tasks)
        files = slot.learned if kept_out else scan.files
        of_class = rows_by_label(files.labels)
        rows = [row for name in scan.counts for row in _prototype_rows(of_class.get(name, []), seed)]
        images = scan.images(files, slot.base.backbone.preprocessing)
        thumbs = [
            Thumb(files.labels[row], scan.digests[files.paths[row]], _jpeg(images.pixels([row])[0])) for row in rows
        ]
        thumbnails.write(path, [*thumbnails.read(path, memory), *thumbs])
        thumbnails.follow(path, memory)
    return len(thumbs)


def _prototype_rows(rows: Sequence[int], seed: int) -> list[int]:
    """Return the rows of a class whose images are stored as prototypes; of many, evenly spaced ones."""
    single = exact_rows(len(rows), seed)
    even = torch.linspace(0, len(single) - 1, min(MAX_THUMBNAILS, len(single))).round().long()
    return [rows[row] for row in single[even].tolist()]


def _jpeg(pixels: Tensor) -> bytes:
    """Return a small JPEG file of pixels uint8 [3, h, w]."""
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    image.thumbnail((SIDE, SIDE))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=_JPEG_QUALITY)
    return stream.getvalue()
