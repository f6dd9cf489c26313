"""`protosteer report`: one HTML file about runs, or about a model on test images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from protosteer.cli.benchmarks import PANEL
from protosteer.cli.common import CommandLineError, command, say, write_output
from protosteer.cli.evaluate import check_page, evaluate_model
from protosteer.cli.options import Loading, path_of
from protosteer.errors import ProtosteerError

if TYPE_CHECKING:
    from protosteer.report.run_page import ReportRow

MODEL_SUFFIX = ".protosteer"


@command(PANEL)
def report(
    runs: Annotated[
        list[str],
        Argument(metavar="RUN...|MODEL", help="Folders of runs, or LABEL=FOLDER; or a model file with --test."),
    ],
    out: Annotated[Path, Option("--out", "-o", metavar="FILE", help="The HTML file.")] = Path("report.html"),
    test: Annotated[
        Path | None, Option(metavar="FOLDER", parser=path_of, help="For a model: images that were not learned.")
    ] = None,
    tsne: Annotated[
        bool, Option("--tsne", help="Add maps of the test images, embedded again; needs data and weights on this disk.")
    ] = False,
    data_dir: Annotated[Path | None, Option(help="Where data sets are, for pictures of mistakes.")] = None,
    *,
    loading: Loading,
) -> None:
    """Write a report to send to a colleague: one HTML file with charts, which needs no network.

    Several runs are compared, with significance where predictions are stored.
    """
    check_page(out)
    is_model = len(runs) == 1 and Path(runs[0]).is_file() and runs[0].endswith(MODEL_SUFFIX)
    if is_model != (test is not None):
        message = "a model file needs --test FOLDER, and --test needs one model file"
        raise CommandLineError(message, code="conflicting-options")
    if test is not None:
        from protosteer.report.evaluate import as_html

        evaluation = evaluate_model(Path(runs[0]), test, loading)
        write_output(out, as_html(evaluation, f"{Path(runs[0]).name} on {test}").encode(), "--out")
        return
    from protosteer.evaluation.comparison import gather
    from protosteer.evaluation.stored_runs import open_run_stream
    from protosteer.report.run_page import as_html as runs_page
    from protosteer.report.run_page import pictures_of, read_report

    summary = read_report(gather(runs))
    pictures = pictures_of(summary.rows, lambda row: open_run_stream(row.folder, row.configuration, data_dir))
    maps = {k: v for row in summary.rows for k, v in _embed_maps(row, data_dir, loading).items()} if tsne else {}
    summary = replace(summary, pictures=pictures, maps=maps)
    streams = dict.fromkeys(row.configuration["stream"]["name"] for row in summary.rows)
    subject = summary.rows[0].label if len(summary.rows) == 1 else f"{len(summary.rows)} configurations"
    write_output(out, runs_page(summary, f"{subject} on {', '.join(streams)}").encode(), "--out")


def _embed_maps(row: ReportRow, data_dir: Path | None, loading: Loading) -> Mapping[str, Any]:
    """Embed the test images of a row's first run, before and after prompts; nothing if that is not possible."""
    from protosteer.evaluation.experiment import Experiment
    from protosteer.evaluation.reevaluation import run_values
    from protosteer.evaluation.stored_runs import load_learner, open_run_stream, test_embeddings
    from protosteer.report.plots import tsne_map

    try:
        experiment = Experiment.from_values(
            {**run_values(row.folder, row.configuration), "device": loading.device, "weights": loading.weights}
        )
        learner = load_learner(replace(experiment, out=row.folder), row.seeds[0]["seed"])
        stream = open_run_stream(row.folder, row.configuration, data_dir)
    except ProtosteerError as error:
        say(f"no t-SNE of {row.label}: {error}")
        return {}
    if learner is None or stream is None:
        say(f"no t-SNE of {row.label}: it has no stored model, or its images are not on this disk")
        return {}
    plain_embeddings, prompted_embeddings, labels = test_embeddings(learner, stream)
    pairs = (("no prompt", plain_embeddings), ("under the prompt of the best match", prompted_embeddings))
    return {f"{row.label}, {words}": (tsne_map(points.numpy()).tolist(), labels) for words, points in pairs}
