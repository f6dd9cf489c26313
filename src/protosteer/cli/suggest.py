"""`protosteer suggest`: which images to label next (active learning), and likely label issues."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from protosteer.cli.common import CommandLineError, command, print_json, progress, say, show
from protosteer.cli.loading import PANEL, open_learner, refuse_existing
from protosteer.cli.options import Json, Loading, ModelFile, check_reject, path_of
from protosteer.cli.predict import find_files
from protosteer.util.files import writing
from protosteer.util.text import counted

if TYPE_CHECKING:
    from protosteer.data.class_folders import Files
    from protosteer.learner import Learner
    from protosteer.workflows.active_learning import Suggestions


@command(PANEL)
def suggest(
    model: ModelFile,
    paths: Annotated[
        list[str] | None,
        Argument(metavar="PATH", help="Images without labels: files, folders, patterns, lists, as for predict."),
    ] = None,
    check: Annotated[
        Path | None,
        Option(metavar="FOLDER", parser=path_of, help="Check a labelled folder for mislabelled images instead."),
    ] = None,
    count: Annotated[int, Option(min=1, help="Maximum number of images per reason.")] = 50,
    reject: Annotated[
        float,
        Option(metavar="FRACTION", callback=check_reject, help="Threshold for unknown images, as in predict --reject."),
    ] = 0.05,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="File of rows (.parquet, .csv, .jsonl) instead of a table.")
    ] = None,
    *,
    loading: Loading,
    as_json: Json = False,
) -> None:
    """Suggest images to label next: the most informative, out-of-distribution ones, and near-duplicates.

    With --check, find label issues in class folders instead. Nothing is changed.
    """
    if bool(paths) == (check is not None):
        message = "give either images without labels, or a folder of class folders with --check"
        raise CommandLineError(message, code="conflicting-options")
    from protosteer.data.class_folders import read_folder

    if out is not None:
        _check_out(out, as_json)
    labelled_files = read_folder(check) if check is not None else None  # complains before anything is loaded
    files = find_files(paths) if paths else []
    learner = open_learner(model, loading)
    suggestions = _find(learner, labelled_files, files, count, reject)
    for error in suggestions.errors.values():
        say(f"warning: {error}")
    _tell(suggestions, out, as_json)
    if suggestions.chosen and not as_json:
        say(_describe_next_step(model, check))


def _check_out(out: Path, as_json: bool) -> None:
    from protosteer.data.image_lists import SUFFIXES
    from protosteer.workflows.prediction_table import is_table

    if as_json:
        raise CommandLineError("choose one of --json and --out", code="conflicting-options")
    if not is_table(str(out)):
        raise CommandLineError(f"--out {out} does not end in {', '.join(SUFFIXES)}", code="bad-suffix", path=out)
    refuse_existing(out)


def _find(learner: Learner, labelled_files: Files | None, files: list[Path], count: int, reject: float) -> Suggestions:
    from protosteer.workflows.active_learning import suggest as choose
    from protosteer.workflows.label_issues import mislabelled
    from protosteer.workflows.ood import is_calibrated

    with progress() as on_stage:
        if labelled_files is not None:
            return mislabelled(learner, labelled_files, count, on_stage)
        if reject and not is_calibrated(learner):
            say("note: no class has two images, so no image can be flagged as out-of-distribution")
        return choose(learner, files, count, reject, on_stage)


def _tell(suggestions: Suggestions, out: Path | None, as_json: bool) -> None:
    from protosteer.report.active_learning import overview
    from protosteer.workflows.prediction_table import write_table

    if as_json:
        print_json({"images": suggestions.images, "found": suggestions.found, "rows": list(suggestions.rows())})
    elif out is None:
        show(overview(suggestions))
    else:
        with writing(out, "--out"):
            write_table(out, suggestions, suggestions.rows())
        say(f"Written: {out}: {counted(len(suggestions.chosen) + len(suggestions.errors), 'row')}")


def _describe_next_step(model: Path, check: Path | None) -> str:
    if check is not None:
        return (
            "Next: review these images (many are correct but hard), move the wrong ones, then forget the affected "
            f"classes and learn {check} again"
        )
    return (
        "Next: move those worth labelling into a folder per class, such as labelled/cat, then: protosteer learn "
        f"{shlex.quote(str(model))} labelled"
    )
