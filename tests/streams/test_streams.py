"""The register of benchmarks, and those made of catalogue data sets, with small ones in their place."""

from pathlib import Path

import pytest
from stream_toys import PREPROCESSING, TEST, by_class, toy

from expect import expect_error
from protosteer.data.datasets import registry
from protosteer.data.labelled import Dataset
from protosteer.errors import DataError
from protosteer.streams import StreamOptions, find_benchmark, open_stream

FIVE = ["cifar10", "notmnist", "mnist", "svhn", "fashion-mnist"]


@pytest.fixture
def asked_for(monkeypatch) -> list[tuple]:
    """Ten classes of every data set, 200 of the large ones; returns what was asked for."""
    asked: list[tuple] = []

    def open_dataset(name, data_dir, reading) -> Dataset:
        asked.append((name, data_dir, reading.preprocessing, reading.skip_unreadable))
        reading.say(f"reading {name}")
        count = {"cifar100": 100, "imagenet-subset": 100, "imagenet-r": 200, "cub200": 200}.get(name, 10)
        # As many images as the name's place says, so that mixed-up parts show.
        extra = FIVE.index(name) if name in FIVE else 0
        return toy([f"{name[:2]}{i:03d}" for i in range(count)], 2 + extra, 1 + extra)

    monkeypatch.setattr(registry, "open_dataset", open_dataset)
    return asked


@pytest.mark.parametrize(
    ("name", "dataset", "tasks", "size", "crop"),
    [
        ("split-cifar100", "cifar100", 10, 10, 1.0),
        ("imagenet-subset", "imagenet-subset", 10, 10, 0.875),
        ("imagenet-r", "imagenet-r", 10, 20, 0.875),
        ("cub200", "cub200", 10, 20, 0.875),
    ],
)
def test_streams_of_one_data_set(asked_for, name, dataset, tasks, size, crop):
    messages: list[str] = []
    stream = open_stream(name, StreamOptions(), PREPROCESSING, Path("d"), True, messages.append)
    assert asked_for == [(dataset, Path("d"), PREPROCESSING, True)] and messages == [f"reading {dataset}"]
    assert stream.name == name and [len(t.classes) for t in stream] == [size] * tasks
    assert find_benchmark(name).crop == crop
    for options, sizes in (
        ({"tasks": 20}, [size * tasks // 20] * 20),
        ({"base": 50, "increment": 10}, [50] + [10] * (size * tasks // 10 - 5)),
    ):
        made = open_stream(name, StreamOptions("seed:1993", **options), PREPROCESSING)
        assert [len(t.classes) for t in made] == sizes


def test_five_datasets_in_the_authors_order(asked_for):
    stream = open_stream("five-datasets", StreamOptions(), PREPROCESSING)
    assert [row[0] for row in asked_for] == FIVE and find_benchmark("five-datasets").crop == 1.0
    for i, (name, t) in enumerate(zip(FIVE, stream, strict=True)):
        assert t.classes == [f"{name}/{name[:2]}{k:03d}" for k in range(10)]
        assert len(t.train) == 10 * (2 + i) and len(t.test) == 10 * (1 + i)
    assert stream.about["checksums"] == {f"{name}/toy.bin": "md5:0" for name in FIVE}


def test_all_that_the_five_lack_is_reported_together(monkeypatch):
    def absent(name: str, *_: object, **__: object) -> Dataset:
        raise DataError(f"{name} is absent")

    monkeypatch.setattr(registry, "open_dataset", absent)
    with pytest.raises(DataError) as error:
        open_stream("five-datasets", StreamOptions(), PREPROCESSING)
    assert str(error.value) == "; and ".join(f"{name} is absent" for name in FIVE)


def test_tasks_that_mix_the_five(asked_for):
    """Each image stays with its class: a part's own row numbers are those of the part alone."""
    stream = open_stream("five-datasets", StreamOptions("seed:7", tasks=5), PREPROCESSING)
    mixed = [{label.split("/")[0] for label in t.classes} for t in stream]
    assert max(len(parts) for parts in mixed) > 2 and sorted(stream.classes) != stream.classes
    found = {split: by_class(stream, split) for split in ("train", "test")}
    for i, name in enumerate(FIVE):
        alone = toy([f"{name[:2]}{k:03d}" for k in range(10)], 2 + i, 1 + i)
        for split, first in (("train", 0), ("test", TEST)):
            labels = getattr(alone, split).labels.tolist()
            for k in range(10):
                expected = [(first, row) for row, label in enumerate(labels) if label == k]
                assert found[split][f"{name}/{name[:2]}{k:03d}"] == expected
    assert sum(len(t.train) for t in stream) == sum(10 * (2 + i) for i in range(5))


def test_a_name_that_nobody_knows():
    for find in (find_benchmark, lambda name: open_stream(name, StreamOptions(), PREPROCESSING)):
        with expect_error("unknown-stream", DataError, name="split-cifar10"):
            find("split-cifar10")
