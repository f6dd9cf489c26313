"""ImageNet-Subset, by both kinds of lists."""

from collections import Counter

from expect import expect_error
from protosteer.data.datasets.imagenet_subset import IMAGENET_SUBSET
from protosteer.data.datasets.registry import open_dataset
from protosteer.errors import DataError
from set_toys import READING, save


def write_subset(folder):
    for half in ("train", "val"):
        for wnid in ("n01440764", "n01443537", "n09999999"):
            save(folder / half / wnid / f"{half}.JPEG")
    return folder


def test_imagenet_subset_by_lists(tmp_path):
    folder = write_subset(tmp_path / "imagenet100")
    for name, half in (("train_100.txt", "train"), ("val_100.txt", "val")):
        lines = [f"{half}/n01443537/{half}.JPEG 0", f"{half}/n01440764/{half}.JPEG 1"]
        (folder / name).write_text("\n".join(lines))
    assert IMAGENET_SUBSET.locate(tmp_path) == folder
    dataset = IMAGENET_SUBSET.load(folder, READING)
    assert dataset.classes == ["n01443537", "n01440764"] and dataset.train.labels.tolist() == [0, 1]


def test_imagenet_subset_by_a_list_of_classes(tmp_path):
    folder = write_subset(tmp_path)
    (folder / "classes.txt").write_text("# two\nn09999999\nn01440764 tench\n")
    dataset = IMAGENET_SUBSET.load(folder, READING)
    assert dataset.classes == ["n09999999", "n01440764"] and Counter(dataset.test.labels.tolist()) == {0: 1, 1: 1}
    assert dataset.train.images.name(0) == str(folder / "train" / "n09999999" / "train.JPEG")


def test_imagenet_subset_cannot_be_fetched(tmp_path):
    with expect_error("missing-dataset", DataError):
        open_dataset("imagenet-subset", tmp_path, READING)
