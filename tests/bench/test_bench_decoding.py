"""Both sides learn the same record; one of them decodes every file just once."""

from __future__ import annotations

from collections import Counter

import pytest
from PIL import Image

from protosteer.bench import decoding
from vit_toys import small

pytestmark = pytest.mark.slow


def test_files_are_decoded_in_every_epoch_or_once(monkeypatch, tmp_path):
    monkeypatch.setattr(decoding, "PHOTOS", 4)
    monkeypatch.setattr(decoding, "SIZE", (40, 30))
    monkeypatch.setattr(
        decoding, "SETTINGS", decoding.SETTINGS.replace(epochs=3, batch_size=4, neck_hidden=16)
    )
    paths = decoding.photographs(tmp_path, small())
    opened, learned, original = Counter(), [], Image.open
    monkeypatch.setattr(Image, "open", lambda f, **how: opened.update([str(f.name)]) or original(f, **how))
    learn_task = decoding.learn_task

    def counted(*arguments):
        before = sum(opened.values())
        record = learn_task(*arguments)
        learned.append((sum(opened.values()) - before, record.prompt))
        return record

    monkeypatch.setattr(decoding, "learn_task", counted)
    ratio = decoding.measure("learn_photos", small(), paths, 1)
    assert sorted(decoded for decoded, _ in learned) == [4, 4, 20, 20]  # once, or keys, three epochs, values
    assert all(prompt.equal(learned[0][1]) for _, prompt in learned)
    assert ratio.name == "learn_photos" and ratio.value > 0
