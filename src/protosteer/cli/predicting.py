"""`protosteer predict`: image files in, one line per image out, as soon as it is known."""

from __future__ import annotations

import glob
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protosteer.cli.common import app, polite_kill, say
from protosteer.cli.models import PANEL, BackboneName, Device, ModelFile, Threads, Weights, open_learner
from protosteer.errors import DataError

if TYPE_CHECKING:
    from protosteer.report.predictions import Line

STANDARD_INPUT = "-"


@app.command(rich_help_panel=PANEL)
def predict(
    model: ModelFile,
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="Image files, folders, patterns such as 'new/*.jpg', or - for a list on standard input.",
            show_default=False,
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="So many classes, the likeliest first.")] = 3,
    reject: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION",
            help="Call images unknown that are less like the classes than this share of known ones.",
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Say which tasks were retrieved, what won, and what came second."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    backbone: BackboneName = None,
    weights: Weights = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Say what is on images. Files that cannot be read are named, and the others are predicted all the same."""
    from protosteer.data.images import ForgivingFiles
    from protosteer.photos.rejection import Rejection
    from protosteer.report.predictions import csv_header, lines

    if as_json and as_csv:
        raise typer.BadParameter("choose one of --json and --csv")
    files = find_files(paths)
    learner = open_learner(model, backbone, weights, device, threads)
    rejection = Rejection(learner.memory, reject) if reject is not None else None
    show = _writer(as_json, as_csv)
    if as_csv:
        print(csv_header(min(top, len(learner.classes)), explain))
    images = ForgivingFiles(files, learner.backbone.preprocessing)
    chunk = learner.backbone.batch_size(learner.settings.embed_batch_size)
    done = 0
    with polite_kill():
        for prediction in learner.stream(images, chunk):
            names = [str(path) for path in files[done : done + len(prediction)]]
            for row, line in enumerate(
                lines(names, prediction, learner.index, top, rejection, explain), done
            ):
                if row in images.errors:
                    say(f"warning: {images.errors[row]}")
                else:
                    show(line)
            done += len(prediction)
    if images.errors:
        raise DataError(
            f"{len(images.errors)} of {len(files)} files could not be read; the others were predicted"
        )


def find_files(words: list[str]) -> list[Path]:
    """The image files that are meant, in their order; what was typed must exist, what is listed may not."""
    from protosteer.data.files import image_files

    found: list[Path] = []
    for word in words:
        if word == STANDARD_INPUT:
            found += [Path(line) for line in _listed()]
            continue
        matches = [word] if Path(word).exists() else sorted(glob.glob(word, recursive=True))
        if not matches:
            kind = "matches no file" if glob.has_magic(word) else "does not exist"
            raise DataError(f"{word} {kind}; check the path")
        found += [path for match in matches for path in image_files(Path(match))]
    if not found:
        raise DataError("no image file was named; give files, folders, patterns or a list on standard input")
    return found


def _listed() -> Iterator[str]:
    """Lines of standard input; a file's name need not be text."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for line in sys.stdin:
        if line.strip():
            yield line.rstrip("\r\n")


def _writer(as_json: bool, as_csv: bool) -> Callable[[Line], None]:
    def show(line: Line) -> None:
        text = json.dumps(line.as_json()) if as_json else line.as_csv() if as_csv else line.as_text()
        print(text, flush=True)

    return show
