"""A folder, a list and a saved image set of the same images teach the same, to the bit."""

from pathlib import Path

import pytest

from photo_toys import EVIDENCE, file_bytes, photos, taught
from protosteer.data.class_folders import read_folder
from protosteer.workflows.folder_scan import scan_folder
from set_toys import save_set


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return photos(tmp_path / "spring", ["ant", "bee", "cat"], 5)


def test_lists_and_saved_sets_teach_what_their_folder_teaches(folder, tmp_path):
    pytest.importorskip("pyarrow", reason="image sets in Arrow files need pyarrow")
    files = read_folder(folder)
    pairs = zip(reversed(files.paths), reversed(files.labels), strict=True)
    lines = "".join(f"{path.relative_to(tmp_path)},{label}\n" for path, label in pairs)
    (tmp_path / "spring.csv").write_text(f"path,label\n{lines}")
    images = [{"bytes": path.read_bytes(), "path": None} for path in files.paths]
    saved = save_set(tmp_path / "saved" / "spring", images, files.labels, files=2)
    wanted = file_bytes(taught(folder, settings=EVIDENCE), tmp_path)
    for source in (tmp_path / "spring.csv", saved):
        learner = taught(source, settings=EVIDENCE)
        assert learner.tasks == ["spring"] and file_bytes(learner, tmp_path) == wanted


def test_a_list_is_surveyed_class_by_class(folder, tmp_path):
    (folder / "bee" / "02.png").write_bytes(b"no image")
    files = read_folder(folder)
    lines = "".join(f"{path},{label}\n" for path, label in zip(files.paths, files.labels, strict=True))
    (tmp_path / "all.csv").write_text(f"path,label\n{lines}")
    before = taught(photos(tmp_path / "winter", ["bee"]))
    found = scan_folder(tmp_path / "all.csv", before.memory)
    assert found.counts == {"ant": 5, "bee": 4, "cat": 5} and found.known == {"bee": ["winter"]}
    assert found.unreadable.paths == [folder / "bee" / "02.png"]
    left = found.without_known()
    assert left.counts == {"ant": 5, "cat": 5} and not len(left.unreadable)
    (tmp_path / "bees.csv").write_text(f"path,label\n{folder / 'bee' / '00.png'},bee\n")
    assert not scan_folder(tmp_path / "bees.csv", before.memory).without_known().counts
