"""Format finished runs as one HTML page: metrics, how they came about, and what they cost."""

from __future__ import annotations

import functools
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from protosteer.errors import RunError
from protosteer.evaluation import metrics
from protosteer.evaluation.predictions import Predictions
from protosteer.evaluation.run_folder import RunFolder
from protosteer.evaluation.significance import compare_with_first
from protosteer.methods import METHODS
from protosteer.report import html, svg
from protosteer.report.compare import Rows, test_cells
from protosteer.report.tables import METRICS, spread_over_seeds
from protosteer.streams import Stream, StreamOptions
from protosteer.util.statistics import calibration_error
from protosteer.util.text import counted

COLUMNS = (
    "last_accuracy", "avg_accuracy", "last_forgetting", "calibration_error", "passes_per_image", "retrieval_accuracy",
    "bytes_per_class", "trained_parameters", "train_seconds", "eval_seconds",
)  # fmt: skip
MAX_PAIRS = 8
MAX_EXAMPLES = 4  # pictures of a confused pair
MAX_LOSS_LINES = 12
SIDE = 72

# Addresses, for `src`, of a row's test images by task and position in it; none if the data is not at hand.
Pictures = Callable[[str, Sequence[tuple[int, int]]], list[str]]
# By title: places on a map, and the label of each.
Maps = Mapping[str, tuple[Sequence[tuple[float, float]], Sequence[str]]]


@dataclass(frozen=True)
class ReportRow:
    """One configuration with its runs.

    Attributes:
        label: Its name.
        seeds: The metrics of each class order and seed, as `comparison.gather` returns them.
        manifest: The manifest of its first run.
        predictions: The predictions after the last task of each run; empty if they are not stored.
    """

    label: str
    seeds: Sequence[Mapping[str, Any]]
    manifest: Mapping[str, Any]
    predictions: Sequence[Predictions] = ()

    @property
    def folder(self) -> Path:
        """The folder of its first run."""
        return Path(self.seeds[0]["folder"]).parent

    @property
    def configuration(self) -> Mapping[str, Any]:
        """The configuration in the manifest of its first run."""
        configuration: Mapping[str, Any] = self.manifest["configuration"]
        return configuration


@dataclass(frozen=True)
class Report:
    """The contents of a page: rows, and what was computed for them."""

    rows: Sequence[ReportRow]
    tests: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pictures: Pictures | None = None
    maps: Maps = field(default_factory=dict)


def read_report(rows: Rows) -> Report:
    """Read manifests and stored predictions of rows, as `comparison.gather` returns them, and test differences."""
    report_rows = [_read_row(label, seeds) for label, seeds in rows.items()]
    tests: Mapping[str, Mapping[str, Any]] = {}
    if all(row.predictions for row in report_rows):
        with suppress(RunError):  # runs of other images: nothing to test
            tests = compare_with_first(rows)
    return Report(report_rows, tests)


def _read_row(label: str, seeds: Sequence[Mapping[str, Any]]) -> ReportRow:
    folders = [Path(seed["folder"]) for seed in seeds]
    manifest = RunFolder(folders[0].parent).manifest
    assert manifest is not None  # `gather` has read it
    files = [sorted(folder.glob("predictions-*.npz")) for folder in folders]
    predictions = [Predictions.load(paths[-1]) for paths in files if paths]
    return ReportRow(label, seeds, manifest, predictions if len(predictions) == len(files) else ())


def as_html(report: Report, title: str) -> str:
    """Return the report as an HTML page."""
    rows = report.rows
    return html.page(
        title,
        html.paragraph(summary(report), "big"),
        html.section("Results", _results(rows), _tests(report)),
        html.section("Settings that differ from the default", _settings(rows)),
        html.section("Accuracy after each task", _accuracy(rows)),
        html.section("Accuracy matrix", _matrices(rows)),
        html.section("Forgetting per task", _forgetting(rows)),
        html.section("Classes", _classes(rows)),
        html.section("Most confused", _side_by_side(_confused(row, report.pictures) for row in rows)),
        html.section("Reliability of probabilities", _reliability(rows)),
        html.section("Forward passes and bytes as tasks grow", _growth(rows)),
        html.section("Training loss", _side_by_side(map(_losses, rows))),
        html.section("t-SNE of test images", _maps(report)),
        html.section("Time per task", _times(rows)),
        html.section("How it was run", *map(_manifest, rows)),
    )


def summary(report: Report) -> str:
    """Summarise accuracy, forgetting and the first difference in one or two sentences."""
    ranking = sorted(report.rows, key=lambda row: -spread_over_seeds(row.seeds)[0]["last_accuracy"])
    leader, reference = ranking[0], report.rows[0]
    mean, std = spread_over_seeds(leader.seeds)
    stream = leader.configuration["stream"]
    spread = f" ± {std['last_accuracy']:.1f}" if std else ""
    words = (
        f"{leader.label} classifies {mean['last_accuracy']:.1f}{spread} % of the test images correctly after "
        f"{counted(len(stream['tasks']), 'task')} of {stream['name']} ({counted(len(stream['class_order']), 'class')}, "
        f"{leader.configuration['backbone']['name']}, {counted(len(leader.seeds), 'run')}) and forgets "
        f"{mean['last_forgetting']:.1f} points."
    )
    if len(report.rows) > 1:
        words = f"Of {len(report.rows)} configurations, {words}"
    rival = next((row for row in ranking if row is not reference), leader)
    test = report.tests.get(rival.label, {})
    if test.get("difference") is not None:
        words += (
            f" {rival.label} has {test['difference']:+.1f} points against {reference.label} "
            f"(95 % interval {test['difference_low']:+.1f} to {test['difference_high']:+.1f}, "
            f"McNemar p = {test['mcnemar_holm_p']:.2g} after Holm's correction)."
        )
    return words


def _results(rows: Sequence[ReportRow]) -> str:
    spreads = [spread_over_seeds(row.seeds) for row in rows]
    names = [name for name in COLUMNS if any(name in mean for mean, _ in spreads)]
    lines = (
        [html.text(row.label), str(len(row.seeds)), *(METRICS[n].number(mean.get(n), std.get(n), " ± ") for n in names)]
        for row, (mean, std) in zip(rows, spreads, strict=True)
    )
    return html.table(["run", "n", *(METRICS[name].title for name in names)], lines)


def _tests(report: Report) -> str:
    if not report.tests:
        return ""
    headings, *lines = test_cells(report.tests)
    note = "Accuracy over images with its 95 % bootstrap interval; differences and tests are against the first row."
    cells = ([html.text(line[0]), *line[1:]] for line in lines)
    return html.paragraph(note, "note") + html.table(headings, cells)


def _settings(rows: Sequence[ReportRow]) -> str:
    """Tabulate the settings and stream options that differ from the default in a row."""
    values: dict[str, dict[str, str]] = {}
    for row in rows:
        configuration = row.configuration
        method = METHODS.get(configuration["method"])
        defaults = method.settings_from(method.preset(None)).to_dict() if method else {}
        options = configuration["stream"].get("options", {})
        pairs = [(n, v, defaults.get(n)) for n, v in configuration["settings"].items()]
        pairs += [(f"stream: {n}", v, StreamOptions().to_dict().get(n)) for n, v in options.items()]
        for name, value, default in pairs:
            if value != default:
                values.setdefault(name, {"default": str(default)})[row.label] = str(value)
    if not values:
        return html.paragraph("None.")
    headings = ["setting", "default", *(row.label for row in rows)]
    cells = ([n, v["default"], *(v.get(row.label, "default") for row in rows)] for n, v in values.items())
    return html.table(headings, (list(map(html.text, line)) for line in cells))


def _accuracy(rows: Sequence[ReportRow]) -> str:
    series = [
        _series(
            row.label,
            [[metrics.average_accuracy(seed["matrix"], i) for i in range(len(seed["matrix"]))] for seed in row.seeds],
        )
        for row in rows
    ]
    note = "Mean over the tasks learned so far, among all their classes; the band is one standard deviation over runs."
    return html.paragraph(note, "note") + svg.line_chart(series, "tasks learned", "accuracy (%)")


def _matrices(rows: Sequence[ReportRow]) -> str:
    minimum = min(value for row in rows for seed in row.seeds for line in seed["matrix"] for value in line)
    parts = []
    for row in rows:
        tasks = min(len(seed["matrix"]) for seed in row.seeds)
        cells = [
            [statistics.fmean(seed["matrix"][i][j] for seed in row.seeds) if j <= i else None for j in range(tasks)]
            for i in range(tasks)
        ]
        names = [str(i + 1) for i in range(tasks)]
        picture = svg.heat_map(cells, names, names, ("after task", "on task"), min(90.0, minimum), 100.0)
        parts.append(html.subsection(row.label, picture))
    return _side_by_side(parts)


def _forgetting(rows: Sequence[ReportRow]) -> str:
    """Draw, for each task, how far its accuracy fell from its best."""

    def drops(matrix: metrics.Matrix) -> list[float | None]:
        end = len(matrix) - 1
        return [max(matrix[k][j] for k in range(j, end)) - matrix[end][j] for j in range(end)]

    series = [_series(row.label, [drops(seed["matrix"]) for seed in row.seeds]) for row in rows]
    return svg.line_chart(series, "task", "points forgotten", zero=True)


def _classes(rows: Sequence[ReportRow]) -> str:
    test_rows = [row for row in rows if row.predictions]
    if not test_rows:
        return html.paragraph("These runs have no stored predictions.", "note")
    recalls = {row.label: _recalls(row) for row in test_rows}
    names = list(dict.fromkeys(name for by_class in recalls.values() for name in by_class))
    lines = (
        [html.text(name), *(html.share_bar(recalls[row.label].get(name)) for row in test_rows)] for name in names
    )  # fmt: skip
    note = (
        "Share of each class's test images that are classified correctly after the last task; click a heading to sort."
    )
    return html.paragraph(note, "note") + html.table(["class", *(f"{row.label} (%)" for row in test_rows)], lines)


def _recalls(row: ReportRow) -> dict[str, float]:
    recalls: dict[str, list[float]] = {}
    for predictions in row.predictions:
        for number in np.unique(predictions.actual):
            recall = 100.0 * float(predictions.right[predictions.actual == number].mean())
            recalls.setdefault(str(predictions.classes[number]), []).append(recall)
    return {name: statistics.fmean(values) for name, values in sorted(recalls.items())}


def _confused(row: ReportRow, pictures: Pictures | None) -> str:
    """List the pairs of classes that were confused most, with pictures of the first run."""
    if not row.predictions:
        return ""
    counts: Counter[tuple[str, str]] = Counter()
    for result in row.predictions:
        actual, predicted = (result.classes[numbers[~result.right]] for numbers in (result.actual, result.predicted))
        counts.update(zip(actual.tolist(), predicted.tolist(), strict=True))
    lines = [
        [html.text(actual), html.text(predicted), _examples(row, actual, predicted, pictures), str(count)]
        for (actual, predicted), count in counts.most_common(MAX_PAIRS)
    ]
    headings = ["actual", "predicted", "examples", "images, all runs"]
    return html.subsection(row.label, html.table(headings, lines, words=3) if lines else html.paragraph("No mistakes."))


def _examples(row: ReportRow, actual: str, predicted: str, pictures: Pictures | None) -> str:
    """Return pictures of a pair's mistakes in the first run; nothing if the data is not at hand."""
    result = row.predictions[0]
    names = result.classes
    mistakes = np.flatnonzero((names[result.actual] == actual) & (names[result.predicted] == predicted))[:MAX_EXAMPLES]
    places = [(int(result.task[i]), int((result.task[:i] == result.task[i]).sum())) for i in mistakes]
    shots = pictures(row.label, places) if pictures and places else []
    return "".join(f'<img class="shot" alt="" width="{SIDE}" height="{SIDE}" src="{shot}"> ' for shot in shots)


def _reliability(rows: Sequence[ReportRow]) -> str:
    bins = {row.label: [seed["reliability"] for seed in row.seeds if seed.get("reliability")] for row in rows}
    pools = {row.label: metrics.pooled(bins[row.label]) for row in rows if len(bins[row.label]) == len(row.seeds)}
    if not pools:
        return ""
    errors = "; ".join(f"{label}: {calibration_error(parts):.1f} %" for label, parts in pools.items())
    note = f"Calibration error, {errors}. Dots on the diagonal are honest; their size is their share of the images."
    return html.paragraph(note, "note") + svg.reliability_chart(pools)


def _growth(rows: Sequence[ReportRow]) -> str:
    charts = {"passes_per_image": "forward passes per image", "bytes": "bytes of the state"}
    return _side_by_side(_moments(rows, name, "tasks learned", title) for name, title in charts.items())


def _losses(row: ReportRow) -> str:
    """Draw the loss of each epoch of the first run, a line per training."""
    moments = row.seeds[0].get("after_each_task", [])
    trainings = [(i, losses) for i, moment in enumerate(moments, 1) for losses in moment.get("losses") or [] if losses]
    series = [svg.Series(f"task {i}", losses) for i, losses in trainings[:MAX_LOSS_LINES]]
    return html.subsection(row.label, svg.line_chart(series, "epoch", "loss"))


def _times(rows: Sequence[ReportRow]) -> str:
    charts = {"train_seconds": "seconds of learning", "eval_seconds": "seconds of testing"}
    return _side_by_side(_moments(rows, name, "task", title) for name, title in charts.items())


def _moments(rows: Sequence[ReportRow], name: str, x_title: str, y_title: str) -> str:
    """Draw a value that is measured after each task: mean and deviation over the runs of each row."""
    lines = {row.label: [[m.get(name) for m in seed.get("after_each_task", [])] for seed in row.seeds] for row in rows}
    return svg.line_chart([_series(*line) for line in lines.items()], x_title, y_title, zero=True)


def _maps(report: Report) -> str:
    return _side_by_side(html.subsection(title, svg.scatter(*places, title)) for title, places in report.maps.items())


def _manifest(row: ReportRow) -> str:
    session = row.manifest["sessions"][-1]
    circumstances = session["circumstances"]
    commit = circumstances.get("commit") or {}
    state = "" if not commit else f", commit {commit['hash'][:12]}{'' if commit.get('clean') else ', with changes'}"
    machine = circumstances.get("machine", {})
    words = (
        f"{row.label}: began {session.get('began', 'at an unknown time')}, protosteer "
        f"{circumstances.get('versions', {}).get('protosteer', '?')}{state}, {machine.get('processor', '?')}, "
        f"{machine.get('device', '?')}, {counted(circumstances.get('threads', 1), 'thread')}."
    )
    manifest = "\n".join(map(html.text, json.dumps(row.manifest, indent=1).splitlines()))
    return html.paragraph(words) + f"<details><summary>Manifest</summary><pre>{manifest}</pre></details>"


def _side_by_side(parts: Iterable[str]) -> str:
    """Place parts side by side where the page is wide enough; drop empty parts."""
    columns = "".join(f"<div>{part}</div>" for part in parts if part)
    return f'<div class="pair">{columns}</div>' if columns else ""


def _series(label: str, lines: Sequence[Sequence[float | None]]) -> svg.Series:
    """Return mean and sample standard deviation over runs at each place that all runs have."""
    columns = [[value for value in column if value is not None] for column in zip(*lines, strict=False)]
    complete = [column if len(column) == len(lines) else [] for column in columns]
    means = [statistics.fmean(column) if column else None for column in complete]
    return svg.Series(label, means, [statistics.stdev(column) if len(column) > 1 else 0.0 for column in complete])


def pictures_of(rows: Sequence[ReportRow], open_test: Callable[[ReportRow], Stream | None]) -> Pictures:
    """Return a function that fetches test images of rows; it opens a stream at the first request."""
    by_label = {row.label: row for row in rows}
    open_once = functools.cache(lambda label: open_test(by_label[label]))

    def fetch(label: str, places: Sequence[tuple[int, int]]) -> list[str]:
        stream = open_once(label)
        return [] if stream is None else [_shot(stream, *place) for place in places]

    return fetch


def _shot(stream: Stream, task: int, position: int) -> str:
    pixels = stream[task].test.pixels([position])[0].permute(1, 2, 0).contiguous().numpy()
    return html.jpeg_uri(Image.fromarray(pixels).resize((2 * SIDE, 2 * SIDE), Image.Resampling.BICUBIC))
