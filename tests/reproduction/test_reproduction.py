"""The paper's experiments: definitions, expansion into runs, results, and the paper's arithmetic."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expect import expect_error
from protosteer.backbones import Backbone
from protosteer.backbones.registry import BASE, known_weights
from protosteer.cli import main
from protosteer.errors import SettingsError
from protosteer.evaluation.comparison import gather
from protosteer.evaluation.embedding_cache import EmbeddingCache
from protosteer.evaluation.tuning import tune
from protosteer.methods import METHODS, find_method
from protosteer.paper.vit import ViT
from protosteer.reproduction import driver
from protosteer.reproduction.cost import Stopwatch, estimate
from protosteer.reproduction.definition import catalogue, names, read_definition, read_scale
from protosteer.reproduction.grid import Place, expand, is_finished, tuned_file, unique_runs
from protosteer.reproduction.plots import PLOTS
from protosteer.reproduction.studies import STUDIES, closed_form
from protosteer.reproduction.tuning import tune_missing
from protosteer.settings import Settings, load_toml
from protosteer.streams import StreamOptions, open_stream, split_digits
from protosteer.streams.base import training_view

NAMES = names(catalogue())
OURS = {name for name, method in METHODS.items() if method.__module__.startswith("protosteer.")}
SCALES = {name: read_scale(catalogue(), name) for name in ("paper", "small", "mini")}
TOY = """
title = "Toy"
source = "no table"
plot = "heat"
run = { stream = "digits" }
[metrics]
last_accuracy = "Accuracy"
paper_megabytes_per_task = "MB"
[columns]
r1 = { title = "r = 1", neighbours = 1 }
r2 = { title = "r = 2", neighbours = 2, learned_in = "r1" }
[rows]
free = { title = "free", prompts = false }
cited = { title = "cited", cited = true }
broken = { title = "broken", stream = "missing" }
[paper]
free = { r1 = [[90.0, 1.0], 0.5] }
cited = { r1 = [80.0] }
"""
TOY_SCALE = """
[toy]
title = "toy"
seeds = [0]
[toy.streams]
digits = { stream = "split-digits", tasks = 2, train_per_class = 4, test_per_class = 4, buffer_size = 3 }
missing = { stream = "cub200" }
[toy.backbones]
main = { backbone = "nano" }
[toy.methods]
cpp = { centroids = 2 }
"""


def place(tmp_path: Path, definitions: Path | None = None) -> Place:
    return Place(tmp_path / "out", definitions or catalogue(), data_dir=tmp_path / "data", threads=1)


@pytest.mark.parametrize("name", NAMES)
def test_every_definition_expands_at_every_scale(name: str, tmp_path: Path) -> None:
    for scale in SCALES.values():
        definition = read_definition(catalogue(), name).at_scale(scale.name)
        assert not definition.study or definition.study in STUDIES
        assert definition.plot in PLOTS
        rows, columns = ({line.key for line in part} for part in (definition.rows, definition.columns))
        assert set(definition.paper) <= rows and all(set(cells) <= columns for cells in definition.paper.values())
        cells = expand(definition, scale, place(tmp_path))
        for cell in cells:
            if cell.run:
                protocol = definition.comparison
                seeds, precision = (protocol.seeds, protocol.precision) if protocol else (scale.seeds, "fp32")
                assert cell.run.method in METHODS and (cell.run.seeds, cell.run.precision) == (seeds, precision)
                assert (cell.run.states_from is not None) == bool(cell.column.learned_in)


def test_runs_are_shared_and_the_paper_scale_is_the_papers(tmp_path: Path) -> None:
    scale = SCALES["paper"]
    runs = {
        name: expand(read_definition(catalogue(), name).at_scale("paper"), scale, place(tmp_path))
        for name in ("main", "ablation", "losses", "clustering", "splits")
    }
    own = {name: {cell.run.folder for cell in cells if cell.run} for name, cells in runs.items()}
    default = next(cell.run for cell in runs["losses"] if cell.row.key == "cpl")
    assert default is not None and all(default.folder in folders for folders in own.values())
    settings = default.settings_for(0)
    assert (settings.epochs, settings.batch_size, settings.centroids, settings.neighbours) == (50, 256, 5, 3)
    assert (settings.neck_hidden, settings.neck_layers, settings.temperature) == (2048, 3, 0.6)
    assert (default.backbone, scale.seeds) == ("vit", (0, 1, 2, 3, 4))
    buffers = {cell.column.key: cell.run.settings_for(0).buffer_size for cell in runs["main"] if cell.row.key == "er"}
    assert buffers == {"cifar100": 5000, "five-datasets": 500, "imagenet-r": 5000}
    bounded = unique_runs(runs["main"])
    assert len(bounded) == 36 and len({run.folder for run in bounded}) == 36


def test_grid_runs_once_and_writes_every_format(tmp_path: Path) -> None:
    definitions = tmp_path / "definitions"
    definitions.mkdir()
    (definitions / "toy.toml").write_text(TOY)
    (definitions / "scales.toml").write_text(TOY_SCALE)
    where, scale = place(tmp_path, definitions), read_scale(definitions, "toy")
    toy = driver.read_definitions(where, "all", scale)
    (result,) = driver.reproduce(toy, scale, where, lambda line: None)
    learned, evaluated = (cell.run for cell in expand(toy[0], scale, where)[:2])
    assert learned and evaluated and is_finished(learned) and evaluated.states_from == learned.folder
    first = result.numbers["free", "r1", "last_accuracy"]
    matrix = json.loads((learned.folder / "seed-0" / "metrics.json").read_text())["matrix"]
    assert first.mean == pytest.approx(sum(matrix[-1]) / 2) and first.difference == pytest.approx(first.mean - 90.0)
    assert result.numbers["cited", "r1", "last_accuracy"].mean is None
    assert any("broken" in cell for cell in result.missing)
    lines = list(csv.DictReader(io.StringIO((where.out / "toy.csv").read_text())))
    assert float(lines[0]["difference"]) == pytest.approx(first.difference, abs=1e-3)
    text = (where.out / "toy.md").read_text()
    assert "paper 90.00" in text and "– (paper 80.00)" in text and "Not run" in text
    assert r"\toprule" in (where.out / "toy.tex").read_text()
    assert (where.out / "toy.png").read_bytes().startswith(b"\x89PNG")
    before = (learned.folder / "seed-0" / "metrics.json").stat().st_mtime_ns
    (again,) = driver.reproduce(toy, scale, where, lambda line: None)
    assert again.numbers == result.numbers
    assert (learned.folder / "seed-0" / "metrics.json").stat().st_mtime_ns == before
    assert estimate(learned, Stopwatch()).seconds == 0


COMPARED = """
title = "Compared"
source = "no table"
[comparison]
class_orders = [1, 2]
seeds = [0, 1]
at_most = { epochs = 1 }
tuned = true
precision = "fp32"
[metrics]
last_accuracy = "Accuracy"
[columns]
digits = { title = "Digits", stream = "digits" }
[rows]
ncm = { title = "NCM", method = "ncm" }
fixed = { title = "fixed", method = "ncm", centroids = 2 }
"""


def test_comparison_is_tuned_and_averaged_over_class_orders(tmp_path: Path) -> None:
    definitions = tmp_path / "definitions"
    definitions.mkdir()
    (definitions / "compared.toml").write_text(COMPARED)
    (definitions / "scales.toml").write_text(TOY_SCALE)
    where, scale = place(tmp_path, definitions), read_scale(definitions, "toy")
    assert driver.read_definitions(where, "all", scale) == []
    (compared,) = driver.read_definitions(where, "compared", scale)
    with expect_error("unknown-row", SettingsError, name="slad"):
        driver.reproduce([compared], scale, where, lambda line: None, rows=["slad"])
    order = [(part.rows[0].key, which.start) for part, which in driver.split_work(compared, [])]
    assert order == [("ncm", 0), ("fixed", 0), ("ncm", 1), ("fixed", 1)]  # the first class order of all rows first
    (result,) = driver.reproduce([compared], scale, where, lambda line: None, rows=["ncm"])
    number = result.numbers["ncm", "digits", "last_accuracy"]
    assert set(result.missing) == {"fixed, Digits"} and number.n == 4
    (label,) = rows = gather([str(where.out / "runs")])  # reads the folders by itself
    assert number.mean == pytest.approx(sum(run["last_accuracy"] for run in rows[label]) / 4)
    cell = expand(compared, scale, where)[0]
    assert cell.tuning_run and cell.run
    trials = tune(replace(cell.tuning_run, seeds=(0,)))
    assert cell.run.settings["centroids"] == trials[0].settings["centroids"]
    text = (where.out / "compared.md").read_text()
    assert f"`centroids` {trials[0].settings['centroids']}" in text and "Class orders 1, 2; seeds 0, 1" in text
    fixed = expand(compared, scale, where)[1:]
    tune_missing(fixed, where, lambda line: None)
    assert (
        fixed[0].tuning_run
        and tuned_file(where, fixed[0].tuning_run).is_file()
        and fixed == expand(compared, scale, where)[1:]
    )
    before = [file.stat().st_mtime_ns for file in where.out.glob("tuned/*")]
    driver.reproduce([compared], scale, where, lambda line: None, rows=["ncm"])
    assert [file.stat().st_mtime_ns for file in where.out.glob("tuned/*")] == before


def test_rivals_are_all_methods_with_capped_schedules(tmp_path: Path) -> None:
    definition = read_definition(catalogue(), "rivals")
    cells = [cell for cell in expand(definition, SCALES["mini"], place(tmp_path)) if cell.column.key == "glyphs"]
    assert {cell.run.method for cell in cells if cell.run} == OURS
    for run in unique_runs(cells):
        settings = run.settings_for(0).to_dict()
        assert 0 < settings.get("epochs", 1) <= 10 and 0 < settings.get("batch_size", 1) <= 16, run.method
        assert settings.get("augmentation", "no-flip") == "no-flip" and settings.get("buffer_size", 40) == 40
    assert {run.method: run for run in unique_runs(cells)}["l2p"].settings_for(0).epochs == 5  # its own, which is less
    assert len(unique_runs(cells)) == 3 * len(cells)


def test_cost_counts_images_and_passes(tmp_path: Path) -> None:
    definition = read_definition(catalogue(), "losses").at_scale("mini")
    run = next(cell.run for cell in expand(definition, SCALES["mini"], place(tmp_path)) if cell.row.key == "cpl")
    assert run is not None
    cost = estimate(run, Stopwatch())
    assert (cost.train_images, cost.test_images) == (2 * 200, 2 * 400)
    assert cost.training_passes == 2 * 200 * 10  # seeds, images, epochs
    assert cost.forward_passes == 2 * (2 * 200 + 400 * (1 + 3))  # keys and values, then the plain pass and r prompts
    assert cost.seconds > 0


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "clustering", "--dry-run", "--json", "--out", str(tmp_path)]) == 0
    costs = json.loads(capsys.readouterr().out)
    assert [run["training_passes"] for run in costs["runs"]] == [4000, 4000]
    of_a_row = ["--rows", "kmeans", "--dry-run", "--json", "--out", str(tmp_path)]
    assert main(["reproduce", "clustering", *of_a_row]) == 0
    (only,) = json.loads(capsys.readouterr().out)["runs"]
    assert only["run"] == costs["runs"][0]["run"] != costs["runs"][1]["run"]
    errors: list[Exception] = []
    assert main(["reproduce", "clustring"], errors.append) == 2
    assert isinstance(errors[0], SettingsError) and errors[0].code == "unknown-experiment"


def test_arithmetic_of_the_paper() -> None:
    """12.2 x 768 numbers per class, 0.035 MB per task, between max(1, r / C) and r prompts per image."""
    info = known_weights("vit")
    assert info is not None
    dim, layers, settings = info.config.dim, info.config.depth, Settings.preset("paper")
    prompt = layers * settings.prompt_length * dim
    assert round(prompt * 4 / 2**20, 3) == 0.035
    per_class = prompt / 10 + (2 * settings.centroids + 1) * dim  # keys, values and one variance
    assert per_class / dim == pytest.approx(12.2)
    assert 224 * 224 * 3 / per_class == pytest.approx(15, abs=1.1)  # "roughly 1/15 of an image"
    assert round(10 * prompt * 4 / 2**20, 2) == 0.35
    assert round(100 * 10 * prompt / info.parameters, 2) == pytest.approx(0.10, abs=0.011)


@pytest.mark.parametrize(("centroids", "neighbours"), [(1, 3), (5, 3), (2, 4)])
def test_prompts_per_image_stay_within_the_papers_bounds(centroids: int, neighbours: int) -> None:
    """The lower bound r / C holds if each class has its own prompt: tasks of one class each."""
    backbone = Backbone.load("nano")
    settings = {**find_method("cpp").test_settings, "epochs": 1, "centroids": centroids, "neighbours": neighbours}
    method = find_method("cpp")(backbone, Settings.preset("paper", **settings))
    options = StreamOptions(tasks=10, train_per_class=6, test_per_class=6)
    stream = open_stream("split-digits", options, backbone.preprocessing)
    for task in stream:
        with training_view(task) as lent:
            method.learn(lent)
    answers = [method.answer(EmbeddingCache(method, task.test)) for task in stream]
    prompts = torch.cat([answer.candidates for answer in answers]).sum(dim=1)  # prompts retrieved per image
    assert max(1, neighbours / centroids) <= prompts.min() and prompts.max() <= neighbours


def test_one_step_of_the_paper_scale_on_a_random_vit_b(tmp_path: Path) -> None:
    definition = read_definition(catalogue(), "losses").at_scale("paper")
    run = next(cell.run for cell in expand(definition, SCALES["paper"], place(tmp_path)) if cell.row.key == "cpl")
    assert run is not None
    config = replace(BASE, image_size=32, depth=2)  # its width; five tokens in two layers
    info = known_weights(run.backbone)
    assert info is not None
    backbone = Backbone("vit", ViT(config), replace(info.preprocessing, image_size=32), "random", precision="fp32")
    method = find_method(run.method)(backbone, run.settings_for(0).replace(epochs=1))
    stream = split_digits(5)
    with training_view(stream[0]) as lent:
        method.learn(lent)
    assert method.paper_bytes()["prompt_bytes_per_task"] == 2 * 768 * 4
    assert method.classes == ["0", "1"]


def test_closed_form_of_appendix_a_is_the_gradient() -> None:
    """By hand: two positives and two negatives of one row."""
    similarity = torch.tensor([[0.2, 0.5, -0.1, 0.3]])
    positives = torch.tensor([[True, True, False, False]])
    found = closed_form(similarity, positives, ~positives, 0.5)
    weights = torch.tensor([-0.1, 0.3]).div(0.5).exp()
    expected = torch.tensor([[-1 / (0.5 * 2)] * 2 + (weights / weights.sum() / 0.5).tolist()])
    torch.testing.assert_close(found, expected)
    assert float(found.sum()) == pytest.approx(0, abs=1e-6)


def test_studies_measure_a_finished_run(tmp_path: Path) -> None:
    tiny = {"stream": "split-digits", "tasks": 2, "train_per_class": 3, "test_per_class": 2}
    settings = {"all": {"epochs": 1, "batch_size": 20, "neck_hidden": 16, "centroids": 2}}
    scale = replace(SCALES["mini"], seeds=(0,), streams={"cifar100": tiny}, methods=settings)
    where = place(tmp_path)
    studies = [read_definition(catalogue(), name).at_scale("mini") for name in ("energy", "gradients", "tsne")]
    energy, gradients, tsne = driver.reproduce(studies, scale, where, lambda line: None)
    assert all(number.mean is not None and number.mean < 1e-12 for number in gradients.numbers.values())
    right, share = (energy.numbers["right", "value", name].mean for name in ("free_energy", "lowest_share"))
    assert right is not None and right < 0 and share is not None and 0 <= share <= 100
    assert len(tsne.numbers) == 12 and all(0 <= (number.mean or -1) <= 100 for number in tsne.numbers.values())
    assert {"tsne.png", "tsne-train.png", "tsne-test.png"} <= {path.name for path in where.out.iterdir()}


def test_the_wheel_has_every_definition_and_no_results() -> None:
    project = catalogue().parents[1] / "pyproject.toml"
    if not project.is_file():
        pytest.skip("not a checkout")
    listed = load_toml(project)["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {Path(name).name for name in listed} == {
        path.name for path in catalogue().iterdir() if path.suffix in (".toml", ".txt")
    }
