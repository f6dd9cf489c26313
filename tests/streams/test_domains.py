"""Domain-incremental and few-shot class-incremental streams."""

from pathlib import Path

import pytest
import torch
from stream_toys import PREPROCESSING, TOY, by_class, marks, toy

from conftest import easy_task, tiny_backbone
from expect import expect_error
from photo_toys import photos
from protosteer.data.images import ArrayImages
from protosteer.data.labelled import join
from protosteer.errors import DataError, SettingsError
from protosteer.evaluation.embedding_cache import EmbeddingCache
from protosteer.evaluation.experiment import Experiment
from protosteer.evaluation.protocol import run_stream
from protosteer.evaluation.sweep import plan_experiments
from protosteer.methods import METHODS
from protosteer.methods.cpp import CPP
from protosteer.methods.ncm import NCM
from protosteer.settings import Settings
from protosteer.streams import Benchmark, Stream, StreamOptions, Task, open_stream
from protosteer.streams.base import build

DOMAINS = Benchmark("toys", "Toys", tasks=2, crop=1.0, domains=True)


def test_a_domain_is_a_task_in_which_classes_return() -> None:
    dataset = join("toys", {"photo": toy(["ant", "bee"], 3, 2), "sketch": toy(["bee", "cat"], 4, 1)})
    stream = build(DOMAINS, dataset)
    assert [task.name for task in stream] == ["photo", "sketch"] and stream.classes == ["ant", "bee", "cat"]
    assert [task.classes for task in stream] == [["ant", "bee"], ["bee", "cat"]]
    assert [task.train_labels.count("bee") for task in stream] == [3, 4] and [len(t.test) for t in stream] == [4, 2]
    assert stream.repeats_classes and not stream.blurry and stream.about["class_order"] == stream.classes
    turned = build(DOMAINS, dataset, StreamOptions("seed:0"))
    assert {task.name for task in turned} == {"photo", "sketch"}
    for options in ({"tasks": 2}, {"increment": 1}, {"blurry": 0.1}):
        with expect_error("domain-option", DataError):
            build(DOMAINS, dataset, StreamOptions(**options))
    with expect_error("repeated-class", DataError, classes=["bee"]):
        Stream("toys", stream.tasks)


def test_folders_and_lists_of_domains(tmp_path: Path) -> None:
    photos(tmp_path / "d" / "photo", ["ant", "bee"], 5)
    photos(tmp_path / "d" / "sketch", ["ant", "bee"], 5, seed=1)
    stream = open_stream(f"domains:{tmp_path / 'd'}", StreamOptions(), PREPROCESSING)
    assert [(t.name, len(t.train), len(t.test)) for t in stream] == [("photo", 8, 2), ("sketch", 8, 2)]
    for half, rows in (("train", ("00", "01")), ("test", ("02",))):
        lines = [f"sketch/{name}/{row}.png {k}\n" for k, name in enumerate(("ant", "bee")) for row in rows]
        (tmp_path / "d" / f"sketch_{half}.txt").write_text("".join(lines))
    stream = open_stream(f"domains:{tmp_path / 'd'}", StreamOptions(), PREPROCESSING)
    assert [(t.name, len(t.train), len(t.test)) for t in stream] == [("photo", 8, 2), ("sketch", 4, 2)]
    assert stream[1].classes == ["ant", "bee"] and len(stream.about["checksums"]) == 3
    with expect_error("too-few-tasks", DataError):
        open_stream(f"domains:{tmp_path}", StreamOptions(), PREPROCESSING)
    for name in ("domains:", f"domains:{tmp_path / 'nowhere'}"):
        with expect_error("no-folder", DataError):
            open_stream(name, StreamOptions(), PREPROCESSING)


def two_domains(names: tuple[str, str] = ("day", "night")) -> Stream:
    """The same three classes, the second time darker."""
    classes, tasks = ["ant", "bee", "cat"], []
    for k, name in enumerate(names):
        train, labels = easy_task(classes)
        test, test_labels = easy_task(classes, per_class=5, seed=70)
        dim = [(images.float() * (1 - 0.15 * k)).to(torch.uint8) for images in (train, test)]
        tasks.append(Task(name, classes, ArrayImages(dim[0]), labels, ArrayImages(dim[1]), test_labels))
    return Stream("times", tasks, domains=True)


@pytest.mark.parametrize("rule", ["paper", "evidence", "ncm"])
def test_domains_are_learned_and_forward_transfer_is_measured(rule: str) -> None:
    stream = two_domains()
    quick = Settings.preset("paper", epochs=2, batch_size=8, neck_hidden=16, augmentation="crop", centroids=2)
    method = (
        NCM(tiny_backbone(), NCM.settings_class()) if rule == "ncm" else CPP(tiny_backbone(), quick.replace(rule=rule))
    )
    before: list[float] = []

    def on_task(i: int, run: object) -> None:
        if i == 0:  # by hand: the second domain's test images, before it is learned
            alone = type(method)(tiny_backbone(), method.settings)
            alone.restore(method.state())
            predicted = alone.predict(EmbeddingCache(alone, stream[1].test))
            actual = torch.tensor([alone.classes.index(label) for label in stream[1].test_labels])
            before.append(100.0 * int((predicted == actual).sum()) / len(actual))

    run = run_stream(method, stream, on_task=on_task)
    assert [len(row) for row in run.matrix] == [1, 2] and run.classes == [3, 0]
    assert run.rows[0]["next_accuracy"] == pytest.approx(before[0]) and run.rows[1]["next_accuracy"] is None
    figures = run.figures()
    assert figures["forward_transfer"] == pytest.approx(before[0] - 100 / 3) and before[0] > 40
    assert figures["bytes_per_class"] == pytest.approx(run.rows[-1]["bytes"] / 3)
    assert "seen_accuracy" not in run.rows[0] and run.diagnosis is not None


def test_methods_that_cannot_learn_a_class_again_are_refused_before_any_work(tmp_path: Path) -> None:
    with expect_error("no-repeated-classes", SettingsError, method="icarl"):
        Experiment.from_values({"stream": "digit-domains", "method": "icarl"})
    names = list(plan_experiments({"stream": "digit-domains", "method": "all"}))
    assert "icarl" not in names and "s-prompts" in names
    assert all(METHODS[name].supports_repeated_classes for name in names)


def test_shots_are_the_first_images_of_every_class_after_the_first_task() -> None:
    dataset = toy([f"c{i}" for i in range(6)], 6, 2)
    whole = build(TOY, dataset, StreamOptions(base=2, increment=2))
    few = build(TOY, dataset, StreamOptions(base=2, increment=2, shots=3))
    assert marks(few[0].train) == marks(whole[0].train)
    everything, kept = by_class(list(whole), "train"), by_class(list(few), "train")
    for name in (label for task in whole[1:] for label in task.classes):
        assert kept[name] == everything[name][:3]
    assert [marks(task.test) for task in few] == [marks(task.test) for task in whole]
    assert few.about["options"]["shots"] == 3
    with expect_error("bad-option", DataError, name="shots"):
        StreamOptions(shots=0)
