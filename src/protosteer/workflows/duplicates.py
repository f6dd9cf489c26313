"""Near-duplicates: images that are copies of one another, also resized or saved as JPEG.

Pixels are compared, not embeddings: in some feature spaces a JPEG copy is further away than other images are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Copies of an image, resized or saved as JPEG, differ by less than this, other images by more: docs/explanation/suggest.md.
THUMBNAIL = 16  # pixels a side
MAX_DISTANCE = 5.0  # grey levels of 255, root mean square
MAX_CONTRAST_SHARE = 0.2  # of an image's own contrast: two nearly blank images are not the same
MAX_COMPARED = 20_000  # images that are compared with one another; the work grows as their number squared
_BLOCK = 512  # thumbnails that are compared with all others at once
_ROUNDING = 1e-6  # of squared distances, so that a blank image is a copy of itself


def thumbnails(pixels: Tensor) -> Tensor:
    """Return grey levels [N, THUMBNAIL²] of pixels uint8 [N, 3, h, w]."""
    grey = F.interpolate(pixels.float().mean(dim=1, keepdim=True), (THUMBNAIL, THUMBNAIL), mode="area")
    return grey.flatten(1)


def find_near_duplicates(thumbnails: Tensor) -> dict[int, int]:
    """Map rows of thumbnails [N, pixels] that copy an earlier original to the row of that original."""
    points = thumbnails.double()
    squares = points.square().sum(dim=1)
    contrast = points.std(dim=1, correction=0)
    limits = (MAX_CONTRAST_SHARE * contrast).clamp(max=MAX_DISTANCE).square() * points.shape[1] + _ROUNDING
    copies: dict[int, int] = {}
    for start in range(0, len(points), _BLOCK):
        block, columns = slice(start, start + _BLOCK), slice(start + _BLOCK)
        distances = squares[block, None] + squares[columns] - 2 * points[block] @ points[columns].T
        matches = distances <= torch.minimum(limits[block, None], limits[columns])
        for row, column in matches.tril(diagonal=start - 1).nonzero().tolist():
            if column not in copies:
                copies.setdefault(start + row, column)
    return copies


def find_duplicates(digests: list[int], thumbnails: Tensor) -> dict[int, int]:
    """Map rows of N files to the row of the original that they copy.

    Files of the same digest are copies, however many there are. Thumbnails [N, pixels] are compared of at most
    `MAX_COMPARED` files.
    """
    originals: dict[int, int] = {}
    exact = {row: originals[number] for row, number in enumerate(digests) if originals.setdefault(number, row) != row}
    if len(digests) > MAX_COMPARED:
        return exact
    return exact | find_near_duplicates(thumbnails)
