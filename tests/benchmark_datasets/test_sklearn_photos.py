"""Details of scikit-learn's photographs: always there, always the same, and really out of their fields."""

import torch

from protosteer.data.datasets import sklearn_photos
from protosteer.data.datasets.base import Reading
from protosteer.data.datasets.registry import open_dataset
from protosteer.data.transforms import Preprocessing

READING = Reading(Preprocessing(64, (0.5,) * 3, (0.5,) * 3))


def test_every_field_has_its_details_and_they_are_the_same_every_time(tmp_path):
    first, again = (open_dataset("details", tmp_path, READING) for _ in range(2))
    assert first.classes == list(sklearn_photos.FIELDS)
    for part, other, count in (
        (first.train, again.train, sklearn_photos.TRAIN),
        (first.test, again.test, sklearn_photos.TEST),
    ):
        rows = range(len(part.images))
        assert part.labels.bincount().tolist() == [count] * len(sklearn_photos.FIELDS)
        assert part.images.pixels(rows).shape[1:] == (3, sklearn_photos.SIDE, sklearn_photos.SIDE)
        assert torch.equal(part.images.pixels(rows), other.images.pixels(rows))
    assert set(first.checksums) == {"china.jpg", "flower.jpg"}


def test_a_detail_of_an_even_ramp_tells_where_it_was_cut(monkeypatch):
    """Brightness aside, a square's grey levels lie in a stretch of its field as long as the square is wide."""
    monkeypatch.setattr(sklearn_photos, "BRIGHTNESS", 0.0)
    ramp = torch.arange(200, dtype=torch.uint8).expand(3, 100, 200)
    cut = sklearn_photos._details(ramp, torch.Generator().manual_seed(1))
    stretch = cut.amax(dim=(1, 2, 3)).float() - cut.amin(dim=(1, 2, 3)).float()
    assert stretch.min() >= 100 * sklearn_photos.SMALLEST - 3 and stretch.max() <= 100 * sklearn_photos.LARGEST + 1
    assert torch.equal(cut[:, :, 0], cut[:, :, -1]), "rows of a ramp are equal"
    assert len({int(level) for level in cut.amin(dim=(1, 2, 3))}) > 10
