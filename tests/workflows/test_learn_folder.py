"""A folder of pictures becomes a task: what is found, what is held out, and that all happens or nothing."""

import collections
import dataclasses
import itertools
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from conftest import tiny_backbone
from expect import expect_error
from photo_toys import ALONE, EVIDENCE, QUICK, file_bytes, photos, taught
from protosteer.data import decode_cache
from protosteer.data.class_folders import Files
from protosteer.data.image_files import SKIP_REASONS
from protosteer.data.images import FileImages
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError, LearnerError, SettingsError
from protosteer.learner import Learner
from protosteer.model.memory import Memory
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.util.statistics import Accuracy
from protosteer.workflows import folder_scan
from protosteer.workflows import learn_folder as learn_folder_module
from protosteer.workflows.folder_scan import scan_folder, unfinished_task
from protosteer.workflows.holdout_eval import Check
from protosteer.workflows.learn_folder import LearnResult, TaskSlot, held_count, learn_folder, split_files

CHECK = ["calibrating", "checking"]
STAGES = ["keys", *CHECK, "training", "values", *CHECK]


@pytest.fixture(scope="module")
def spring(tmp_path_factory) -> Path:
    return photos(tmp_path_factory.mktemp("a") / "spring", ["ant", "bee"])


@pytest.fixture(scope="module")
def summer(tmp_path_factory) -> Path:
    return photos(tmp_path_factory.mktemp("b") / "summer", ["cat", "dog", "eel"])


@pytest.fixture(scope="module")
def before(spring) -> Learner:
    """Knows spring; never changed by a test."""
    return taught(spring)


# Surveys


def test_a_survey_names_what_it_found(tmp_path, before):
    folder = photos(tmp_path / "new", ["bee", "cat"], per_class=3)
    bad = [folder / "bee" / "01.png", folder / "cat" / "02.png"]
    bad[0].write_bytes(b"")
    bad[1].write_bytes(bad[1].read_bytes()[:300])
    callbacks = []
    found = scan_folder(folder, before.memory, lambda done, of: callbacks.append((done, of)))
    assert found.counts == {"bee": 2, "cat": 2} and found.unreadable.paths == bad
    assert found.known == {"bee": ["spring"]} and not set(bad) & set(found.files.paths)
    assert callbacks == [(n, 6) for n in range(1, 7)]
    assert scan_folder(folder).known == {}


def test_a_class_without_any_readable_image_is_refused(tmp_path):
    folder = photos(tmp_path / "new", ["ant", "bee"], per_class=2)
    for path in (folder / "bee").iterdir():
        path.write_bytes(b"no image")
    with expect_error("unreadable-class", DataError, name="bee"):
        scan_folder(folder)


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[31mred", "caf\udce9"])
def test_class_folders_whose_name_cannot_be_printed_are_refused(tmp_path, name):
    photos(tmp_path / "odd", ["ant"])
    try:
        (tmp_path / "odd" / "ant").rename(tmp_path / "odd" / name)
    except (OSError, UnicodeEncodeError):
        pytest.skip("this file system does not take such names")
    with pytest.raises(DataError) as caught:
        scan_folder(tmp_path / "odd")
    assert str(caught.value).isprintable()


def test_known_classes_can_be_left_out_with_their_bad_files(tmp_path, before):
    folder = photos(tmp_path / "new", ["bee", "cat"], per_class=3)
    for name in ("bee", "cat"):
        (folder / name / "00.png").write_bytes(b"")
    left = scan_folder(folder, before.memory).without_known()
    assert left.counts == {"cat": 2} and left.known == {} and left.unreadable.paths == [folder / "cat" / "00.png"]
    nothing = scan_folder(photos(tmp_path / "old", ["ant"]), before.memory).without_known()
    with expect_error("no-new-images", LearnerError, path=tmp_path / "old"):
        learn_folder(before.copy(), nothing)


def test_however_a_folder_is_written_it_is_the_same(tmp_path, monkeypatch):
    folder = photos(tmp_path / "walk", ["ant", "bee"], per_class=2)
    expected = [path.resolve() for path in scan_folder(folder).files.paths]
    (tmp_path / "stroll").symlink_to(folder, target_is_directory=True)
    monkeypatch.chdir(folder)
    baseline = QUICK.replace(prompts=False)
    names = {".": "walk", "../walk/": "walk", "../stroll": "stroll", "ant/..": "walk", f"{folder}/": "walk"}
    for written, name in names.items():
        found = scan_folder(written)
        assert [path.resolve() for path in found.files.paths] == expected
        assert learn_folder(Learner(tiny_backbone(), baseline), found, holdout=0).record.name == name


def test_links_are_followed_and_dead_ones_are_not_images(tmp_path):
    real = photos(tmp_path / "store", ["ant"], per_class=3) / "ant"
    (tmp_path / "new" / "bee").mkdir(parents=True)
    (tmp_path / "new" / "cat").symlink_to(real, target_is_directory=True)
    other = photos(tmp_path / "store", ["bee"], per_class=3) / "bee"
    (tmp_path / "new" / "bee" / "1.png").symlink_to(other / "01.png")
    (tmp_path / "new" / "bee" / "2.png").symlink_to(tmp_path / "nowhere.png")
    assert scan_folder(tmp_path / "new").counts == {"bee": 1, "cat": 3}


def test_files_that_are_skipped_are_named_by_reason(tmp_path, monkeypatch):
    folder = photos(tmp_path / "new", ["ant", "bee"], per_class=3)
    (folder / "ant" / "clip.MOV").write_bytes(b"film")
    (folder / "bee" / "notes.txt").write_bytes(b"text")
    (folder / "bee" / "Thumbs.db").write_bytes(b"of the system")
    (folder / "bee" / "00.png").write_bytes(b"")
    (folder / "bee" / "phone.HEIC").write_bytes(b"not even HEIC")
    monkeypatch.setattr("protosteer.data.image_files.formats", lambda: ["PNG"])
    found = scan_folder(folder).skipped
    assert {reason: [path.name for path in paths] for reason, paths in found.items()} == {
        SKIP_REASONS["unreadable-image"]: ["00.png"],
        SKIP_REASONS["heic-not-supported"]: ["phone.HEIC"],
        "video": ["clip.MOV"],
        "not an image": ["notes.txt"],
    }


def test_heic_is_read_where_pillow_heif_is_installed(tmp_path):
    heif = pytest.importorskip("pillow_heif")
    folder = photos(tmp_path / "new", ["ant", "bee"], per_class=3)
    with Image.open(folder / "bee" / "00.png") as image:
        heif.from_pillow(image.resize((64, 64)).rotate(90)).save(folder / "bee" / "phone.heic")
    found = scan_folder(folder)
    assert found.counts == {"ant": 3, "bee": 4} and not found.skipped


def test_a_picture_is_learned_once_however_often_it_is_there(tmp_path):
    folder = photos(tmp_path / "new", ["ant", "bee"], per_class=6)
    one = folder / "ant" / "00.png"
    shutil.copy(one, folder / "ant" / "z copy.png")
    shutil.copy(one, folder / "bee" / "z stray.png")
    with Image.open(folder / "bee" / "00.png") as image:
        large = image.rotate(90).resize((128, 128), Image.Resampling.BICUBIC)
    large.save(folder / "bee" / "00.png")
    large.resize((96, 96), Image.Resampling.BICUBIC).save(folder / "bee" / "z smaller.jpg", quality=90)
    found = scan_folder(folder)
    assert found.counts == {"ant": 6, "bee": 6}
    pairs = zip(found.copies.paths, found.originals.paths, strict=True)
    assert {(copy.name, original.parent.name, original.name) for copy, original in pairs} == {
        ("z copy.png", "ant", "00.png"),
        ("z stray.png", "ant", "00.png"),
        ("z smaller.jpg", "bee", "00.png"),
    }
    learner = Learner(tiny_backbone(), EVIDENCE.replace(prompts=False))
    learn_folder(learner, found)
    again = scan_folder(folder, learner.memory)
    assert not again.files.paths and not again.copies.paths and len(again.already_learned) == 15


def test_a_class_of_copies_alone_keeps_them(tmp_path):
    folder = photos(tmp_path / "new", ["ant"], per_class=3)
    shutil.copytree(folder / "ant", folder / "bee")
    assert scan_folder(folder).counts == {"ant": 3, "bee": 3}


# Splits


def listed(**counts: int) -> Files:
    pairs = [(Path(name) / f"{i}.png", name) for name, count in counts.items() for i in range(count)]
    return Files([path for path, _ in pairs], [label for _, label in pairs])


@settings(deadline=None)
@given(
    counts=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 30), min_size=1),
    holdout=st.floats(0.0, 0.5),
    seed=st.integers(0, 5),
)
def test_a_split_is_disjoint_complete_and_depends_on_the_class_and_the_seed_alone(counts, holdout, seed):
    files = listed(**counts)
    learned, held = split_files(files, holdout, seed)
    assert not set(learned.paths) & set(held.paths)
    assert sorted([*learned.paths, *held.paths]) == sorted(files.paths)
    for part in (learned, held):
        assert part.labels == [path.parent.name for path in part.paths]
        assert part.paths == [path for path in files.paths if path in set(part.paths)]  # order is kept
    expected = {name: held_count(count, holdout) for name, count in counts.items()}
    assert collections.Counter(held.labels) == {name: count for name, count in expected.items() if count}
    assert all(1 <= count <= (counts[name] + 1) / 2 for name, count in expected.items() if count)
    for name, count in counts.items():
        own = [path for path in held.paths if path.parent.name == name]
        assert split_files(listed(**{name: count}), holdout, seed)[1].paths == own


def test_other_seeds_and_classes_hold_out_other_images():
    first = [path.name for path in split_files(listed(a=40), 0.25, 0)[1].paths]
    assert first != [path.name for path in split_files(listed(a=40), 0.25, 1)[1].paths]
    assert first != [path.name for path in split_files(listed(b=40), 0.25, 0)[1].paths]


@pytest.mark.parametrize("holdout", [-0.1, 0.51, float("nan")])
def test_shares_that_cannot_be_held_out_are_refused(holdout):
    with expect_error("bad-holdout", SettingsError):
        split_files(listed(a=5), holdout, 0)


# Teaching


def test_what_a_taught_task_says_of_itself(before, summer, monkeypatch):
    learner, found = before.copy(), scan_folder(summer)
    reached = []
    plain = Learner.learn

    def learn(self, data, *rest):
        reached.extend(data[0].name(row) for row in range(len(data[0])))
        return plain(self, data, *rest)

    monkeypatch.setattr(Learner, "learn", learn)
    outcome = learn_folder(learner, found, holdout=0.25)
    record, check = outcome.record, outcome.check
    learned, held = split_files(found.files, 0.25, 0)
    assert reached == [str(path) for path in learned.paths] and not set(reached) & {*map(str, held.paths)}
    assert learner.memory.tasks[-1] is record and learner.tasks == ["spring", "summer"]
    assert [c.images for c in record.classes] == [6, 6, 6] and record.metadata.images == 18
    assert [len(c.heldout_similarities) for c in record.classes] == [2, 2, 2] and record.metadata.held_out == 6
    assert record.metadata.image_bytes == sum(path.stat().st_size for path in learned.paths)
    assert len(record.metadata.learned) == 10
    assert check.labels == held.labels and check.predicted == learner.predict(held.paths).labels


def assert_similarities_as_by_hand(learner, record, held):
    """The greatest cosine to a value centroid of the task, under its prompt."""
    pixels = FileImages(held.paths, learner.backbone.preprocessing).pixels(range(len(held)))
    seen = F.normalize(learner.backbone.embed_pixels(pixels, record.prompt), dim=1)
    values = F.normalize(torch.cat([c.values.means for c in record.classes]), dim=1)
    greatest = (seen @ values.T).amax(dim=1)
    for c in record.classes:
        own = torch.tensor([label == c.name for label in held.labels])
        torch.testing.assert_close(c.heldout_similarities, greatest[own], rtol=0, atol=1e-5)


def test_held_out_similarities_equal_a_computation_by_hand(before, summer):
    learner, found = before.copy(), scan_folder(summer)
    record = learn_folder(learner, found, holdout=0.25).record
    assert_similarities_as_by_hand(learner, record, split_files(found.files, 0.25, 0)[1])


def test_held_out_similarities_of_an_independent_task_do_not_depend_on_others(tmp_path, summer):
    """Not even where another task has the same pictures, to which those held out are more similar."""
    twins = photos(tmp_path / "twins", ["cat", "dog", "eel"])
    for path in list(twins.iterdir()):
        path.rename(twins / f"other {path.name}")
    among, alone = taught(twins, summer, settings=ALONE), taught(summer, settings=ALONE)
    pairs = zip(among.memory.tasks[1].classes, alone.memory.tasks[0].classes, strict=True)
    assert all(torch.equal(a.heldout_similarities, b.heldout_similarities) for a, b in pairs)


def test_small_classes_are_learned_whole_beside_large_ones(tmp_path):
    folder = photos(tmp_path / "new", ["ant", "bee"], per_class=4)
    photos(folder, ["cat"], per_class=5)
    whole = learn_folder(Learner(tiny_backbone(), QUICK), scan_folder(folder), holdout=0)
    assert whole.check is None and whole.record.metadata.held_out == 0 and whole.record.classes[2].images == 5
    assert all(c.heldout_similarities is None for c in whole.record.classes)
    outcome = learn_folder(Learner(tiny_backbone(), QUICK), scan_folder(folder))
    assert {c.name: c.images for c in outcome.record.classes} == {"ant": 4, "bee": 4, "cat": 4}
    assert [c.heldout_similarities is None for c in outcome.record.classes] == [True, True, False]
    assert outcome.check.labels == ["cat"]


@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_the_learner_changes_when_all_is_done_or_not_at_all(before, summer, stage):
    learner = before.copy()
    tasks, ended = learner.memory.tasks, []

    def interrupt(message):
        ended.extend([message.doing] if message.done == message.total else [])
        if len(ended) == stage + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn_folder(learner, scan_folder(summer), on_stage=interrupt, holdout=0.25)
    assert ended == STAGES[: stage + 1] and learner.memory.tasks is tasks


def test_stages_are_told_in_order_and_to_their_ends(before, summer):
    stages = []
    learn_folder(before.copy(), scan_folder(summer), on_stage=stages.append, holdout=0.25)
    assert [doing for doing, _ in itertools.groupby(stages, lambda stage: stage.doing)] == STAGES
    last = {stage.doing: stage for stage in stages}
    assert all(stage.done == stage.total and stage.task == "summer" for stage in last.values())
    assert last["keys"].total == 18 and last["calibrating"].total == last["checking"].total == 6


def test_task_names_come_from_the_folder_and_do_not_clash(tmp_path, before):
    learner = before.copy()
    learner.settings = QUICK.replace(prompts=False)
    for name in ("cat", "spring", "dog"):  # a class may be called as a task
        learn_folder(learner, scan_folder(photos(tmp_path / name / "spring", [name], per_class=2)))
    assert learner.tasks == ["spring", "spring-2", "spring-3", "spring-4"]
    assert learner.classes == ["ant", "bee", "cat", "spring", "dog"]
    with pytest.raises(LearnerError):
        learn_folder(learner, scan_folder(photos(tmp_path / "w", ["eel"], per_class=2)), name="spring")


def test_a_file_that_goes_away_after_the_survey_is_named(tmp_path):
    folder = photos(tmp_path / "new", ["ant", "bee"], per_class=2)
    found = scan_folder(folder)
    (folder / "bee" / "01.png").unlink()
    learner = Learner(tiny_backbone(), QUICK)
    with expect_error("file-gone", DataError, path=folder / "bee" / "01.png"):
        learn_folder(learner, found)


# CheckpointFiles


def test_a_bookmark_belongs_to_these_files_this_model_and_these_settings(tmp_path, before):
    folder = photos(tmp_path / "new", ["cat", "dog"], per_class=5)
    model = tmp_path / "pets.protosteer"

    def path(learner=before, name="new", holdout=0.1):
        return TaskSlot.prepare(learner, scan_folder(folder), name, holdout).checkpoint_path(model)

    first = path()
    assert first == path() == path(before.copy()) and first.parent == tmp_path
    assert first.name.startswith(".pets.protosteer.") and first.suffix == ".part"
    others = [path(name="other"), path(holdout=0.2), path(Learner(tiny_backbone(), QUICK))]
    settings = Learner(tiny_backbone(), QUICK.replace(epochs=3))
    weights, pixels = Learner(tiny_backbone(seed=1), QUICK), Learner(tiny_backbone(), QUICK)
    pixels.backbone.preprocessing = Preprocessing(16, (0.4, 0.4, 0.4), (0.5, 0.5, 0.5))
    for learner in (settings, weights, pixels):
        learner.memory = before.memory
        others.append(path(learner))
    forgetful = before.copy()
    forgetful.forget("ant")
    others.append(path(forgetful))
    file = folder / "cat" / "00.png"
    os.utime(file, ns=(0, 0))
    others.append(path())
    file.rename(folder / "cat" / "09.png")
    others.append(path())
    (folder / "cat").rename(tmp_path / "real")
    for label in ("cat", "cow"):  # two names for one folder
        link = folder / label
        link.symlink_to(tmp_path / "real", target_is_directory=True)
        others.append(path())
        link.unlink()
    assert len({first, *others}) == 1 + len(others)


@pytest.mark.parametrize("stage", ["training", "checking"])
def test_the_same_call_goes_on_and_ends_in_the_same_bits(tmp_path, before, summer, stage):
    whole = before.copy()
    learn_folder(whole, scan_folder(summer), holdout=0.25)
    learner = before.copy()
    slot = TaskSlot.prepare(learner, scan_folder(summer), None, 0.25)
    path = slot.checkpoint_path(tmp_path / "m.protosteer")
    steps, callbacks = [], []

    def interrupt(message):
        callbacks.append(message.doing)
        trained = "training" in callbacks
        if message.doing == stage and trained and (stage != "training" or message.done == 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn_folder(learner, scan_folder(summer), None, 0.25, interrupt, CheckpointFile(path, seconds=0))
    assert path.exists()
    torch.randn(3)  # another process has another random state

    def on_stage(message):
        steps.extend([message.done] if message.doing == "training" else [])

    learn_folder(learner, scan_folder(summer), None, 0.25, on_stage, CheckpointFile(path, seconds=0))
    # What was resumed is reported first; nothing follows if all steps had been made.
    assert (steps[:2] == [3, 4]) if stage == "training" else len(steps) == 1
    assert file_bytes(learner, tmp_path) == file_bytes(whole, tmp_path)


# Usable before the prompt is trained


def kept_usable(learner: Learner, folder: Path, **more) -> Learner:
    """What is left when teaching is interrupted in its training."""
    left = []

    def interrupt(message):
        if message.doing == "training" and message.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn_folder(
            learner,
            scan_folder(folder, learner.memory),
            on_stage=interrupt,
            on_usable=lambda usable, taught: left.append(usable),
            **{"holdout": 0.25, **more},
        )
    (usable,) = left
    return usable


@pytest.mark.parametrize("settings", [EVIDENCE, QUICK], ids=["evidence", "paper"])
def test_a_task_can_be_used_before_its_prompt_is_trained(spring, summer, settings, monkeypatch):
    learner = taught(spring, settings=settings)
    monkeypatch.setattr(LearnResult, "improvement", 1)
    tasks, callbacks = learner.memory.tasks, []

    def on_usable(usable, early):
        assert learner.memory.tasks is tasks and usable.memory.tasks == (*tasks, early.record)
        assert early.record.metadata.unfinished and early.record.prompt is None
        assert early.before_training is None
        assert early.check == Check(held.labels, usable.predict(held.paths).labels)
        callbacks.append(early)

    found = scan_folder(summer, learner.memory)
    _, held = split_files(found.files, 0.25, 0)
    outcome = learn_folder(learner, found, holdout=0.25, on_usable=on_usable)
    (early,) = callbacks
    assert outcome.before_training == early.check and outcome.check is not None
    assert outcome.record.metadata.unfinished is None and outcome.record.prompt is not None
    for fact in ("learned", "settings"):
        assert getattr(early.record.metadata, fact) == getattr(outcome.record.metadata, fact) is not None
    kept_out = len(held) if settings is QUICK else 0  # which CPP inference needs for rejection
    assert early.record.metadata.held_out == len(held) and outcome.record.metadata.held_out == kept_out
    assert outcome.record.images == outcome.record.metadata.images == len(found.files) - kept_out
    assert outcome.training == "kept" and outcome.accuracy == (outcome.check if kept_out else early).accuracy
    assert learner.memory.tasks == (*tasks, outcome.record)


def worse_than_before(monkeypatch, later: str | None = "no such class") -> None:
    """Let every check find all images right but, after the first, misclassified as `later`."""
    make, made = Check.make, []

    def check(*arguments):
        made.append(make(*arguments))
        labels = made[-1].labels
        return Check(labels, labels if len(made) == 1 or later is None else [later] * len(labels))

    monkeypatch.setattr(Check, "make", check)


def test_training_that_makes_it_worse_is_dropped(tmp_path, spring, summer, monkeypatch):
    learner, instant = (taught(spring, settings=EVIDENCE) for _ in range(2))
    worse_than_before(monkeypatch)
    outcome = learn_folder(learner, scan_folder(summer, learner.memory), holdout=0.25)
    assert outcome.training == "dropped" and outcome.record.prompt is None
    assert outcome.before_training.accuracy.right > outcome.check.accuracy.right == 0
    instant.settings = EVIDENCE.replace(prompts=False)
    expected = learn_folder(instant, scan_folder(summer, instant.memory)).record
    for (name, tensor), (_, other) in zip(outcome.record.tensors(), expected.tensors(), strict=True):
        torch.testing.assert_close(tensor, other, msg=name)  # the same images, also those that were held out


def test_training_that_changes_nothing_is_kept_if_its_prompt_serves_all_classes(spring, summer, monkeypatch):
    learner = Learner(tiny_backbone(), EVIDENCE)
    worse_than_before(monkeypatch, later=None)
    assert learn_folder(learner, scan_folder(spring), holdout=0.25).training == "kept"
    assert learn_folder(learner, scan_folder(summer, learner.memory), holdout=0.25).training == "dropped"


def test_training_is_skipped_where_little_is_left_to_gain(spring, summer, monkeypatch):
    stages = []
    learner = taught(spring, settings=EVIDENCE)
    monkeypatch.setattr(learn_folder_module, "MIN_ERRORS", 100.0)
    found = scan_folder(summer, learner.memory)
    outcome = learn_folder(learner, found, on_stage=stages.append, may_skip=True)
    assert outcome.training == "skipped" and outcome.record.images == len(found.files)
    assert "training" not in {stage.doing for stage in stages} and not outcome.record.metadata.unfinished
    again = scan_folder(summer, learner.memory)
    assert not again.files.paths


@pytest.mark.parametrize(
    ("changes", "classes"),
    [({"prompts": False}, ["cat", "dog"]), ({"prompt_tasks": "first"}, ["cat", "dog"]), ({}, ["cat"])],
    ids=["instant", "fast", "one class"],
)
def test_where_no_prompt_is_trained_there_is_one_stage(tmp_path, spring, changes, classes):
    learner = taught(spring, settings=EVIDENCE) if changes else Learner(tiny_backbone(), EVIDENCE)
    learner.settings = EVIDENCE.replace(**changes)
    found = scan_folder(photos(tmp_path / "more", classes), learner.memory)
    outcome = learn_folder(learner, found, on_usable=lambda *_: pytest.fail("two stages"))
    assert outcome.before_training is outcome.check is outcome.training is None
    assert outcome.record.metadata.unfinished is None and outcome.record.images == len(found.files)
    loo = learner.reader.loo_predictions()
    expected = Accuracy(int(loo.correct.sum()), len(loo.correct)) if len(learner.classes) > 1 else None
    assert outcome.accuracy == expected


def test_evidence_needs_no_calibrating_pass_unless_it_is_not_read(spring, summer):
    stages = []
    learner = taught(spring, settings=EVIDENCE)
    record = learn_folder(learner, scan_folder(summer, learner.memory), on_stage=stages.append).record
    assert "calibrating" not in {stage.doing for stage in stages}
    assert all(c.heldout_similarities is None for c in record.classes) and not learner.reader.needs_heldout
    mixed = taught(spring)  # by the paper's rule, which then reads all
    mixed.settings = EVIDENCE
    found = scan_folder(summer, mixed.memory)
    record = learn_folder(mixed, found).record
    assert mixed.reader.needs_heldout
    assert_similarities_as_by_hand(mixed, record, split_files(found.files, 0.1, 0)[1])


@pytest.mark.parametrize("place", ["first", "last", "amid"])
def test_an_unfinished_task_ends_in_the_same_bits_in_its_own_place(tmp_path, spring, summer, place):
    base = Learner(tiny_backbone(), EVIDENCE) if place == "first" else taught(spring, settings=EVIDENCE)
    whole = base.copy()
    expected = learn_folder(whole, scan_folder(summer, whole.memory), holdout=0.25)
    left = kept_usable(base, summer)
    if place == "amid":
        learn_folder(left, scan_folder(photos(tmp_path / "later", ["yak", "zebu"]), left.memory))
        assert left.tasks == ["spring", "summer", "later"]
    later = left.memory.tasks[2:]
    found = scan_folder(summer, left.memory)
    assert found.known == {}
    again = learn_folder(left, found, holdout=0.25)
    assert left.memory.tasks[-1 - len(later)] is again.record and left.memory.tasks[2:] == later
    if place == "amid":
        left.forget(task="later")
    else:
        assert again.check == expected.check and again.before_training == expected.before_training
    assert file_bytes(left, tmp_path) == file_bytes(whole, tmp_path)


def test_an_unfinished_first_task_keeps_the_prompt_for_all_classes_that_it_was_given(tmp_path, summer):
    domain = torch.randn(tiny_backbone().prompt_shape(1, True, 1), generator=torch.Generator().manual_seed(0))
    begun, whole = (Learner(tiny_backbone(), EVIDENCE, domain) for _ in range(2))
    path = tmp_path / "m.protosteer"
    kept_usable(begun, summer).save(path)
    learn_folder(whole, scan_folder(summer), holdout=0.25)
    again = Learner.load(path, tiny_backbone())
    learn_folder(again, scan_folder(summer, again.memory), holdout=0.25)
    assert torch.equal(again.shared_prompt, domain) and file_bytes(again, tmp_path) == file_bytes(whole, tmp_path)


def test_the_bookmark_of_an_unfinished_task_is_found_again(tmp_path, before, summer):
    model, found = tmp_path / "m.protosteer", scan_folder(summer)
    first = TaskSlot.prepare(before, found, None, 0.25).checkpoint_path(model)
    left = kept_usable(before.copy(), summer)
    assert TaskSlot.prepare(left, found, None, 0.25).checkpoint_path(model) == first
    learn_folder(left, scan_folder(photos(tmp_path / "later", ["yak", "zebu"]), left.memory))
    assert TaskSlot.prepare(left, found, None, 0.25).checkpoint_path(model) == first


def test_which_unfinished_task_is_gone_on_with(before, summer):
    memory = kept_usable(before.copy(), summer).memory
    task, own, folder = memory.tasks[1], ["cat", "dog", "eel"], Path("a") / "summer"

    def found(labels, folder=folder, name=None, memory=memory):
        return unfinished_task(memory, folder, labels, name)

    assert found(own) is found([*own, "ant"]) is found(own, Path("b"), "summer") is task
    for labels in (["cat", "dog"], [*own, "yak"], ["ant"]):  # other classes
        assert found(labels) is None
    assert found(own, Path("a") / "sum") is None and found(own, name="other") is None
    for name, same in {"summer-2": True, "summer-two": False, "summer": True}.items():
        renamed = dataclasses.replace(task, name=name)
        among = Memory([memory.tasks[0], renamed])
        assert (found(own, memory=among) is renamed) == same
    done = dataclasses.replace(task, metadata=dataclasses.replace(task.metadata, unfinished=None))
    assert found(own, memory=Memory([memory.tasks[0], done])) is None


def test_other_classes_of_the_folder_are_known_from_their_tasks_still(tmp_path, before, summer):
    left = kept_usable(before.copy(), summer)
    folder = photos(tmp_path / "summer", ["ant", "cat", "dog", "eel"])
    found = scan_folder(folder, left.memory)
    assert found.known == {"ant": ["spring"]} and found.without_known().counts.keys() == {"cat", "dog", "eel"}
    assert scan_folder(folder, left.memory, name="other").known.keys() == {"ant", "cat", "dog", "eel"}
    assert learn_folder(left, found.without_known()).record.name == "summer"


# Checks


def test_a_check_counts_by_class_and_ranks_what_was_confused():
    truth = ["a", "a", "a", "b", "b", "c", "c", "c"]
    said = ["a", "b", "b", "b", "z", "a", "z", "a"]
    check = Check(truth, said)
    assert check.accuracy == Accuracy(2, 8)
    assert check.per_class() == {"a": (3, 1), "b": (2, 1), "c": (3, 0)}
    assert check.confused() == [("a", "b", 2), ("c", "a", 2), ("b", "z", 1), ("c", "z", 1)]
    assert check.confused(1) == [("a", "b", 2)] and Check(["a"], ["a"]).confused() == []


def test_a_check_is_made_among_all_classes_the_model_knows(tmp_path, before):
    """A new class whose images are like those of an older one is taken for it at times."""
    folder = photos(tmp_path / "new", ["cat"])
    (photos(tmp_path / "copies", ["ant"]) / "ant").rename(folder / "wasp")
    check = learn_folder(before.copy(), scan_folder(folder), holdout=0.5).check
    assert "ant" in check.predicted and set(check.labels) == {"cat", "wasp"}


@pytest.mark.parametrize("known", [True, False], ids=["known backbone", "new backbone"])
def test_every_file_is_read_and_decoded_as_seldom_as_can_be(spring, monkeypatch, known):
    """Once for a known backbone, however many epochs there are; held-out images and thumbnails included."""
    decoded, reads = [], collections.Counter()
    original, original_read = Image.open, folder_scan.image_bytes

    def counting(file, **options):
        decoded.append(file)
        return original(file, **options)

    def read(path):
        reads[path] += 1
        return original_read(path)

    monkeypatch.setattr(Image, "open", counting)
    monkeypatch.setattr(folder_scan, "image_bytes", read)
    learner = Learner(tiny_backbone(), QUICK.replace(epochs=5))
    found = scan_folder(spring, preprocessing=learner.backbone.preprocessing if known else None)
    slot = TaskSlot.prepare(learner, found, None, 0.25)
    slot.learn()
    assert len(decoded) == len(found.files) * (1 if known else 2) and set(reads.values()) == {1}
    assert pickle.loads(pickle.dumps(found)).canvases == {}  # to another process go no pixels


def test_a_scan_keeps_no_more_than_fits_and_learns_the_same(before, summer, monkeypatch, tmp_path):
    preprocessing = before.backbone.preprocessing
    whole, part = before.copy(), before.copy()
    learn_folder(whole, scan_folder(summer, preprocessing=preprocessing))
    monkeypatch.setattr(decode_cache, "BUDGET", 3 * 3 * preprocessing.canvas**2)
    found = scan_folder(summer, preprocessing=preprocessing)
    assert len(found.canvases) == 3
    learn_folder(part, found)
    assert file_bytes(part, tmp_path) == file_bytes(whole, tmp_path)
