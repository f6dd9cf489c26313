"""Everything a user may hold in hand becomes pixels and labels, or one clear line."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from expect import expect_error
from protosteer.data.images import ArrayImages, FileImages, ForgivingFiles, as_images, as_labelled
from protosteer.data.prefetch import prefetched
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError

HALF = (0.5, 0.5, 0.5)
SMALL = Preprocessing(8, HALF, HALF)
RED, GREEN = (255, 0, 0), (0, 255, 0)


def save(path, colour=RED, size=(12, 10)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


class Pairs(Dataset):
    """A map-style dataset that counts how often it is read."""

    def __init__(self, items, **attributes):
        self.items, self.reads = items, 0
        self.__dict__.update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, row):
        self.reads += 1
        return self.items[row]


def colours(images):
    """Colour of each image's first pixel."""
    return [tuple(pixels[:, 0, 0].tolist()) for pixels in images.pixels(range(len(images)))]


def test_uint8_batches_stay_as_they_are():
    pixels = torch.randint(0, 256, (5, 3, 6, 6), dtype=torch.uint8)
    images = as_images(pixels, SMALL)
    assert len(images) == 5 and torch.equal(images.pixels([4, 1]), pixels[[4, 1]])
    assert torch.equal(as_images(pixels.numpy(), SMALL).pixels(range(5)), pixels)
    assert torch.equal(as_images(pixels[0], SMALL).pixels([0])[0], pixels[0])
    ready = ArrayImages(pixels)
    assert as_images(ready, SMALL) is ready


@pytest.mark.parametrize(
    ("shape", "count"),
    [((4, 3, 6, 7), 4), ((4, 6, 7, 3), 4), ((4, 6, 7), 4), ((6, 7, 3), 1), ((6, 7), 1), ((4, 1, 6, 7), 4)],
)
def test_numpy_layouts(shape, count):
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    pixels = as_images(array, SMALL).pixels(range(count))
    assert pixels.shape == (count, 3, 6, 7)
    chw = array if 3 not in shape or shape[1] == 3 else np.moveaxis(array, -1, -3)
    assert torch.equal(pixels, torch.from_numpy(chw.copy()).reshape(count, -1, 6, 7).expand(-1, 3, -1, -1))


def test_floats_are_rounded_to_levels():
    pixels = torch.arange(192, dtype=torch.uint8).view(1, 3, 8, 8)
    assert torch.equal(as_images(pixels / 255, SMALL).pixels([0]), pixels)
    assert torch.equal(as_images((pixels / 255).numpy().astype(np.float64), SMALL).pixels([0]), pixels)
    between = torch.full((1, 3, 2, 2), 100.7 / 255)
    assert (as_images(between, SMALL).pixels([0]) == 101).all()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int64", ">i4"])
def test_flipped_and_unusual_integer_arrays_are_read(dtype):
    array = np.arange(192).astype(dtype).reshape(1, 8, 8, 3)[:, :, ::-1]
    expected = torch.from_numpy(array.astype(np.uint8)).permute(0, 3, 1, 2)
    assert torch.equal(as_images(array, SMALL).pixels([0]), expected)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (torch.randn(2, 3, 8, 8), "bad-pixel-range"),
        (torch.full((2, 3, 8, 8), float("nan")), "bad-pixel-range"),
        (torch.full((2, 3, 8, 8), 300), "bad-pixel-range"),
        (torch.ones(2, 3, 8, 8, dtype=torch.bool), "bad-dtype"),
        (np.full((2, 3, 8, 8), "a"), "bad-dtype"),
        (torch.zeros(5, 8, 8, dtype=torch.uint8), "bad-shape"),
        (np.zeros((3, 8, 8), np.uint8), "ambiguous-shape"),
        (np.zeros((2, 5, 8, 8), np.uint8), "bad-shape"),
        (torch.zeros(0, 3, 8, 8), "no-images"),
        ([], "no-images"),
        (3.5, "unsupported-data"),
        ({"a": 1}, "unsupported-data"),
    ],
)
def test_arrays_that_are_not_images_are_refused(data, word):
    with expect_error(word, DataError) as caught:
        as_images(data, SMALL)
    assert "\n" not in str(caught.value)


def test_array_images_wants_uint8():
    with expect_error("bad-array", DataError):
        ArrayImages(torch.zeros(2, 3, 8, 8))


def test_pil_images_of_any_size_share_one_canvas():
    images = as_images([Image.new("RGB", (20, 9), RED), Image.new("L", (3, 4), 7)], SMALL)
    assert images.pixels([0, 1]).shape == (2, 3, 8, 8) and colours(images) == [RED, (7, 7, 7)]
    assert colours(as_images(Image.new("RGB", (5, 5), GREEN), SMALL)) == [GREEN]


def test_lists_of_arrays():
    same = [torch.full((3, 5, 5), v, dtype=torch.uint8) for v in (1, 2)]
    assert as_images(same, SMALL).pixels([1]).shape == (1, 3, 5, 5)
    mixed = [np.full((5, 6, 3), 1, np.uint8), np.full((9, 4, 3), 2, np.uint8)]
    assert colours(as_images(mixed, SMALL)) == [(1, 1, 1), (2, 2, 2)]


def test_a_folder_is_read_recursively_in_sorted_order(tmp_path):
    names = ["b.png", "a/z.JPG", "a/c.bmp", "a/deep/x.gif"]
    for name in names:
        save(tmp_path / name)
    save(tmp_path / ".hidden.png")
    save(tmp_path / ".thumbs" / "t.png")
    (tmp_path / "notes.txt").write_text("not an image")
    images = as_images(tmp_path, SMALL)
    found = [images.name(row) for row in range(len(images))]
    assert found == [str(tmp_path / n) for n in ("a/c.bmp", "a/deep/x.gif", "a/z.JPG", "b.png")]


def test_files_keep_the_order_asked_for(tmp_path):
    paths = [save(tmp_path / f"{i}.png", (i, 2 * i, 0)) for i in range(20)]
    images = as_images([str(path) for path in paths], SMALL)
    rows = [13, 2, 2, 19]
    assert [tuple(p[:, 0, 0].tolist()) for p in images.pixels(rows)] == [(r, 2 * r, 0) for r in rows]
    assert colours(as_images(paths[3], SMALL)) == [(3, 6, 0)]


def test_files_are_decoded_only_when_asked_for(tmp_path):
    good, bad = save(tmp_path / "a.png"), tmp_path / "b.png"
    bad.write_bytes(b"nonsense")
    images = as_images(tmp_path, SMALL)
    assert images.pixels([0]).shape == (1, 3, 8, 8) and images.name(0) == str(good)
    with expect_error("unreadable-image", DataError):
        images.pixels([0, 1])


def test_a_truncated_file_is_named(tmp_path):
    path = tmp_path / "cut.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:1500])
    with expect_error("unreadable-image", DataError):
        as_images(path, SMALL).pixels([0])


def test_a_decompression_bomb_is_named(tmp_path, monkeypatch):
    path = save(tmp_path / "huge.png", size=(100, 100))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with expect_error("image-too-large", DataError):
        as_images(path, SMALL).pixels([0])


def test_an_animation_gives_its_first_frame(tmp_path):
    frames = [Image.new("RGB", (9, 9), colour) for colour in (RED, GREEN)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert colours(as_images(tmp_path / "a.gif", SMALL)) == [RED]


def test_paths_that_lead_nowhere(tmp_path):
    with expect_error("missing-file", DataError):
        as_images(tmp_path / "absent", SMALL)
    with expect_error("missing-file", DataError):
        as_images([save(tmp_path / "a.png"), tmp_path / "absent.png"], SMALL)
    (tmp_path / "empty").mkdir()
    with expect_error("no-images", DataError):
        as_images(tmp_path / "empty", SMALL)


def test_forgiving_files_are_black_where_they_cannot_be_read(tmp_path):
    paths = [save(tmp_path / f"{i}.png", (i, 9, 9)) for i in range(20)]
    for i in (3, 11):
        paths[i].write_bytes(b"nonsense")
    paths[15].unlink()
    images = ForgivingFiles(paths, SMALL)
    assert as_images(images, SMALL) is images and images.errors == {}
    assert images.pixels([0, 2]).shape == (2, 3, 8, 8) and images.errors == {}
    pixels = images.pixels(range(20))
    bad = {3, 11, 15}
    assert colours(images) == [(0, 0, 0) if i in bad else (i, 9, 9) for i in range(20)]
    assert all(not pixels[i].any() for i in bad)
    assert images.errors.keys() == bad and all(f"{i}.png" in line for i, line in images.errors.items())
    assert all("\n" not in line for line in images.errors.values())


def test_forgiving_files_have_one_size_and_are_read_ahead(tmp_path):
    cropped = Preprocessing(8, HALF, HALF, crop=0.8)
    paths = [save(tmp_path / "a.png", size=(40, 11)), tmp_path / "b.png"]
    paths[1].write_bytes(b"")
    images = ForgivingFiles(paths, cropped)
    parts = list(prefetched(images, [[0, 1], [1]]))
    assert [tuple(part.shape) for part in parts] == [(2, 3, 10, 10), (1, 3, 10, 10)]
    assert list(images.errors) == [1] and cropped(parts[0]).shape == (2, 3, 8, 8)


def test_class_folders(tmp_path):
    save(tmp_path / "pear" / "2.png", GREEN)
    save(tmp_path / "pear" / "more" / "1.png", GREEN)
    save(tmp_path / "apple" / "9.png", RED)
    save(tmp_path / "apple" / ".DS_Store.png")
    save(tmp_path / ".cache" / "x.png")
    (tmp_path / "apple" / "list.csv").write_text("a,b")
    (tmp_path / "README.md").write_text("about")
    images, labels = as_labelled(str(tmp_path), SMALL)
    assert isinstance(images, FileImages) and labels == ["apple", "pear", "pear"]
    assert colours(images) == [RED, GREEN, GREEN]


def test_folders_that_cannot_be_learned(tmp_path):
    with expect_error("no-class-folders", DataError):
        as_labelled(tmp_path / "absent", SMALL)
    with expect_error("no-class-folders", DataError):
        as_labelled(tmp_path, SMALL)
    save(tmp_path / "cat" / "1.png")
    (tmp_path / "dog").mkdir()
    with expect_error("empty-class-folder", DataError):
        as_labelled(tmp_path, SMALL)
    stray = save(tmp_path / "stray.png")
    with expect_error("loose-image", DataError):
        as_labelled(tmp_path, SMALL)
    with expect_error("no-class-folders", DataError):
        as_labelled(stray, SMALL)


@pytest.mark.parametrize(
    "labels",
    [[3, 1], ["3", "1"], np.array([3, 1]), torch.tensor([3, 1]), [np.int64(3), torch.tensor(1)], (np.str_("3"), 1)],
)
def test_labels_become_strings(labels):
    images, names = as_labelled((torch.zeros(2, 3, 4, 4, dtype=torch.uint8), labels), SMALL)
    assert len(images) == 2 and names == ["3", "1"] and all(type(name) is str for name in names)


@pytest.mark.parametrize(
    ("labels", "word"),
    [
        ([1], "label-count"),
        ([1.5, 2], "bad-label"),
        ([1, ""], "bad-label"),
        ([1, None], "bad-label"),
        (torch.eye(2), "bad-label"),
        ("ab", "bad-label"),
        (7, "bad-label"),
    ],
)
def test_labels_that_are_not_labels(labels, word):
    with expect_error(word, DataError):
        as_labelled((torch.zeros(2, 3, 4, 4, dtype=torch.uint8), labels), SMALL)


def test_labelled_pairs_of_files(tmp_path):
    paths = [save(tmp_path / "a.png", RED), save(tmp_path / "b.png", GREEN)]
    images, labels = as_labelled((paths, ["r", "g"]), SMALL)
    assert colours(images) == [RED, GREEN] and labels == ["r", "g"]


def test_a_dataset_is_read_when_asked_for():
    items = [(Image.new("RGB", (9, 7), RED), 4), (torch.full((3, 5, 5), 0.2), np.int64(0))]
    dataset = Pairs(items)
    images, labels = as_labelled(dataset, SMALL)
    assert labels == ["4", "0"]
    dataset.reads = 0
    assert images.pixels([1]).shape == (1, 3, 8, 8) and dataset.reads == 1
    assert colours(images) == [RED, (51, 51, 51)]


def test_targets_spare_the_reading():
    items = [(Image.new("RGB", (9, 7), RED), 9)] * 3
    dataset = Pairs(items, targets=[1, 0, 1], classes=["cat", "dog"])
    assert as_labelled(dataset, SMALL)[1] == ["dog", "cat", "dog"]
    assert as_labelled(Pairs(items, targets=torch.tensor([1, 0, 1])), SMALL)[1] == ["1", "0", "1"]
    assert as_labelled(Subset(dataset, [1, 2]), SMALL)[1] == ["cat", "dog"] and dataset.reads == 0


def test_a_target_transform_is_obeyed():
    items = [(Image.new("RGB", (9, 7), RED), 9)] * 2
    dataset = Pairs(items, targets=[1, 0], classes=["cat", "dog"], target_transform=lambda label: 9)
    assert as_labelled(dataset, SMALL)[1] == ["9", "9"]


def test_a_tensor_dataset_is_an_array():
    pixels = torch.randint(0, 256, (3, 3, 5, 5), dtype=torch.uint8)
    images, labels = as_labelled(TensorDataset(pixels, torch.tensor([2, 0, 1])), SMALL)
    assert torch.equal(images.pixels(range(3)), pixels) and labels == ["2", "0", "1"]


def test_datasets_with_faults():
    with expect_error("unsupported-data", DataError):
        as_labelled([1, 2], SMALL)
    with expect_error("unsupported-data", DataError):
        as_labelled(Pairs([Image.new("RGB", (4, 4))]), SMALL)
    with expect_error("no-images", DataError):
        as_labelled(Pairs([]), SMALL)
    normalised = Pairs([(torch.zeros(3, 4, 4), 0), (torch.randn(3, 4, 4), 1)])
    with expect_error("bad-pixel-range", DataError):
        as_labelled(normalised, SMALL)[0].pixels([0, 1])
