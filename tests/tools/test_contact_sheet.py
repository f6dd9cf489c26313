"""The sheet of augmented pictures: what it shows, that captions tell the truth, that a seed settles it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import contact_sheet
from protosteer.data.augment import Augmentation

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def named():
    return contact_sheet.originals()


def test_eight_different_originals_of_one_size(named):
    assert len({name for name, _ in named}) == len({image.tobytes() for _, image in named}) == 8
    assert {(image.size, image.mode) for _, image in named} == {((224, 224), "RGB")}
    assert min(np.asarray(image).std() for _, image in named) > 20  # nothing empty


def test_every_version_differs_and_a_seed_settles_them(named):
    page = contact_sheet.sheet(named[3:5], versions=3)
    assert page.tobytes() == contact_sheet.sheet(named[3:5], versions=3).tobytes()
    side = contact_sheet.TILE
    for row in range(2):
        y = contact_sheet.HEADING + row * (side + contact_sheet.CAPTION)
        places = [contact_sheet.GAP * (1 + (k > 0)) + k * (side + contact_sheet.GAP) for k in range(4)]
        tiles = [np.asarray(page.convert("RGB").crop((x, y, x + side, y + side)), float) for x in places]
        assert len({tile.tobytes() for tile in tiles}) == 4
        small = np.asarray(named[3 + row][1].resize((side, side), Image.Resampling.BOX), float)
        assert abs(tiles[0] - small).mean() < 8  # the original stands left, but for the 256 colours
        assert min(abs(tile - small).mean() for tile in tiles[1:]) > 16


def test_captions_name_what_was_drawn():
    torch.manual_seed(0)
    drawn = Augmentation(contact_sheet.LEVELS).draw((300, 3, 20, 20))
    captions = [contact_sheet.happened(drawn, row) for row in range(300)]
    chosen = (drawn.mirrored, drawn.jittered, drawn.grey, drawn.blurred, drawn.solarized)
    for word, flags in zip(("flip", "jitter", "grey", "blur", "solarize"), chosen, strict=True):
        assert [word in caption for caption in captions] == flags.tolist(), word
    assert "crop only" in captions


def test_the_sheet_of_the_docs_is_written(tmp_path, capsys):
    path = tmp_path / "sheet.png"
    contact_sheet.main(["--out", str(path)])
    with Image.open(path) as page:
        assert page.format == "PNG" and page.mode == "P" and page.height > 8 * contact_sheet.TILE
    assert path.stat().st_size < 600_000 and f"wrote {path}" in capsys.readouterr().out
