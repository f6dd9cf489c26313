"""The plot of accuracy against cost: right numbers out of runs and ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trade_off

RATIOS = {
    name: {"value": value, "target": 1.0, "spread": 0.0}
    for name, value in {
        "late_training_k4": 1.25, "cached_training_k1": 1.1, "cached_training_k4": 2.0, "late_predict_k4": 4.0,
        "late_training_nano_k2": 2.0, "late_predict_nano_k2": 2.5,
    }.items()
}  # fmt: skip


def run(folder: Path, layer: int, views: int, seeds: dict[int, float], backbone: str = "tiny") -> Path:
    settings = {"prompt_from_layer": layer, **({"cached_views": views} if views else {})}
    folder.mkdir()
    about = {"configuration": {"settings": settings, "backbone": {"name": backbone}}}
    (folder / "manifest.json").write_text(json.dumps(about))
    for seed, accuracy in seeds.items():
        (folder / f"seed-{seed}").mkdir()
        (folder / f"seed-{seed}" / "metrics.json").write_text(json.dumps({"last_accuracy": accuracy}))
    return folder


def test_points_join_seeds_and_costs(tmp_path):
    runs = [
        run(tmp_path / "a", 1, 0, {0: 70.0}),
        run(tmp_path / "b", 1, 0, {1: 72.0}),
        run(tmp_path / "c", 4, 0, {0: 69.0}),
        run(tmp_path / "d", 4, 4, {0: 68.0, 1: 70.0}),
        run(tmp_path / "e", 7, 4, {}),  # begun, and nothing finished
    ]
    paper, late, cached = trade_off.gather(runs, RATIOS)
    assert (paper.accuracies, paper.training, paper.prediction) == ([70.0, 72.0], 1.0, 1.0)
    assert (late.training, late.prediction, late.spread) == (0.8, 0.25, 0.0)
    assert (cached.views, cached.accuracy, cached.training) == (4, 69.0, 0.5)
    assert cached.spread == pytest.approx(2**0.5)
    text = trade_off.table([paper, late, cached])
    assert (
        "| 4 | 4 | 2 | 69.00 ± 1.41 | 0.50 | 0.25 |" in text
        and "| 4 | none | 1 | 69.00 | 0.80 | 0.25 |" in text
    )


def test_nano_has_its_own_costs(tmp_path):
    (point,) = trade_off.gather([run(tmp_path / "a", 2, 0, {0: 70.0}, "nano")], RATIOS)
    assert (point.training, point.prediction) == (0.5, 0.4)


def test_the_picture_is_written(tmp_path, capsys):
    runs = [run(tmp_path / "a", 1, 0, {0: 70.0}), run(tmp_path / "b", 4, 4, {0: 68.0, 1: 70.0})]
    (tmp_path / "costs.json").write_text(json.dumps({"ratios": RATIOS}))
    out = tmp_path / "x.png"
    trade_off.main([str(tmp_path / "costs.json"), *map(str, runs), "--out", str(out), "--title", "Q3"])
    assert (
        out.read_bytes()[:4] == b"\x89PNG"
        and "| 1 | none | 1 | 70.00 | 1.00 | 1.00 |" in capsys.readouterr().out
    )
