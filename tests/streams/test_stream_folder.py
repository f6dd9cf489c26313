"""`folder:PATH` on small PNGs: both layouts, the split, unreadable files, complaints."""

from pathlib import Path

import pytest
from PIL import Image
from stream_toys import PREPROCESSING

from expect import expect_error
from protosteer.data.downloads import to_stderr
from protosteer.errors import DataError
from protosteer.streams import StreamOptions, Task, find_benchmark, open_stream
from protosteer.streams.base import Stream


def draw(folder: Path, count: int) -> list[Path]:
    folder.mkdir(parents=True)
    paths = [folder / f"{i:02d}.png" for i in range(count)]
    for i, path in enumerate(paths):
        Image.new("RGB", (20, 16), (i, len(folder.name), 0)).save(path)
    return paths


def opened(path: Path, skip_unreadable: bool = False, say=to_stderr, **options) -> Stream:
    return open_stream(f"folder:{path}", StreamOptions(**options), PREPROCESSING, None, skip_unreadable, say)


def paths(task: Task, part: str) -> list[Path]:
    images = getattr(task, part)
    return [Path(images.name(row)) for row in range(len(images))]


@pytest.mark.parametrize("test", ["test", "val"])
def test_train_and_test_folders(tmp_path, test):
    for name, count in (("gnu", 2), ("ant", 3), ("Bee", 1)):
        draw(tmp_path / "train" / name, count)
        draw(tmp_path / test / name, 4 - count)
    stream = opened(tmp_path)
    assert stream.classes == ["Bee", "ant", "gnu"] and stream.name == f"folder:{tmp_path.name}"
    for task, count in zip(stream, (1, 3, 2), strict=True):
        (name,) = task.classes
        assert paths(task, "train") == sorted((tmp_path / "train" / name).iterdir())
        assert paths(task, "test") == sorted((tmp_path / test / name).iterdir())
        assert task.train_labels == [name] * count and task.test_labels == [name] * (4 - count)
        reds = task.train.pixels(range(count))[:, :2, 3, 3].tolist()
        assert reds == [[i, len(name)] for i in range(count)]


def test_test_wins_over_val_and_other_folders_do_not_count(tmp_path):
    for part in ("train", "test", "val", "extra"):
        draw(tmp_path / part / "ant", 2)
    stream = opened(tmp_path)
    assert stream.classes == ["ant"] and {path.parts[-3] for path in paths(stream[0], "test")} == {"test"}


def test_one_folder_is_split_class_by_class(tmp_path):
    counts = {"ant": 10, "bee": 2, "cat": 7, "dog": 3, "eel": 5, "fox": 4, "train": 6}
    for name, count in counts.items():
        draw(tmp_path / name, count)
    stream = opened(tmp_path)
    assert stream.classes == list(counts) and [len(t.classes) for t in stream] == [2, 2, 1, 1, 1]
    tests = {}
    for task in stream:
        train, test = paths(task, "train"), paths(task, "test")
        assert not set(train) & set(test) and train == sorted(train) and test == sorted(test)
        for name in task.classes:
            assert {p for p in train + test if p.parent.name == name} == set((tmp_path / name).iterdir())
            tests[name] = [p.name for p in test if p.parent.name == name]
    assert {name: len(found) for name, found in tests.items()} == {
        "ant": 2, "bee": 1, "cat": 1, "dog": 1, "eel": 1, "fox": 1, "train": 1
    }  # fmt: skip
    # numpy.random.RandomState(0).permutation(10) begins with 2, 8.
    assert tests["ant"] == ["02.png", "08.png"]


def test_the_split_of_a_class_does_not_depend_on_the_others(tmp_path):
    draw(tmp_path / "cat", 9)
    before = paths(opened(tmp_path)[0], "test")
    draw(tmp_path / "ant", 4)
    assert paths(opened(tmp_path)[1], "test") == before


def test_checksums_notice_a_change(tmp_path):
    draw(tmp_path / "ant", 5)
    first = opened(tmp_path).about["checksums"]
    assert first == opened(tmp_path).about["checksums"] and set(first) == {"train", "test"}
    (tmp_path / "ant" / "00.png").rename(tmp_path / "ant" / "99.png")
    assert opened(tmp_path).about["checksums"] != first


def test_unreadable_images_are_named_and_skipped_only_by_choice(tmp_path, capsys):
    for part in ("train", "test"):
        for name in ("ant", "bee"):
            draw(tmp_path / part / name, 3)
    broken = tmp_path / "train" / "bee" / "01.png"
    broken.write_bytes(b"not an image")
    with expect_error("unreadable-image", DataError, path=broken):
        opened(tmp_path)
    messages: list[str] = []
    task = opened(tmp_path, skip_unreadable=True, say=messages.append)[1]
    assert messages == [f"{broken} cannot be read as an image; skipped"]
    assert [path.name for path in paths(task, "train")] == ["00.png", "02.png"]
    opened(tmp_path, skip_unreadable=True)
    assert capsys.readouterr().err == f"{messages[0]}\n"  # where nobody listens


def test_a_class_that_cannot_be_read_at_all(tmp_path):
    draw(tmp_path / "ant", 3)
    for path in draw(tmp_path / "bee", 2):
        path.write_bytes(b"not an image")
    with expect_error("class-without-images", DataError, name="bee"):
        opened(tmp_path, skip_unreadable=True)


def test_complaints(tmp_path):
    with expect_error("no-folder", DataError):
        find_benchmark("folder:")
    with expect_error("no-class-folders", DataError):
        opened(tmp_path / "nowhere")
    draw(tmp_path / "one" / "ant", 1)
    with expect_error("class-without-images", DataError, name="ant", part="test"):
        opened(tmp_path / "one")
    draw(tmp_path / "half" / "train" / "ant", 3)
    with expect_error("no-test-folder", DataError, path=tmp_path / "half"):
        opened(tmp_path / "half")
    draw(tmp_path / "odd" / "train" / "ant", 3)
    draw(tmp_path / "odd" / "test" / "ant", 3)
    draw(tmp_path / "odd" / "test" / "bee", 3)
    with expect_error("class-without-images", DataError, name="bee", part="training"):
        opened(tmp_path / "odd")
    draw(tmp_path / "few" / "ant", 3)
    with expect_error("too-few-classes", DataError):
        opened(tmp_path / "few", tasks=2)


def test_home_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    draw(tmp_path / "pictures" / "ant", 3)
    assert open_stream("folder:~/pictures", StreamOptions(), PREPROCESSING).classes == ["ant"]
