"""`learn` without a name, `backbones --try`: what is chosen, said and kept."""

import json
from pathlib import Path

import pytest

from expect import expect_cli_error, run_cli
from photo_toys import photos
from protosteer.backbones import NANO, auto_candidates
from protosteer.model.file import read
from protosteer.util.files import cache_dir
from weight_toys import OWN, tiny_weights
from weight_toys import empty_caches as empty_caches  # a fixture for every test here

INSTANT = ("--preset", "instant")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return photos(tmp_path / "spring", ["ant", "bee", "cat"])


def by_hand() -> Path:
    return tiny_weights(cache_dir() / "weights" / "mine.safetensors", OWN)


def test_with_mini_alone_one_line_says_what_to_download_and_which_file_to_put_where(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_candidates, "TOO_SMALL", NANO)  # as it is outside of tests
    out, err = run_cli(capsys, "learn", tmp_path / "m.protosteer", folder, *INSTANT)
    (line,) = (line for line in err.splitlines() if line.startswith("backbone"))
    place = cache_dir() / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
    assert line.startswith("backbone mini") and str(place) in line and "--backbone vit-tiny" in line and "22 MB" in line
    assert "Licence" not in out and read(tmp_path / "m.protosteer").backbone["name"] == "mini"


def test_learn_and_try_choose_the_same_and_the_model_keeps_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand()
    out, err = run_cli(capsys, "backbones", "--try", folder)
    assert [line.split()[0] for line in out.splitlines()[1:] if line.split()][2:] == ["mine", "nano"]
    (chosen,) = (line.split()[0] for line in out.splitlines() if line.split()[-1:] == ["chosen"])
    figures = json.loads(run_cli(capsys, "backbones", "--try", folder, "--json")[0])
    assert figures["chosen"] == chosen == "mine" and figures["images"] == 24
    assert {trial["licence"] for trial in figures["trials"]} == {"Apache-2.0"}
    model = tmp_path / "m.protosteer"
    taught, err = run_cli(capsys, "learn", model, folder, *INSTANT, "--json")
    assert json.loads(taught)["backbone"]["chosen"] == read(model).backbone["name"] == "mine"
    assert json.loads(taught)["backbone"]["images"] == 21  # what checks the model does not choose its backbone
    by_hand().rename(tmp_path / "moved.safetensors")
    summer = photos(tmp_path / "summer", ["dog", "elk"])
    (tmp_path / "moved.safetensors").rename(cache_dir() / "weights" / "mine.safetensors")
    taught, err = run_cli(capsys, "learn", model, summer, "--backbone", "auto", "--json")
    assert "backbone" not in json.loads(taught) and "\nbackbone " not in err  # it has one
    assert read(model).backbone["name"] == "mine"


def test_a_named_backbone_is_not_chosen(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = by_hand()
    for i, (words, name) in enumerate(
        [(("--backbone", "nano"), "nano"), (("--weights", path), "mine"), (("--backbone", "mine"), "mine")]
    ):
        model = tmp_path / f"{i}.protosteer"
        out, err = run_cli(capsys, "learn", model, folder, *INSTANT, *words)
        assert read(model).backbone["name"] == name and "Licence" not in out and "\nbackbone " not in err


def test_a_wrong_setting_is_told_before_anything_is_tried(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "protosteer.workflows.backbone_selection.choose_backbone", lambda *_: pytest.fail("it was tried")
    )
    expect_cli_error(None, "learn", tmp_path / "m.protosteer", folder, "--set", "epochs=none")


def test_a_file_that_is_no_backbone_is_told_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_hand().with_name("shop.safetensors").write_bytes(b"no weights")
    out, err = run_cli(capsys, "backbones", "--try", folder)
    (line,) = (line for line in err.splitlines() if "shop" in line)
    assert line.startswith("backbone shop ") and "nano" in out


@pytest.mark.parametrize("option", [(), ("--backbone", "mini")])
def test_a_model_of_an_earlier_mini_names_the_missing_file_in_one_line(
    option: tuple[str, ...], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)  # as in a wheel, which has them not
    model = Path(__file__).parents[1] / "model" / "golden" / "mini-v1.protosteer"
    said = expect_cli_error("backbone-not-found", "predict", model, folder, *option)
    place = cache_dir() / "weights" / "mini-v1.safetensors"
    assert str(place) in said and said.count("--weights FILE") == 1
