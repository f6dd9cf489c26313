"""What suggestions are worth: how many labels are needed, and one tiny measurement from end to end."""

from __future__ import annotations

import json

import pytest
import torch

import suggestions
from conftest import tiny_backbone
from protosteer.backbones import Backbone
from set_toys import idx_folder
from suggestion_report import needed

pytestmark = pytest.mark.slow


def test_labels_needed_lie_between_rounds() -> None:
    curve = [50.0, 60.0, 60.0, 80.0]
    assert needed(curve, 55.0, 50) == 25.0
    assert needed(curve, 60.0, 50) == 50.0
    assert needed(curve, 70.0, 50) == 125.0
    assert needed(curve, 81.0, 50) is None


def test_images_of_a_trial_are_shared_out_once() -> None:
    kept = {"train": torch.arange(60.0).view(5, 12, 1), "test": torch.zeros(5, 2, 1)}
    trial = suggestions.Trial(kept, 3, 2, seed=1)
    assert trial.train.shape == (3, 12, 1) and len(trial.train.unique()) == 36
    assert torch.equal(trial.train, suggestions.Trial(kept, 3, 2, seed=1).train)


def test_a_measurement_from_end_to_end(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(Backbone, "load", lambda *args, **kwargs: tiny_backbone())
    data, out = idx_folder(tmp_path / "digits", 4), tmp_path / "tiny.json"
    sizes = {"classes": 3, "start": 2, "images": 10, "test": 5, "count": 3, "rounds": 2, "seeds": 2}
    words = [f"--{name}={value}" for name, value in sizes.items()]
    keep = f"--keep={tmp_path / 'kept.safetensors'}"
    given = suggestions.parser().parse_args(["measure", str(data), *words, keep, f"--out={out}"])
    given.work(given)
    figures = json.loads(out.read_text())
    assert {name: [len(c) for c in curves] for name, curves in figures["curves"].items()} == {
        "suggested": [3, 3], "most in doubt": [3, 3], "random": [3, 3],
    }  # fmt: skip
    assert figures["curves"]["suggested"][0][0] == figures["curves"]["random"][0][0]
    assert figures["copies"]["pictures"] == 20
    assert str(tmp_path) not in out.read_text()  # figures go into the repository, paths of a machine do not
    capsys.readouterr()
    given = suggestions.parser().parse_args(["table", str(out)])
    given.work(given)
    assert "| suggested less random | +0.0 ± 0.0 |" in capsys.readouterr().out
    given = suggestions.parser().parse_args(["plot", str(out), f"--out={tmp_path / 'x.png'}"])
    given.work(given)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
