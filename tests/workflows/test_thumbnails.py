"""Small pictures beside a model: which they are, and that none outlives what it was taught with."""

import io
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from conftest import tiny_backbone
from photo_toys import photos
from protosteer.cli import main
from protosteer.errors import ProtosteerWarning
from protosteer.learner import Learner
from protosteer.model import thumbnails
from protosteer.model.thumbnails import Thumb
from protosteer.settings import Settings
from protosteer.util.files import digest
from protosteer.workflows.folder_scan import scan_folder
from protosteer.workflows.learn_folder import TaskSlot, learn_folder
from protosteer.workflows.thumbnails import MAX_THUMBNAILS, SIDE, keep_thumbnails

pytestmark = pytest.mark.slow

CLASSES = ["ant", "bee", "cat"]


@pytest.fixture
def taught(tmp_path: Path) -> tuple[Path, Learner, Path]:
    """A model file with thumbnails, its learner, and the folder it was taught."""
    folder = photos(tmp_path / "spring", CLASSES, 48)
    learner, path = Learner(tiny_backbone(), Settings.preset("instant")), tmp_path / "m.protosteer"
    found = scan_folder(folder)
    learn_folder(learner, found)
    learner.save(path)
    assert keep_thumbnails(path, TaskSlot.prepare(learner, found, None, 0.1)) == MAX_THUMBNAILS * len(CLASSES)
    return path, learner, folder


def names(path: Path, learner: Learner) -> list[str]:
    return [thumb.name for thumb in thumbnails.read(path, learner.memory)]


def test_they_are_the_images_that_are_kept_as_points(taught):
    path, learner, folder = taught
    thumbs = thumbnails.read(path, learner.memory)
    for record in learner.memory.records:
        files = sorted((folder / record.name).iterdir())
        embeddings = F.normalize(learner.predict(files).embeddings, dim=1)
        nearest = (record.plain.points[: record.plain.num_exact] @ embeddings.T).argmax(dim=1).tolist()
        own = [thumb for thumb in thumbs if thumb.name == record.name]
        assert {digest(files[i].read_bytes()) for i in nearest} == {thumb.digest for thumb in own}
    for thumb in thumbs:
        with Image.open(io.BytesIO(thumb.jpeg)) as image:
            assert image.format == "JPEG" and max(image.size) <= SIDE and len(thumb.jpeg) < 4000


def test_a_forgotten_class_leaves_no_thumbnail(taught):
    path, learner, _ = taught
    jpegs = [thumb.jpeg for thumb in thumbnails.read(path, learner.memory) if thumb.name == "bee"]
    assert len(jpegs) == MAX_THUMBNAILS and all(jpeg in thumbnails.beside(path).read_bytes() for jpeg in jpegs)
    learner.forget("bee")
    assert "bee" not in names(path, learner)  # not even before it is written
    learner.save(path)
    kept = thumbnails.beside(path).read_bytes()
    assert not any(jpeg in kept for jpeg in jpegs) and b"bee" not in kept
    assert names(path, learner) == ["ant"] * MAX_THUMBNAILS + ["cat"] * MAX_THUMBNAILS


def test_the_same_command_clears_up_after_one_that_was_killed_before_the_thumbnails(taught, monkeypatch):
    """It is an error, since the class is gone already, but pictures and half-written files go."""
    path, learner, _ = taught
    with monkeypatch.context() as patch:
        patch.setattr(thumbnails, "follow", lambda *_: None)  # as if there had been no time for it
        learner.forget("bee")
        learner.save(path)
    half = path.with_name(".m.protosteer.thumbs.dead.tmp")
    half.write_bytes(b"bee")
    assert b"bee" in thumbnails.beside(path).read_bytes()
    assert main(["forget", str(path), "bee"]) == 2
    assert b"bee" not in thumbnails.beside(path).read_bytes() and not half.exists()
    assert names(path, learner) == ["ant"] * MAX_THUMBNAILS + ["cat"] * MAX_THUMBNAILS


def test_forgetting_a_task_takes_its_own_and_leaves_the_others_of_a_class(taught, tmp_path):
    path, learner, _ = taught
    more = scan_folder(photos(tmp_path / "summer", ["ant"], 3, seed=7), learner.memory)
    learn_folder(learner, more, holdout=0.0)
    learner.save(path)
    keep_thumbnails(path, TaskSlot.prepare(learner, more, None, 0.0))
    assert names(path, learner).count("ant") == MAX_THUMBNAILS + 3
    learner.forget(task="summer")
    learner.save(path)
    assert names(path, learner).count("ant") == MAX_THUMBNAILS


def test_where_all_is_forgotten_the_file_goes(taught, tmp_path):
    path, _, _ = taught
    other = Learner(tiny_backbone(), Settings.preset("instant"))
    learn_folder(other, scan_folder(photos(tmp_path / "autumn", ["dog", "eel"], 3)))
    other.save(path)
    assert not thumbnails.beside(path).exists()


def test_what_was_forgotten_meanwhile_does_not_come_back(taught):
    path, learner, folder = taught
    found = scan_folder(folder)
    on_disk = Learner.load(path, learner.backbone)
    on_disk.forget("cat")
    on_disk.save(path)
    keep_thumbnails(path, TaskSlot.prepare(learner, found, None, 0.1))
    assert {*names(path, learner)} == {"ant", "bee"}


def test_a_file_that_cannot_be_read_is_left_aside_and_goes_with_the_next_change(taught):
    path, learner, _ = taught
    place = thumbnails.beside(path)
    place.write_bytes(place.read_bytes()[:-1])
    with pytest.warns(ProtosteerWarning, match=r"m\.protosteer\.thumbs is not used"):
        assert thumbnails.read(path, learner.memory) == []
    learner.save(path)
    assert not place.exists()


@pytest.mark.parametrize("jpeg", [b"\xff", b"<svg onload=alert(1)>", b"\xff\xd8\xff" + b"0" * 2**15])
def test_pictures_that_are_none_are_refused(taught, jpeg):
    path, learner, _ = taught
    seen = int(learner.memory.records[0].file_digests[0])
    thumbnails.write(path, [Thumb("ant", seen, jpeg)])
    with pytest.warns(ProtosteerWarning, match="thumbs is not used"):
        assert thumbnails.read(path, learner.memory) == []


def test_equal_thumbnails_are_equal_bytes_and_no_answer_depends_on_them(taught):
    path, learner, folder = taught
    place, thumbs = thumbnails.beside(path), thumbnails.read(path, learner.memory)
    before = place.read_bytes(), learner.predict(folder / "ant").probabilities
    thumbnails.write(path, thumbs[::-1])
    assert place.read_bytes() == before[0]
    place.unlink()
    assert torch.equal(Learner.load(path, learner.backbone).predict(folder / "ant").probabilities, before[1])
