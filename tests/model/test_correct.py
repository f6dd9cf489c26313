"""One image that was taken for something else, and what it changes."""

import pytest
import torch
from PIL import Image

from conftest import easy_task, tiny_backbone
from expect import expect_error
from photo_toys import QUICK, file_bytes, photos
from protosteer.corrections import correct
from protosteer.errors import DataError, LearnerError
from protosteer.evidence.kernel_ridge import KernelRidge
from protosteer.learner import Learner, merge
from protosteer.model import compaction
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.model.unlearning import undo
from protosteer.settings import Settings

INSTANT = Settings.preset("instant")
CLASSES = ["ant", "bee", "cat"]


def knowing(settings: Settings = INSTANT) -> Learner:
    learner = Learner(tiny_backbone(), settings)
    learner.learn(easy_task(CLASSES, 8), name="spring")
    return learner


def wrong(learner: Learner, taken_for: str = "ant") -> torch.Tensor:
    """An image [1, 3, h, w] that is taken for a class."""
    images, _ = easy_task([taken_for], 4, seed=9)
    return next(image[None] for image in images if learner.predict(image[None]).labels == [taken_for])


@pytest.mark.parametrize("settings", [INSTANT, QUICK.replace(rule="evidence"), QUICK])
@pytest.mark.parametrize("name", ["bee", "yak"])
def test_one_image_changes_the_answer_and_undo_takes_it_back(settings, name, tmp_path):
    learner = knowing(settings)
    before, image = file_bytes(learner, tmp_path), wrong(learner)
    record = learner.correct(image, name)
    assert record.corrected_from == "ant" and record.class_names == [name] and record.metadata.learned
    assert learner.predict(image).labels == [name] and learner.memory.corrections == [record]
    assert learner.undo() is record and file_bytes(learner, tmp_path) == before


def test_the_same_image_is_corrected_anew_not_twice(tmp_path):
    learner = knowing()
    image = wrong(learner)
    learner.correct(image, "bee")
    record = learner.correct(image, "cat")
    assert record.corrected_from == "bee" and learner.predict(image).labels == ["cat"]
    assert [r.class_names for r in learner.memory.corrections] == [["cat"]]
    learner.undo()
    # It counts as no more images than it must.
    (sure,) = learner.correct(image, "bee").classes
    assert int(sure.plain.counts) > 1 and sure.plain.num_exact == 0 and sure.images == 1
    (new,) = learner.correct(image, "yak").classes
    assert int(new.plain.counts) == 1 and new.plain.num_exact == 1


def test_a_file_is_known_by_its_content_and_its_name_is_kept(tmp_path):
    learner = knowing()
    folder = photos(tmp_path / "new", ["ant"], 2, seed=9)
    record = learner.correct(folder / "ant" / "00.png", "bee")
    assert record.metadata.file == "00.png"
    content = (folder / "ant" / "00.png").read_bytes()
    with Image.open(folder / "ant" / "00.png") as picture:
        assert learner.correct([picture.copy()], "cat", content).name == record.name
    assert len(learner.memory.corrections) == 1


def test_corrections_are_taken_back_in_any_order():
    learner = knowing()
    images = easy_task(["ant"], 3, seed=9)[0]
    made = [learner.correct(image[None], "bee") for image in images]
    assert learner.undo(made[1].name) is made[1] and learner.undo() is made[2] and learner.undo() is made[0]
    with expect_error("nothing-corrected", LearnerError):
        learner.undo()
    learner.correct(images[:1], "bee")
    with expect_error("unknown-correction", LearnerError, name="spring"):
        undo(learner.memory, "spring")
    assert learner.tasks == ["spring", made[0].name]


def test_what_cannot_be_one_correction_is_refused_and_nothing_changes():
    learner = knowing()
    with pytest.raises(DataError, match="3 images cannot be one correction"):
        learner.correct(easy_task(["ant"], 3)[0], "bee")
    with pytest.raises(DataError, match="no name"):
        learner.correct(wrong(learner), " ")
    with expect_error("nothing-learned", kind=LearnerError):
        Learner(tiny_backbone(), INSTANT).correct(wrong(learner), "bee")
    assert learner.tasks == ["spring"]


def test_corrected_images_do_not_calibrate():
    """They were chosen because they were hard: probabilities would be lower than accuracy."""
    learner = knowing()
    usual = learner.reader.classifier.passes[0]
    learner.correct(wrong(learner), "ant")  # counts as one image, which could be left out
    read = learner.reader.classifier.passes[0]
    assert len(read.scorer.statistics.loo_rows) == len(usual.loo_max_similarity) + 1
    assert len(read.loo_max_similarity) == len(usual.loo_max_similarity)


def test_a_correction_in_two_models_is_merged_once(tmp_path):
    mine, theirs = knowing(), Learner(tiny_backbone(), INSTANT)
    theirs.learn(easy_task(["dog", "eel"], 8), name="summer")
    image = wrong(mine)
    for learner in (mine, theirs):
        learner.correct(image, "bee")
    merged = merge(mine, theirs)
    assert merged.tasks[:1] == ["spring"] and len(merged.memory.corrections) == 1
    merged.save(tmp_path / "m.protosteer")
    read = Learner.load(tmp_path / "m.protosteer", mine.backbone)
    assert [r.corrected_from for r in read.memory.corrections] == ["ant"]


def test_confirmed_images_calibrate_and_corrected_ones_beside_them():
    learner = knowing()
    count = len(learner.reader.known_similarities())
    images = easy_task(CLASSES, 3, seed=5)[0]
    records = learner.confirm(images)
    assert all(record.confirmed and record.class_names == [record.corrected_from] for record in records)
    assert len(learner.reader.known_similarities()) == count + len(images)
    assert learner.memory.corrections == records and learner.confirm(images[:1])[0].name == records[0].name
    corrected = learner.correct(wrong(learner), "ant")
    assert (corrected.selection, records[0].selection) == ("corrected", "confirmed")
    for _ in range(len(images) + 1):
        learner.undo()
    assert learner.tasks == ["spring"]


def test_a_folder_is_confirmed_but_for_what_was_corrected_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "MIN_SINGLE", 1)
    monkeypatch.setattr(compaction, "MAX_SINGLE", 2)
    learner, folder = knowing(), photos(tmp_path / "new", ["ant"], 4, seed=9)
    corrected = [learner.correct(folder / "ant" / f"{i:02}.png", "bee").name for i in range(2)]
    assert learner.tasks == ["spring", "corrections", corrected[1]]  # the older one is compacted
    records = learner.confirm(folder)
    assert [record.metadata.file for record in records] == ["02.png", "03.png"]
    kinds = {
        kind: sum(t.images for t in learner.memory.tasks if t.selection == kind) for kind in ("corrected", "confirmed")
    }
    assert kinds == {"corrected": 2, "confirmed": 2}


def test_a_memory_with_tasks_more_joins_them_to_the_table_that_it_has():
    learner = knowing()
    memory, records = learner.memory, learner.confirm(easy_task(CLASSES, 2, seed=5)[0])
    for record in records:
        assert len(memory.table) == len(memory.record_tasks)
        memory = memory.with_task(record)
    built = Memory(memory.tasks).table
    assert built.names == memory.table.names and built.columns.keys() == memory.table.columns.keys()
    assert all(torch.equal(column, memory.table.columns[name]) for name, column in built.columns.items())
    assert all(torch.equal(rows, memory.table.starts[group]) for group, rows in built.starts.items())
    memory.remove(records[0])
    assert len(memory.table) == len(built) - 1


def test_no_number_of_corrections_builds_a_reader_or_grows_for_ever(tmp_path, monkeypatch):
    """Cost is counted: factors of large systems, tables joined, tasks and bytes; the latest can still be undone."""
    monkeypatch.setattr(compaction, "MIN_SINGLE", 3)
    monkeypatch.setattr(compaction, "MAX_SINGLE", 6)
    learner = knowing()
    reader, solved, sizes = learner.reader, [], []
    monkeypatch.setattr(KernelRidge, "_solve", lambda *_: solved.append(1))
    joins, join = [], ClassTable.concatenate
    monkeypatch.setattr(ClassTable, "concatenate", lambda tables: joins.append(len(tables)) or join(tables))
    images = easy_task(["ant"], 60, seed=9)[0]
    for image in images:
        learner = learner.copy()  # as a service does, which builds a reader in the background
        learner.use_reader(reader)
        reader = correct(learner, image[None], "yak").reader
        learner.use_reader(reader)
        learner.confirm(easy_task(["bee"], 1, seed=len(sizes))[0])
        sizes.append(len(learner.model.pack()))
        assert len(learner.tasks) <= 1 + 2 + 6
    monkeypatch.undo()
    compactions = 2 * len(images) // 3
    assert sum(count > 3 for count in joins) <= compactions and max(joins) <= 1 + 1 + 2 + 6
    assert not solved and max(sizes[-9:]) < max(sizes[-18:-9]) + 30 * 8  # digests of files
    assert learner.tasks[1:3] == ["corrections", "confirmations"]
    read = Learner.load(saved(learner, tmp_path), learner.backbone)
    assert read.memory.task("corrections").selection == "corrected"
    assert sum(task.images for task in read.memory.tasks if "yak" in task.class_names) == len(images)
    assert (
        read.predict(images).labels.count("yak") > 50 and read.predict(easy_task(["cat"], 5)[0]).labels == ["cat"] * 5
    )
    last = read.memory.corrections[-1]
    assert read.undo() is last and len(read.memory.corrections) < 6
    again = merge(read, Learner.load(saved(learner, tmp_path), learner.backbone), task_renames={"spring": "summer"})
    assert again.tasks.count("corrections-2") == 1
    again.forget("yak")
    assert "yak" not in again.classes


def saved(learner: Learner, folder) -> str:
    learner.save(folder / "m.protosteer")
    return str(folder / "m.protosteer")
