"""The sheet of augmented pictures: what it shows, that captions tell the truth, that a seed settles it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import contact_sheet
from protosteer.data.augment import Augmentation


@pytest.fixture(scope="module")
def named():
    return contact_sheet.originals()


def tile(page: Image.Image, row: int, column: int) -> Image.Image:
    x = (
        contact_sheet.GAP
        + column * (contact_sheet.TILE + contact_sheet.GAP)
        + contact_sheet.GAP * (column > 0)
    )
    y = contact_sheet.HEADING + row * (contact_sheet.TILE + contact_sheet.CAPTION)
    return page.crop((x, y, x + contact_sheet.TILE, y + contact_sheet.TILE))


def test_eight_different_originals_of_one_size(named):
    assert len(named) == 8 and len({name for name, _ in named}) == 8
    assert {image.size for _, image in named} == {(224, 224)} and {image.mode for _, image in named} == {
        "RGB"
    }
    assert len({image.tobytes() for _, image in named}) == 8
    assert min(np.asarray(image).std() for _, image in named) > 20  # nothing empty


def test_originals_stand_left_and_every_version_differs(named):
    page = contact_sheet.sheet(named[3:5], versions=3, seed=1, kind="paper")
    for row, (_, image) in enumerate(named[3:5]):
        tiles = [tile(page, row, column) for column in range(4)]
        small = image.resize(tiles[0].size, Image.Resampling.BOX)
        assert tiles[0].tobytes() == small.tobytes()
        assert len({one.tobytes() for one in tiles}) == 4


def test_seed_settles_the_sheet(named):
    pages = [contact_sheet.sheet(named[:1], 2, seed, "paper").tobytes() for seed in (1, 1, 2)]
    assert pages[0] == pages[1] != pages[2]


def test_captions_name_what_was_drawn():
    torch.manual_seed(0)
    drawn = Augmentation(contact_sheet.LEVELS).draw((300, 3, 20, 20))
    captions = [contact_sheet.happened(drawn, row) for row in range(300)]
    for word, chosen in (
        ("flip", drawn.mirrored),
        ("jitter", drawn.jittered),
        ("grey", drawn.grey),
        ("blur", drawn.blurred),
        ("solarize", drawn.solarized),
    ):
        assert [word in caption for caption in captions] == chosen.tolist(), word
    assert "crop only" in captions


def test_written_file_is_small_and_says_so(tmp_path, capsys):
    path = tmp_path / "sheet.png"
    contact_sheet.main(["--out", str(path), "--versions", "1", "--kind", "crop"])
    with Image.open(path) as page:
        assert page.format == "PNG" and page.mode == "P" and page.height > 8 * contact_sheet.TILE
    assert path.stat().st_size < 200_000
    assert f"wrote {path}" in capsys.readouterr().out
