"""CUB-200-2011: four tables that must fit together."""

from expect import expect_error
from protosteer.data.datasets.cub import CUB200
from protosteer.errors import DataError
from set_toys import READING, save


def write_cub(folder):
    names = ["001.Black_footed_Albatross", "002.Laysan_Albatross"]
    images = [f"{names[i % 2]}/bird_{i}.jpg" for i in range(6)]
    for i, name in enumerate(images):
        save(folder / "images" / name, (0, i * 40, 0))
    tables = {
        "images.txt": [f"{i + 1} {name}" for i, name in enumerate(images)],
        "image_class_labels.txt": [f"{i + 1} {i % 2 + 1}" for i in range(6)],
        "train_test_split.txt": [f"{i + 1} {int(i < 4)}" for i in range(6)],
        "classes.txt": [f"{i + 1} {name}" for i, name in enumerate(names)],
    }
    for name, lines in tables.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def test_cub_keeps_the_official_split(tmp_path):
    folder = write_cub(tmp_path / "CUB_200_2011")
    assert CUB200.locate(tmp_path) == CUB200.locate(folder) == folder
    dataset = CUB200.load(folder, READING)
    assert dataset.classes == ["001.Black_footed_Albatross", "002.Laysan_Albatross"]
    assert dataset.train.labels.tolist() == [0, 1, 0, 1] and dataset.test.labels.tolist() == [0, 1]
    assert [round(green / 40) for green in dataset.test.images.pixels([0, 1])[:, 1, 0, 0].tolist()] == [4, 5]


def test_cub_tables_that_do_not_fit(tmp_path):
    folder = write_cub(tmp_path)
    (folder / "images" / "002.Laysan_Albatross" / "bird_5.jpg").unlink()
    with expect_error("missing-file", DataError):
        CUB200.load(folder, READING)
    for table, text in (("train_test_split.txt", "1 1\n2 0\n"), ("images.txt", "1 a.jpg\n2\n")):
        (folder / table).write_text(text)
        with expect_error("damaged-file", DataError):
            CUB200.load(folder, READING)
