"""Runs of blurry streams: what they say and write, who is refused, and that they go on to the same bits."""

import json
from pathlib import Path
from typing import Any

import pytest

from expect import expect_error
from protosteer.errors import RunError, SettingsError
from protosteer.evaluation.comparison import gather
from protosteer.evaluation.experiment import Experiment, run_experiment
from protosteer.evaluation.seed_runs import Reporter
from protosteer.evaluation.sweep import plan_experiments
from protosteer.methods import METHODS
from protosteer.report.compare import comparison_csv, comparison_markdown, comparison_tables

pytestmark = pytest.mark.slow

VALUES = {
    "stream": "split-digits", "method": "ncm", "tasks": 3, "train_per_class": 10, "test_per_class": 4,
    "device": "cpu", "blurry": 0.3,
}  # fmt: skip
TRAINED = {
    "method": "cpp", "epochs": 1, "batch_size": 20, "neck_hidden": 16, "augmentation": "none", "centroids": 2,
}  # fmt: skip


def run(out: Path, resume: bool = False, messages: list[str] | None = None, make: Any = None, **values: Any) -> Any:
    callbacks = [] if messages is None else messages
    experiment = Experiment.from_values({**VALUES, **values, "out": out})
    return run_experiment(experiment, resume, on_message=callbacks.append, make_reporter=make)


def results(folder: Path) -> dict[str, Any]:
    """Everything that a seed has written, but how long it took."""
    found: dict[str, Any] = {p.name: p.read_bytes() for p in (folder / "seed-0").iterdir() if p.is_file()}
    figures = json.loads(found.pop("metrics.json"))
    moments = [figures, *figures["after_each_task"]]
    return {**found, "figures": [{k: v for k, v in m.items() if not k.endswith("seconds")} for m in moments[1:]]}


class Stops(Reporter):
    def on_task(self, i: int, run: Any) -> None:
        if i == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", [{}, TRAINED])
def test_an_interrupted_run_ends_in_the_same_bits(tmp_path, method):
    run(tmp_path / "whole", **method)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parted", make=lambda *rest: Stops(), **method)
    run(tmp_path / "parted", resume=True, **method)
    whole = results(tmp_path / "whole")
    assert whole == results(tmp_path / "parted") and len(whole) == 9
    with expect_error("other-configuration", RunError) as caught:
        run(tmp_path / "parted", resume=True, **{**method, "blurry": 0.2})
    assert "stream.options.blurry: 0.3 -> 0.2" in caught.value.details["changed"]


def test_the_share_out_is_said_and_in_the_manifest(tmp_path):
    messages: list[str] = []
    figures = run(tmp_path / "r", messages=messages, disjoint=0.5, class_order="seed:1")
    stream = json.loads((tmp_path / "r" / "manifest.json").read_text())["configuration"]["stream"]
    assert stream["options"]["blurry"] == 0.3 and stream["options"]["disjoint"] == 0.5
    visitors = [sum(task["visiting"].values()) for task in stream["tasks"]]
    assert sum(visitors) == 5 * 3  # of half the classes, three images each
    (line,) = messages
    assert line.startswith(f"training images of other tasks' classes: {visitors[0]} of ") and "in task-3" in line
    assert line in (tmp_path / "r" / "log.txt").read_text() and figures["mean"]["blurred_images"] == 15.0


def test_a_method_that_cannot_is_refused_before_any_work(tmp_path):
    with expect_error("no-repeated-classes", SettingsError, method="icarl"):
        run(tmp_path / "r", method="icarl", backbone="nowhere")
    assert not (tmp_path / "r").exists()
    with expect_error("no-repeated-classes", SettingsError, method="bic"):
        plan_experiments({**VALUES, "method": "ncm,bic"})
    able = list(plan_experiments({**VALUES, "method": "all"}))
    assert able == [name for name, method in METHODS.items() if method.supports_repeated_classes]


def test_a_run_from_before_there_was_blurring_goes_on(tmp_path):
    run(tmp_path / "r", blurry=0.0)
    file = tmp_path / "r" / "manifest.json"
    written = json.loads(file.read_text())
    for name in ("blurry", "disjoint"):
        del written["configuration"]["stream"]["options"][name]
    file.write_text(json.dumps(written))
    figures = run(tmp_path / "r", resume=True, blurry=0.0, seeds="0,1")
    assert [seed["seed"] for seed in figures["seeds"]] == [0, 1]


def test_comparisons_show_what_blurry_streams_are_judged_by(tmp_path):
    run(tmp_path / "a")
    run(tmp_path / "b", blurry=0.0)
    rows = gather([str(tmp_path / "a"), str(tmp_path / "b")])
    assert list(rows) == ["ncm, blurry 0.3", "ncm"]
    titles = [str(table.title) for table in comparison_tables(rows)]
    assert "Blurry task boundaries" in titles
    assert "Blurry task boundaries" not in [str(t.title) for t in comparison_tables({"b": rows["ncm"]})]
    assert "Anytime accuracy (%), mean over images learned" in comparison_markdown(rows)
    assert "blurred_images_mean" in comparison_csv(rows).splitlines()[0]
