"""Class folders, list files, splits, unreadable files; and files of every kind seen through FileImages."""

import collections
import time

import numpy as np
import pytest
import torch
from PIL import Image

from expect import expect_error
from protosteer.data.class_folders import Files, name_classes, read_folder, read_list, split_readable, stratified_split
from protosteer.data.image_files import in_threads, tree_checksum
from protosteer.data.images import FileImages
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError

HALF = (0.5, 0.5, 0.5)
SMALL = Preprocessing(8, HALF, HALF)
RED = (255, 0, 0)


def save(path, image=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or Image.new("RGB", (12, 10), RED)).save(path, **options)
    return path


def test_class_folders_in_order_and_by_choice(tmp_path):
    for name in ("pear/2.png", "pear/1.png", "apple/9.png", "plum/1.png"):
        save(tmp_path / name)
    files = read_folder(tmp_path)
    assert files.labels == ["apple", "pear", "pear", "plum"]
    assert [path.name for path in files.paths] == ["9.png", "1.png", "2.png", "1.png"]
    assert files.numbers(["pear", "plum", "apple"]).tolist() == [2, 0, 0, 1]
    assert read_folder(tmp_path, ["plum", "apple"]).labels == ["plum", "apple"]
    with expect_error("missing-class", DataError):
        read_folder(tmp_path, ["plum", "fig"])
    with expect_error("unknown-class", DataError):
        files.numbers(["apple", "pear"])


def test_list_files(tmp_path):
    for name in ("n2/a.png", "n2/with space.png", "n1/b.png"):
        save(tmp_path / "x" / name)
    (tmp_path / "x" / "train.txt").write_text("# made by hand\n\nn2/a.png 0\nn2/with space.png 0\n  n1/b.png\t1\n")
    files = read_list(tmp_path / "x" / "train.txt")
    assert files.labels == ["0", "0", "1"]
    assert [path.name for path in files.paths] == ["a.png", "with space.png", "b.png"]
    classes, (named,) = name_classes(files)
    assert classes == ["n2", "n1"] and named.labels == ["n2", "n2", "n1"]
    (tmp_path / "x" / "test.txt").write_text("x/n1/b.png bee\n")
    assert read_list(tmp_path / "x" / "test.txt").paths == [tmp_path / "x" / "n1" / "b.png"]


@pytest.mark.parametrize(
    ("text", "words"),
    [("a.png 0\na.png\n", "bad-list"), ("a.png 0\n\nb.png 1\n", "missing-file"), ("# nothing\n", "no-images")],
)
def test_a_bad_line_is_told_by_its_number(tmp_path, text, words):
    save(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text(text)
    with expect_error(words, DataError) as caught:
        read_list(tmp_path / "list.txt")
    assert "list.txt" in str(caught.value)


def test_a_list_that_is_no_text(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00 1")
    with expect_error("not-utf8", DataError):
        read_list(tmp_path / "x.txt")


def listed(tmp_path, pairs):
    return Files([tmp_path / name for name, _ in pairs], [label for _, label in pairs])


def test_classes_get_names_in_natural_order(tmp_path):
    train = listed(tmp_path, [("b/1", "10"), ("a/1", "2"), ("b/2", "10")])
    test = listed(tmp_path, [("a/7", "2"), ("c/1", "11")])
    classes, (first, second) = name_classes(train, test)
    assert classes == ["a", "b", "c"]  # by number, not by name: 2, 10, 11
    assert first.labels == ["b", "a", "b"] and second.labels == ["a", "c"]
    mixed = listed(tmp_path, [("a/1", "10"), ("b/1", "10"), ("a/2", "9")])
    assert name_classes(mixed)[0] == ["9", "10"]  # a class in two folders
    shared = listed(tmp_path, [("a/1", "0"), ("a/2", "1")])
    assert name_classes(shared)[0] == ["0", "1"]  # two classes in one folder
    words = listed(tmp_path, [("a/1", "owl"), ("a/2", "ant"), ("a/3", "7")])
    assert name_classes(words)[0] == ["7", "ant", "owl"]


def test_the_split_is_exact_stratified_and_always_the_same():
    labels = ["a"] * 50 + ["b"] * 30 + ["c"] * 20
    train, test = stratified_split(labels, 0.2)
    assert sorted(train + test) == list(range(100)) and train == sorted(train) and test == sorted(test)
    assert collections.Counter(labels[row] for row in test) == {"a": 10, "b": 6, "c": 4}
    assert stratified_split(labels, 0.2) == (train, test) != stratified_split(labels, 0.2, seed=1)
    assert test[:5] == [0, 3, 9, 19, 21], "the split is part of data sets' definitions"
    with expect_error("cannot-split", DataError):
        stratified_split(["a", "b"], 0.5)


def test_unreadable_files_are_found_by_decoding(tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8))
    paths = [save(tmp_path / f"{i}.png", noise) for i in range(4)]
    paths[1].write_bytes(b"")
    paths[2].write_bytes(paths[2].read_bytes()[:2000])  # the heading is fine, the pixels end early
    good, bad = split_readable(Files(paths, ["a", "b", "c", "d"]))
    assert good == Files([paths[0], paths[3]], ["a", "d"]) and bad == Files(paths[1:3], ["b", "c"])
    assert split_readable(Files([], [])) == (Files([], []), Files([], []))
    with expect_error("unreadable-image", DataError):
        FileImages(paths, SMALL).pixels([0, 1])


def test_what_was_not_begun_when_reading_stops_is_not_read_any_more():
    begun = []

    def slow(item):
        begun.append(item)
        time.sleep(0.02)

    results = in_threads(slow, range(40))
    next(results)
    results.close()
    assert len(begun) < 40


def test_a_tree_is_known_by_names_and_sizes(tmp_path):
    paths = [save(tmp_path / "one" / name) for name in ("a.png", "b.png")]
    checksum = tree_checksum(paths, tmp_path)
    assert checksum.startswith("sha256:") and len(checksum) == 71
    assert tree_checksum(paths[::-1], tmp_path) == checksum != tree_checksum(paths[:1], tmp_path)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "one").rename(moved / "one")
    paths = [moved / "one" / path.name for path in paths]
    assert tree_checksum(paths, moved) == checksum
    paths[0].write_bytes(b"other")
    assert tree_checksum(paths, moved) != checksum
    with expect_error("missing-file", DataError):
        tree_checksum([moved / "gone.png"], moved)


def turned():
    """Red on top as stored; the tag says that the top belongs on the right."""
    image = Image.new("RGB", (32, 32), "blue")
    image.paste(RED, (0, 0, 32, 16))
    exif = Image.Exif()
    exif[0x0112] = 6
    return image, exif


def palette():
    image = Image.new("P", (16, 16), 1)
    image.putpalette([0, 0, 0, 250, 0, 0])
    return image


@pytest.mark.parametrize(
    ("name", "image", "options", "rgb"),
    [
        ("grey.png", Image.new("L", (16, 16), 77), {}, (77, 77, 77)),
        ("bits.png", Image.new("1", (16, 16), 1), {}, (255, 255, 255)),
        ("grey.jpg", Image.new("L", (16, 16), 77), {}, (77, 77, 77)),
        ("palette.png", palette(), {}, (250, 0, 0)),
        ("palette.gif", palette(), {}, (250, 0, 0)),
        ("clear-palette.png", palette(), {"transparency": 1}, (255, 255, 255)),
        ("clear-palette.gif", palette(), {"transparency": 1}, (255, 255, 255)),
        ("alpha.png", Image.new("RGBA", (16, 16), (0, 0, 0, 128)), {}, (127, 127, 127)),
        ("alpha.webp", Image.new("RGBA", (16, 16), (9, 9, 9, 0)), {"lossless": True}, (255, 255, 255)),
        ("grey-alpha.png", Image.new("LA", (16, 16), (50, 255)), {}, (50, 50, 50)),
        ("cmyk.jpg", Image.new("CMYK", (16, 16), (0, 255, 255, 0)), {}, (254, 0, 0)),
        ("cmyk.tif", Image.new("CMYK", (16, 16), (0, 255, 255, 0)), {}, (255, 0, 0)),
        ("deep.png", Image.fromarray(np.full((16, 16), 128 * 257, np.uint16)), {}, (128, 128, 128)),
        ("deep.tif", Image.fromarray(np.full((16, 16), 128 * 257, np.uint16)), {}, (128, 128, 128)),
    ],
)
def test_every_kind_of_file_becomes_rgb(tmp_path, name, image, options, rgb):
    pixels = FileImages([save(tmp_path / name, image, **options)], SMALL).pixels([0])
    assert pixels.shape == (1, 3, 8, 8) and pixels.dtype == torch.uint8
    gap = (pixels.int() - torch.tensor(rgb).view(1, 3, 1, 1)).abs().max()
    assert gap <= 1


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_the_orientation_tag_is_obeyed_in_files(tmp_path, suffix):
    image, exif = turned()
    pixels = FileImages([save(tmp_path / f"turned.{suffix}", image, exif=exif)], SMALL).pixels([0])[0]
    right, left = pixels[:, :, -1].float().mean(1), pixels[:, :, 0].float().mean(1)
    assert right[0] > 240 and right[2] < 15 and left[2] > 240 and left[0] < 15
