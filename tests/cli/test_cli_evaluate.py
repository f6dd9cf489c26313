"""`protosteer evaluate` as a user calls it."""

import json
from pathlib import Path

import pytest

from expect import expect_cli_error, run_cli
from photo_toys import photos
from protosteer.cli import main


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("shop")
    photos(root / "train", ["ant", "bee"])
    photos(root / "test", ["ant", "bee"], per_class=3, seed=1)
    command = ["learn", str(root / "shop.protosteer"), str(root / "train"), "--preset", "instant", "--backbone", "nano"]
    assert main(command) == 0
    return root


def test_evaluate_has_the_metrics_of_the_contract(shop, tmp_path, capsys):
    model, folder, page, plot = shop / "shop.protosteer", shop / "test", tmp_path / "r.html", tmp_path / "c.png"
    figures = json.loads(run_cli(capsys, "evaluate", model, folder, "--json", "--html", page, "--plot", plot).out)
    assert {"accuracy", "calibration_error", "images", "classes", "confusion"} <= figures.keys()
    assert figures["images"] == 6 and figures["classes"]["ant"].keys() == {"precision", "recall", "f1", "support"}
    assert page.stat().st_size and plot.read_bytes().startswith(b"\x89PNG")
    assert len(run_cli(capsys, "evaluate", model, folder, "--csv").out.splitlines()) == 7
    shown = run_cli(capsys, "evaluate", model, shop / "train")
    assert "Accuracy: " in shown.out and "warning: the model was learned from 16 of 16 images" in shown.err
    expect_cli_error("bad-suffix", "evaluate", model, folder, "--html", tmp_path / "r.txt")
    expect_cli_error("conflicting-options", "evaluate", model, folder, "--json", "--csv")
