"""`protosteer evaluate`: measure a model on labelled images, and list its mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from protosteer.cli.common import CommandLineError, check_plot, command, print_json, progress, say, show, write_output
from protosteer.cli.loading import PANEL, open_learner
from protosteer.cli.options import Json, Loading, ModelFile, path_of

if TYPE_CHECKING:
    from protosteer.workflows.evaluate_folder import Evaluation


@command(PANEL)
def evaluate(
    model: ModelFile,
    folder: Annotated[
        Path,
        Argument(
            metavar="FOLDER",
            parser=path_of,
            help="Images that were not learned, in one sub-folder per class; or a list with columns path and label.",
        ),
    ],
    html: Annotated[
        Path | None, Option(metavar="FILE", help="HTML page with pictures of all mistakes and of the least certain.")
    ] = None,
    plot: Annotated[Path | None, Option(metavar="FILE", help="PNG file for the confusion matrix.")] = None,
    as_json: Json = False,
    as_csv: Annotated[bool, Option("--csv", help="Print one line per image as CSV.")] = False,
    *,
    loading: Loading,
) -> None:
    """Evaluate a model on labelled images: accuracy, every class, what is confused, the mistakes.

    The range behind the accuracy is its 95 % confidence interval.
    """
    from protosteer.report import evaluate as report
    from protosteer.report.plots import confusion_matrix

    if as_json and as_csv:
        raise CommandLineError("choose one of --json and --csv", code="conflicting-options")
    check_page(html)
    check_plot(plot)
    evaluation = evaluate_model(model, folder, loading)
    if as_json:
        print_json(report.as_json(evaluation))
    elif as_csv:
        print(report.as_csv(evaluation))
    else:
        show(report.overview(evaluation))
    if plot:
        write_output(plot, confusion_matrix(evaluation.labels, evaluation.confusion()), "--plot")
    if html:
        write_output(html, report.as_html(evaluation, f"{model.name} on {folder}").encode(), "--html")


def check_page(page: Path | None) -> None:
    """Reject a page that is not an HTML file, before any work is done for it."""
    if page is not None and page.suffix.lower() not in (".html", ".htm"):
        raise CommandLineError(f"{page} is not an .html file", code="bad-suffix", path=page)


def evaluate_model(model: Path, folder: Path, loading: Loading) -> Evaluation:
    """Evaluate a model file on labelled images; print warnings about files that distort the accuracy."""
    from protosteer.data.sources import read_labelled
    from protosteer.report.evaluate import warnings
    from protosteer.workflows.evaluate_folder import evaluate_folder

    files = read_labelled(folder)  # complains before anything is loaded
    learner = open_learner(model, loading)
    with progress() as on_stage:
        evaluation = evaluate_folder(learner, files, on_stage)
    for line in (*(f"warning: {error}" for error in evaluation.errors.values()), *warnings(evaluation)):
        say(line)
    return evaluation
