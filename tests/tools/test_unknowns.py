"""Known against unknown: areas and shares in closed form, and one tiny measurement from end to end."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import unknowns
from conftest import tiny_backbone
from protosteer.backbones import Backbone
from protosteer.errors import DataError, SettingsError
from protosteer.settings import Settings
from set_toys import idx_folder

pytestmark = pytest.mark.slow


def test_areas_in_closed_form():
    # Three classes. Known images match one class; unknown ones are a little like all.
    known = torch.tensor([[0.9, -0.5, -0.5], [-0.5, 0.8, -0.5]])
    unknown = torch.tensor([[0.5, 0.5, 0.5], [0.85, 0.4, 0.4]])
    area = unknowns.areas(known, unknown, 0.6)
    assert area["similarity"] == 0.75  # 0.85 lies between the known images
    assert area["probability"] == 1.0
    assert area["energy"]["1"] == 0.0  # the sum over all classes favours the unknown images
    assert area["energy"]["0.02"] == 0.75
    assert list(area["energy"]) == ["0.6", "1", "0.3", "0.1", "0.05", "0.02"]


def test_percent_of_nothing_is_unknown():
    assert unknowns.percent(torch.tensor([True, False, False])) == 33.33
    assert unknowns.percent(torch.tensor([], dtype=torch.bool)) is None
    assert unknowns.shown(33.33) == "33.3" and unknowns.shown(None) == "–"


def test_files_hold_the_first_images_of_each_class(tmp_path):
    images = unknowns.read(idx_folder(tmp_path / "digits", 3), "test")
    files = unknowns.write(images, ["2", "0"], 2, tmp_path / "out")
    assert [p.relative_to(tmp_path / "out").as_posix() for p in files.paths] == [
        "2/00002.png", "2/00005.png", "0/00000.png", "0/00003.png",
    ]  # fmt: skip
    canvas = tiny_backbone().preprocessing.to_canvas
    with unknowns.Image.open(files.paths[1]) as picture:
        assert torch.equal(torch.from_numpy(np.array(picture)).permute(2, 0, 1), images.pixels[5])
        assert canvas(picture).shape[0] == 3
    with pytest.raises(DataError, match="class '1' has 10 images, not 11"):
        unknowns.write(images, ["1"], 11, tmp_path / "more")


def test_a_folder_without_data_is_refused(tmp_path):
    with pytest.raises(DataError, match="neither CIFAR-100 nor idx files of the test images"):
        unknowns.read(tmp_path, "test")


@pytest.fixture
def words(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.setattr(Backbone, "load", lambda *args, **kwargs: tiny_backbone())
    data = idx_folder(tmp_path / "digits", 6)
    strange = idx_folder(tmp_path / "letters", 2, seed=7, splits=("t10k",))
    sizes = {"tasks": 2, "classes-per-task": 2, "train": 10, "known": 4, "unseen": 3, "holdout": 0.2}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    return [
        "measure",
        str(data),
        f"--unknown={strange}",
        *options,
        "--set=prompts=false",
        "--set=centroids=1",
    ]


def test_a_measurement_from_end_to_end(tmp_path, words, capsys):
    out = tmp_path / "tiny.json"
    unknowns.main([*words, "--out", str(out)])
    result = json.loads(out.read_text())
    assert result["data"] == {
        "set": "digits",
        "tasks": {"task-1": ["0", "1"], "task-2": ["2", "3"]},
        "train_per_class": 10,
        "holdout": 0.2,
        "held_out_images": 8,
        "known_images": 16,
        "unknown_images": {"other classes": 6, "letters": 6},
        "unseen_per_class": 3,
    }
    assert min(choice["unknown_rejected"]["letters"] for choice in result["rejection"]) > 50
    assert result["accuracy"] == 100.0 and result["auroc"]["letters"]["similarity"] > 0.95
    last = result["rejected_by_task"]["after"][-1]
    assert [len(shares["0.05"]) for shares in result["rejected_by_task"]["after"]] == [1, 2]
    for choice in result["rejection"]:
        shares = last[f"{choice['reject']:g}"]
        assert choice["known_rejected"] == pytest.approx(sum(shares.values()) / 2, abs=0.01)
    thresholds = [choice["threshold"] for choice in result["rejection"]]
    assert thresholds == sorted(thresholds)
    assert result["backbone"]["fingerprint"] == tiny_backbone().fingerprint and "torch" in result["versions"]
    capsys.readouterr()
    unknowns.main(["table", str(out)])
    text = capsys.readouterr().out
    assert "| tiny | letters | " in text and "| tiny | 0.05 | " in text


def test_a_kept_model_is_not_taught_again(tmp_path, words, monkeypatch):
    model = tmp_path / "tiny.protosteer"
    unknowns.main([*words, "--model", str(model), "--out", str(tmp_path / "a.json")])
    monkeypatch.setattr(unknowns, "learn_folder", None)
    unknowns.main([*words, "--model", str(model), "--out", str(tmp_path / "b.json")])
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    with pytest.raises(SettingsError, match="other tasks or with other settings"):
        unknowns.begin(model, tiny_backbone(), Settings.preset("paper", seed=1), {})
