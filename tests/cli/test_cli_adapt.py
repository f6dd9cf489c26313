"""`protosteer adapt`, and a model that begins with what it wrote."""

import json
from pathlib import Path

import pytest
import torch

from expect import expect_cli_error, run_cli
from photo_toys import photos
from protosteer.cli import main
from protosteer.model import file as model_file
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress_bar import LearnProgress
from protosteer.workflows import shared_prompt

pytestmark = pytest.mark.slow

QUICK = ["--set", "epochs=2", "--set", "batch_size=8", "--set", "neck_hidden=16", "--set", "augmentation=none"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Folders of images, and an adapted backbone; nothing in it is changed."""
    place = tmp_path_factory.mktemp("adapting")
    photos(place / "domain", ["fly", "gnat", "moth"])
    photos(place / "spring", ["ant", "bee"])
    photos(place / "summer", ["cat", "dog"])
    assert main(["adapt", str(place / "domain"), "-o", str(place / "my.backbone"), *QUICK]) == 0
    return place


def learn(path: Path, folder: Path, *words: object) -> int:
    return main(["learn", str(path), str(folder), *QUICK, *map(str, words)])


def test_adapt_says_what_it_wrote(place, tmp_path, capsys):
    out = tmp_path / "other.backbone"
    shown = run_cli(capsys, "adapt", place / "domain", "-o", out, *QUICK, "--json")
    figures = json.loads(shown.out)
    assert figures["classes"] == ["fly", "gnat", "moth"] and figures["images"] == 24
    assert figures["path"] == str(out) and figures["prompt"]["layers"] == 3
    assert f"protosteer learn --adapted {out}" in shown.err
    assert out.read_bytes() == (place / "my.backbone").read_bytes() and list(tmp_path.iterdir()) == [out]


def test_adapt_goes_on_after_ctrl_c(place, tmp_path, monkeypatch):
    out, real = tmp_path / "my.backbone", LearnProgress.on_stage

    def on_stage(self, stage):
        real(self, stage)
        if stage.training and stage.done == 3:
            raise KeyboardInterrupt

    words = ["adapt", str(place / "domain"), "-o", str(out), *QUICK]
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFile.__init__, "__defaults__", (0.0,))
        patch.setattr(LearnProgress, "on_stage", on_stage)
        assert main(words) == 130
    assert not out.exists() and main(words) == 0
    assert out.read_bytes() == (place / "my.backbone").read_bytes() and list(tmp_path.iterdir()) == [out]


def test_inspect_tells_an_adapted_backbone_in_a_few_lines(place, tmp_path, capsys):
    file = str(place / "my.backbone")
    shown = run_cli(capsys, "inspect", file).out
    assert shown.startswith(f"{file}: a shared prompt")
    assert json.loads(run_cli(capsys, "inspect", file, "--json").out)["images"] == 24
    expect_cli_error(None, "inspect", file, "--plot", tmp_path / "x.png")
    expect_cli_error(None, "predict", file, place / "spring")


def test_a_model_begins_with_it(place, tmp_path, capsys):
    path, file = tmp_path / "shop.protosteer", place / "my.backbone"
    assert learn(path, place / "spring", "--adapted", file, "--independent") == 0
    assert learn(path, place / "summer", "--adapted", file) == 0  # the same is as good as none
    memory, prompt = model_file.read(path).memory, shared_prompt.read(file).prompt
    assert torch.equal(memory.shared_prompt, prompt) and all(task.independent for task in memory.tasks)
    capsys.readouterr()
    assert main(["forget", str(path), "--task", "spring", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["forgotten"][0]["exact"] is True


def test_a_model_that_has_another_or_none_is_refused(place, tmp_path):
    path, file, spring = tmp_path / "shop.protosteer", place / "my.backbone", place / "spring"
    new = tmp_path / "new.protosteer"
    assert learn(path, spring, "--preset", "instant") == 0
    summer = place / "summer"
    expect_cli_error("learned-without-shared-prompt", "learn", path, summer, "--adapted", file)
    expect_cli_error("rule-without-shared-prompt", "learn", new, spring, "--adapted", file, "--preset", "paper")
    assert not new.exists()


def test_merge_says_if_the_models_have_no_prompt_for_all_classes_in_common(place, tmp_path, capsys):
    paths = [tmp_path / f"{name}.protosteer" for name in ("with", "too", "without")]
    adapted = ("--adapted", place / "my.backbone", "--preset", "instant")
    assert learn(paths[0], place / "spring", *adapted) == learn(paths[1], place / "summer", *adapted) == 0
    assert learn(paths[2], place / "summer", "--preset", "instant") == 0
    capsys.readouterr()
    assert "prompt" not in run_cli(capsys, "merge", paths[0], paths[1], "-o", tmp_path / "a").err
    assert model_file.read(tmp_path / "a").memory.shared_prompt is not None
    assert main(["merge", str(paths[0]), str(paths[2]), "-o", str(tmp_path / "b")]) == 0
    assert "prompt" in capsys.readouterr().err and model_file.read(tmp_path / "b").memory.shared_prompt is None
    assert main(["predict", str(tmp_path / "b"), str(place / "summer")]) == 0
