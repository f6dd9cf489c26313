"""The commands for one's own images, as a person types them: learn, predict, forget, merge, inspect."""

import csv
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from PIL import Image

from expect import expect_cli_error, run_cli
from photo_toys import digit_photos
from protosteer.cli import main
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.model.history import beside
from protosteer.model.memory import Memory
from protosteer.util.files import write_and_hold
from protosteer.workflows.learn_folder import TaskSlot
from protosteer.workflows.ood import threshold

pytestmark = pytest.mark.slow


QUICK = ["--set", "prompts=false"]
TRAINED = ["--set", "epochs=1", "--set", "batch_size=16", "--set", "neck_hidden=16"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    digit_photos(root / "spring", [0, 1, 2])
    digit_photos(root / "summer", [3, 4])
    digit_photos(root / "new", [0, 1, 2, 3, 4, 8], count=5, skip=30)
    return root


def learn_both(photos: Path, path: Path, *words: str) -> Path:
    for task in ("spring", "summer"):
        assert main(["learn", str(path), str(photos / task), *QUICK, *words]) == 0
    return path


@pytest.fixture(scope="module")
def taught(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two tasks, learned once."""
    return learn_both(photos, tmp_path_factory.mktemp("taught") / "shop.protosteer")


@pytest.fixture(scope="module")
def by_paper(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, by the paper's rule."""
    return learn_both(photos, tmp_path_factory.mktemp("paper") / "paper.protosteer", "--preset", "paper")


@pytest.fixture
def model(taught: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    copy = tmp_path / "shop.protosteer"
    copy.write_bytes(taught.read_bytes())
    return copy


# learn


def test_learn_says_what_it_found_checks_itself_and_writes_the_model(photos, tmp_path, capsys):
    path = tmp_path / "new.protosteer"
    shown = run_cli(capsys, "learn", path, photos / "spring", *TRAINED)
    assert "Self-check" in shown.out and str(path) in shown.err
    learner = Learner.load(path)
    assert learner.tasks == ["spring"] and sorted(learner.classes) == ["one", "two", "zero"]
    record = learner.memory.tasks[0]
    assert record.prompt is not None and record.metadata.held_out == 0
    assert {c.images for c in record.classes} == {10}
    assert record.metadata.image_bytes > 0
    assert {*tmp_path.iterdir()} == {path, beside(path)}  # no checkpoint, no temporary file


def test_learn_extends_a_model_and_json_has_the_figures(photos, model, capsys):
    more = digit_photos(model.parent / "autumn", [5, 6], count=6)
    figures = json.loads(run_cli(capsys, "learn", more, "--model", model, "--name", "fall", "--json").out)
    assert figures["task"]["name"] == "fall" and figures["task"]["trained"] is False
    assert figures["found"]["classes"] == {"five": 6, "six": 6}
    assert figures["check"] is None and figures["self_check"]["images"] >= 12
    assert model_file.read(model).memory.task_names == ["spring", "summer", "fall"]


def test_thumbnails_are_kept_if_asked_for_and_are_as_private_as_the_model(photos, tmp_path):
    path = tmp_path / "m.protosteer"
    thumbs = tmp_path / "m.protosteer.thumbs"
    main(["learn", str(path), str(photos / "spring"), "--preset", "instant"])
    assert not thumbs.exists()
    path.chmod(0o600)
    main(["learn", str(path), str(photos / "summer"), "--thumbnails"])
    assert thumbs.stat().st_mode & 0o777 == 0o600
    for name in model_file.read(path).memory.tasks[1].class_names:
        main(["forget", str(path), name])
    assert not thumbs.exists()


def test_dry_run_learns_nothing(photos, tmp_path, capsys):
    shown = run_cli(capsys, "learn", tmp_path / "x.protosteer", photos / "spring", "--dry-run")
    assert shown.out and "of training" in shown.err and not list(tmp_path.iterdir())
    assert main(["learn", str(tmp_path / "x.protosteer"), str(photos / "spring"), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["found"]["classes"]["one"] == 10


def test_known_classes_grow_or_are_left_out(photos, model, tmp_path, capsys):
    mixed = digit_photos(tmp_path / "mixed", [1, 7], count=5)
    assert main(["learn", str(model), str(mixed), "--skip-known"]) == 0
    assert model_file.read(model).memory.tasks[-1].class_names == ["seven"]
    before = model.read_bytes()
    assert main(["learn", str(model), str(mixed), "--skip-known"]) == 0 and model.read_bytes() == before
    more = digit_photos(tmp_path / "more", [1, 7], count=5, skip=60)
    shutil.copy(next((mixed / "seven").iterdir()), more / "seven" / "again.png")
    told = run_cli(capsys, "learn", model, more, "--preset", "instant")
    assert "again.png" in told.err
    assert re.search(r"one +5 +spring", told.out) and re.search(r"seven +5 +mixed", told.out)
    known = model_file.read(model).memory
    assert known.tasks[-1].class_names == ["one", "seven"] and len(known.classes) == 6
    before = model.read_bytes()
    assert main(["learn", str(model), str(more)]) == 0 and model.read_bytes() == before
    latest = digit_photos(tmp_path / "latest", [7], count=2, skip=80)
    for form in ([], ["--json"]):  # a dry run only says so
        shown = run_cli(capsys, "learn", model, latest, "--dry-run", *form).out
        assert "seven" in shown and "mixed" in shown


def test_a_private_model_stays_private(model):
    model.chmod(0o600)
    assert main(["forget", str(model), "one"]) == 0
    assert model.stat().st_mode & 0o777 == 0o600


def test_forgetting_in_a_file_that_changes_meanwhile_is_refused(model, monkeypatch):
    real = model_file.read

    def read(path):
        found = real(path)
        model.write_bytes(model.read_bytes() + b" ")
        return found

    monkeypatch.setattr(model_file, "read", read)
    expect_cli_error("changed-meanwhile", "forget", model, "one", path=model)


def test_presets_and_independence_reach_the_settings(photos, tmp_path):
    path = tmp_path / "m.protosteer"
    words = ["learn", str(path), str(photos / "summer"), *TRAINED, "--preset", "fast", "--independent"]
    assert main(words) == 0
    task = model_file.read(path).memory.tasks[0]
    assert task.independent and task.metadata.settings["prompt_tasks"] == "first"
    path.unlink()
    assert main([*words, "--set", "prompt_tasks=all"]) == 0  # what is given wins over a preset
    assert model_file.read(path).memory.tasks[0].metadata.settings["prompt_tasks"] == "all"


def learn_while(work, photos, model, monkeypatch, *words):
    """Teach two classes, while someone else does something to the model file."""
    real = TaskSlot.learn

    def slow(slot, *arguments):
        work()
        return real(slot, *arguments)

    monkeypatch.setattr(TaskSlot, "learn", slow)
    more = digit_photos(model.parent / "autumn", [5, 6], count=6)
    assert main(["learn", str(model), str(more), *words]) == 0
    return model_file.read(model).memory


def test_a_model_that_changed_meanwhile_loses_nothing(photos, model, monkeypatch, capsys):
    def change():
        other = Learner.load(model)
        other.forget("zero")
        other.add_class("nine", photos / "new" / "eight")
        last = other.memory.tasks[-1]
        other.memory.replace(last, dataclasses.replace(last, name="autumn"))
        other.save(model)

    words = [*TRAINED, "--set", "prompts=true", "--set", "prompt_tasks=all", "--holdout", "0"]  # drops no prompt
    found = learn_while(change, photos, model, monkeypatch, *words)
    assert found.task_names == ["spring", "summer", "autumn", "autumn-2"]
    assert sorted(found.classes) == ["five", "four", "nine", "one", "six", "three", "two"]
    assert re.search("warning: .*zero.*autumn-2", capsys.readouterr().err)


def test_a_model_that_is_gone_meanwhile_is_written_whole(photos, model, monkeypatch):
    found = learn_while(model.unlink, photos, model, monkeypatch)
    assert found.task_names == ["spring", "summer", "autumn"]


def test_a_place_that_cannot_be_written_is_noticed_before_learning(photos, model, monkeypatch):
    monkeypatch.setattr(TaskSlot, "learn", lambda *arguments: pytest.fail("it learned"))
    expect_cli_error("cannot-write", "learn", model / "m.protosteer", photos / "spring")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_learning_leaves_a_model_that_can_be_used(model, tmp_path, how):
    before = model_file.read(model).memory
    more = digit_photos(tmp_path / "autumn", [5, 6, 7], count=8)
    code = (
        "import sys, protosteer.runtime.checkpoint as b; from protosteer.cli import main;"
        "b.CheckpointFile.__init__.__defaults__ = (0.0,); sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, "learn", str(model), str(more), *TRAINED]
    words += ["--preset", "best", "--set", "epochs=3000"]
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        while not list(tmp_path.glob(".shop.protosteer.*.part")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(how)
        said = process.communicate()[1].decode()
    finally:
        process.kill()
    assert process.returncode == (130 if how == signal.SIGTERM else -how)
    *old, new = model_file.read(model).memory.tasks
    assert list(tmp_path.glob(".shop.protosteer.*.part"))
    assert [task.name for task in old] == before.task_names and new.metadata.unfinished
    if how == signal.SIGTERM:
        assert "the same command resumes training" in said


# predict


def test_predict_prints_a_line_per_image_with_probabilities(photos, taught, capsys):
    new = photos / "new"
    shown = run_cli(capsys, "predict", taught, new / "one", new / "four" / "01.png")
    lines = shown.out.splitlines()
    assert len(lines) == 6 and lines[0].startswith(str(new / "one" / "01.png")) and shown.err == ""
    assert all(re.search(r": \w+ \d+\.\d %  \(\w+ \d+\.\d %, \w+ \d+\.\d %\)$", line) for line in lines)
    assert sum("/one/" in line and ": one " in line for line in lines) >= 3


def test_cpp_inference_prints_similarities_and_a_note(photos, by_paper, capsys):
    image = str(photos / "new" / "one" / "01.png")
    shown = run_cli(capsys, "predict", by_paper, image)
    assert ": one 0." in shown.out and shown.err.startswith("note: ")
    for kind in ("--json", "--csv"):
        assert run_cli(capsys, "predict", by_paper, image, kind).err == ""


def test_a_task_whose_prompt_was_not_trained_yet_is_named(photos, model, capsys):
    read = model_file.read(model)
    first, second = read.memory.tasks
    unfinished = dataclasses.replace(second, metadata=dataclasses.replace(second.metadata, unfinished=True))
    dataclasses.replace(read, memory=Memory([first, unfinished])).write(model)
    (note,) = run_cli(capsys, "predict", model, photos / "new" / "one" / "01.png").err.splitlines()
    assert note.startswith("note: ") and "summer" in note
    assert note.removeprefix("note: ") in run_cli(capsys, "inspect", model).out


@pytest.mark.parametrize("rule", ["evidence", "paper"])
def test_predict_json_agrees_with_the_learner(photos, taught, by_paper, capsys, rule):
    path = taught if rule == "evidence" else by_paper
    assert main(["predict", str(path), str(photos / "new"), "--json", "--top", "2", "--explain"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    prediction = Learner.load(path).predict(photos / "new")
    for i, (row, ranking) in enumerate(zip(rows, prediction.ranked(2), strict=True)):
        assert [one["label"] for one in row["top"]] == [name for name, *_ in ranking]
        assert (row["label"], row["runner_up"]) == (ranking[0][0], ranking[1][0])
        numbers = [row["probability"], row["similarity"], row["energy"]]
        assert numbers == pytest.approx([*ranking[0][1:], float(prediction.energy[i])], abs=1e-5)
        assert row["passes"] == int(prediction.passes[i]) and row["unknown"] is None
        assert row["candidates"] == prediction.candidates[i]


def test_predict_csv_can_be_read_back(photos, taught, capsys):
    rows = list(csv.DictReader(io.StringIO(run_cli(capsys, "predict", taught, photos / "new" / "two", "--csv").out)))
    assert len(rows) == 5 and rows[0]["label"] == "two" and rows[0]["unknown"] == ""
    assert rows[0]["label_3"] and float(rows[0]["probability"]) >= float(rows[0]["probability_2"])


def test_patterns_and_lists_of_which_some_cannot_be_read(photos, taught, tmp_path, capsys, monkeypatch):
    assert len(run_cli(capsys, "predict", taught, photos / "new" / "*" / "01.png").out.splitlines()) == 6
    good, bad = photos / "new" / "one" / "01.png", tmp_path / "bad.png"
    bad.write_bytes(b"no picture")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{tmp_path / 'none.png'}\n\n{good}\n"))
    assert main(["predict", str(taught), "-", str(bad), str(good)]) == 2
    shown = capsys.readouterr()
    assert [line.split(":")[0] for line in shown.out.splitlines()] == [str(good)] * 2
    assert "none.png" in shown.err and "bad.png" in shown.err


@pytest.mark.parametrize("rule", ["evidence", "paper"])
def test_reject_marks_the_least_similar(photos, taught, by_paper, capsys, rule):
    path = taught if rule == "evidence" else by_paper
    learner = Learner.load(path)
    limit = threshold(learner, 0.5)
    assert main(["predict", str(path), str(photos / "new"), "--json", "--reject", "0.5"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    greatest = learner.predict(photos / "new").similarities.amax(dim=1)
    assert [row["unknown"] for row in rows] == (greatest < limit).tolist()
    assert any(row["unknown"] for row in rows)
    assert main(["predict", str(path), str(photos / "new"), "--reject", "0.5"]) == 0
    words = r"similarity 0\.\d+; if known, " if rule == "evidence" else "nearest to "
    assert re.search(f": unknown, {words}", capsys.readouterr().out)


def test_reject_needs_images_that_were_not_learned_or_can_be_left_out(photos, tmp_path):
    paper, alone, enough = (tmp_path / f"{name}.protosteer" for name in ("paper", "alone", "enough"))
    learn = ["learn", "--holdout", "0", *QUICK]
    assert main([*learn, str(paper), str(photos / "spring"), "--preset", "paper"]) == 0
    assert main([*learn, str(alone), str(digit_photos(tmp_path / "single", [0, 1], count=1))]) == 0
    assert main([*learn, str(enough), str(photos / "spring")]) == 0
    for path in (paper, alone):
        expect_cli_error("not-calibrated", "predict", path, photos / "new", "--reject", "0.05")
    assert main(["predict", str(enough), str(photos / "new"), "--reject", "0.05"]) == 0


def with_backbone(model: Path, out: Path, **changes: str) -> Path:
    """The model as if it had another backbone."""
    found = model_file.read(model)
    dataclasses.replace(found, backbone=found.backbone | changes).write(out)
    return out


def test_a_model_of_other_weights_is_refused(photos, taught, tmp_path):
    other = with_backbone(taught, tmp_path / "other.protosteer", fingerprint="0" * 64)
    expect_cli_error(None, "predict", other, photos / "new")


def test_the_reader_of_a_pipe_may_leave(photos, taught):
    words = [sys.executable, "-m", "protosteer", "predict", str(taught), str(photos / "new"), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()  # as head does when it has had enough
        said = process.stderr.read()
    assert process.returncode == 1 and said == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device to write to")
def test_output_that_finds_no_room_is_one_line(taught):
    words = [sys.executable, "-m", "protosteer", "inspect", str(taught)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_names_that_are_no_text_or_move_the_cursor(photos, taught, tmp_path):
    odd = os.fsencode(tmp_path) + b"/caf\xe9.png"
    try:
        Path(os.fsdecode(odd)).write_bytes((photos / "new" / "one" / "01.png").read_bytes())
        (tmp_path / "a\x1b[31m\nb.png").write_bytes((photos / "new" / "one" / "01.png").read_bytes())
    except OSError:
        pytest.skip("this file system does not take such names")
    words = [sys.executable, "-m", "protosteer", "predict", str(taught), "--top", "1"]
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}  # as in most terminals
    given = {"env": strict, "capture_output": True}
    listed = subprocess.run([*words, "--csv", "-"], input=odd + b"\n", **given)
    assert listed.returncode == 0 and odd in listed.stdout and b"Traceback" not in listed.stderr
    os.mkfifo(tmp_path / "pipe.png")
    beside = odd + b"\n" + os.fsencode(tmp_path / "pipe.png") + b"\n"
    piped = subprocess.run([*words, "--csv", "-"], input=beside, **given)
    assert piped.returncode == 2 and odd in piped.stdout and b"pipe.png" in piped.stderr
    found = subprocess.run([*words, str(tmp_path)], **given)
    assert found.returncode == 0 and found.stdout.count(b"\n") == 2 and b"\x1b" not in found.stdout


# forget


def test_forget_removes_says_before_and_after_and_keeps_no_backup(model, capsys):
    shown = run_cli(capsys, "forget", model, "one", "four")
    assert "5 classes, 2 tasks" in shown.out and "3 classes, 2 tasks" in shown.out
    assert sorted(model_file.read(model).memory.classes) == ["three", "two", "zero"]
    assert {*model.parent.iterdir()} == {model, beside(model)}


def test_forget_removes_at_once_what_killed_processes_left_and_says_what_it_cannot_remove(model, capsys):
    for name in ("a.tmp", "b.part", "b.part.c.tmp"):
        model.with_name(f".shop.protosteer.{name}").write_bytes(model.read_bytes())
    assert main(["forget", str(model), "one"]) == 0
    assert {*model.parent.iterdir()} == {model, beside(model)}
    assert "warning: " not in capsys.readouterr().err
    checkpoint = model.with_name(".shop.protosteer.d.part")
    with write_and_hold(checkpoint, b"of a learning that is under way"):
        assert main(["forget", str(model), "two"]) == 0
    assert f"warning: {checkpoint}" in capsys.readouterr().err


def test_forget_a_task_with_a_backup(model, capsys):
    before = model.read_bytes()
    backup = model.parent / "old.protosteer"
    model.chmod(0o600)
    figures = json.loads(run_cli(capsys, "forget", model, "--task", "spring", "--backup", backup, "--json").out)
    assert figures["before"]["tasks"] == 2 and figures["after"]["tasks"] == 1
    assert figures["forgotten"][0]["exact"] is True and backup.read_bytes() == before
    assert backup.stat().st_mode & 0o777 == model.stat().st_mode & 0o777 == 0o600
    assert figures["before"]["bytes"] - figures["after"]["bytes"] == figures["forgotten"][0]["bytes"]


def test_everything_can_be_forgotten_and_learned_anew(photos, model):
    assert main(["forget", str(model), *model_file.read(model).memory.classes]) == 0
    assert model_file.read(model).memory.classes == []
    expect_cli_error(None, "predict", model, photos / "new")
    assert main(["inspect", str(model)]) == 0
    assert main(["learn", str(model), str(photos / "spring")]) == 0
    assert len(model_file.read(model).memory.classes) == 3


# merge


def test_clashing_names_need_a_rename(photos, taught, tmp_path, capsys):
    one, out = tmp_path / "one.protosteer", tmp_path / "merged.protosteer"
    assert main(["learn", str(one), str(photos / "spring"), *QUICK]) == 0
    assert "--rename-task" in expect_cli_error(None, "merge", taught, one, "-o", out)
    words = ["merge", str(taught), str(one), "-o", str(out), "--rename-task", "spring=later", "--json"]
    capsys.readouterr()
    assert main([*words, "--rename", "one=uno"]) == 0  # classes of the same name grow
    names = ["four", "one", "three", "two", "uno", "zero"]
    assert sorted(json.loads(capsys.readouterr().out)["names"]) == names


def test_a_class_whose_name_has_an_equals_sign_can_be_renamed(taught, tmp_path):
    other, out = tmp_path / "other.protosteer", tmp_path / "out.protosteer"
    model = model_file.read(taught)
    odd = [dataclasses.replace(model.memory.tasks[0], name="odd")]
    classes = dataclasses.replace(odd[0].classes, names=("a", "a=b", "c"))
    dataclasses.replace(model, memory=Memory([dataclasses.replace(odd[0], classes=classes)])).write(other)
    merge = ["merge", taught, other, "-o", out]
    expect_cli_error("bad-name", *merge, "--rename", "c=\x1b[1m")
    assert main([*map(str, merge), "--rename", "c=d=e"]) == 0
    assert model_file.read(out).memory.tasks[-1].class_names == ["a", "a=b", "d=e"]


# inspect


def test_inspect_shows_tasks_classes_and_a_picture(taught, tmp_path, capsys):
    picture = tmp_path / "alike.png"
    shown = run_cli(capsys, "inspect", taught, "--plot", picture).out
    assert "spring" in shown and "three" in shown
    assert Image.open(picture).format == "PNG"
    figures = json.loads(run_cli(capsys, "inspect", taught, "--json").out)
    assert [task["name"] for task in figures["tasks"]] == ["spring", "summer"]


@pytest.mark.parametrize("command", [["inspect"], ["forget", "--task", "spring"]])
def test_commands_on_files_alone_need_no_backbone(taught, tmp_path, command):
    """Nor anything that is slow to load but torch itself, and SciPy's optimiser for calibration."""
    lost = with_backbone(taught, tmp_path / "lost.protosteer", name="nowhere")
    words = [command[0], str(lost), *command[1:]]
    code = (
        "import sys; from protosteer.cli import main; code = main(sys.argv[1:]);"
        "print(sorted({'kornia', 'sklearn', 'matplotlib'} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "[]"


# export and serve


def test_export_writes_the_files(taught, tmp_path, capsys):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    files = json.loads(run_cli(capsys, "export", taught, "--onnx", tmp_path / "exported", "--json").out)["files"]
    assert {Path(name).name for name in files} >= {"embedding.onnx", "predict.py", "model.json"}
    assert all(Path(name).stat().st_size == size for name, size in files.items())


def test_serve_answers_and_stops_politely(photos, model):
    pytest.importorskip("fastapi", reason="the service's packages are not installed")
    words = [sys.executable, "-m", "protosteer", "serve", str(model), "--port", "0", "--allow-teach"]
    words += ["--host-name", "shop.example.org"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        said = process.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", said)[0]
        token = re.fullmatch(r"token for teaching: (\S+)\n", process.stderr.readline())[1]
        with urllib.request.urlopen(f"{address}classes") as answer:
            assert len(json.load(answer)["classes"]) == 5
        asked = urllib.request.Request(f"{address}healthz", headers={"Host": "shop.example.org"})
        with urllib.request.urlopen(asked) as answer:
            assert json.load(answer) == {"status": "ok"}
        asked = urllib.request.Request(f"{address}classes/one", method="DELETE")
        asked.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(asked) as answer:
            assert json.load(answer)["classes"] == ["one"]
        assert "one" not in model_file.read(model).memory.classes
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0 and process.stderr.read() == "stopped\n"
    finally:
        process.kill()
