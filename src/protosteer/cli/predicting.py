"""`protosteer predict`: image files in, one line per image out, as soon as it is known."""

from __future__ import annotations

import functools
import glob
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from protosteer.cli.common import app, polite_kill, say
from protosteer.cli.models import PANEL, open_learner, say_notes
from protosteer.cli.options import Device, ModelBackbone, ModelFile, ModelWeights, Threads, path_of
from protosteer.errors import DataError


@app.command(rich_help_panel=PANEL)
def predict(
    model: ModelFile,
    paths: Annotated[
        list[str],
        Argument(
            metavar="PATH",
            help="Image files, folders, patterns such as 'new/*.jpg', or - for a list on standard input.",
            show_default=False,
        ),
    ],
    top: Annotated[int, Option(min=1, help="So many classes, the likeliest first.")] = 3,
    reject: Annotated[
        float | None,
        Option(
            metavar="FRACTION",
            help="Call images unknown that are less like the classes than this share of known ones.",
        ),
    ] = None,
    explain: Annotated[
        bool, Option("--explain", help="Say which tasks' prompts were tried, what won, what came second.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per line.")] = False,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV.")] = False,
    backbone: ModelBackbone = None,
    weights: ModelWeights = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Say what is on images. Files that cannot be read are named, the others predicted all the same."""
    from protosteer.data.images import ForgivingFiles
    from protosteer.photos.rejection import Rejection
    from protosteer.report import predictions

    if as_json and as_csv:
        raise typer.BadParameter("choose one of --json and --csv")
    files = find_files(paths)
    learner = open_learner(model, backbone, weights, device, threads)
    rejection = Rejection(learner, reject) if reject is not None else None
    as_text = functools.partial(predictions.as_text, evidence=learner.fusion is not None)
    write = json.dumps if as_json else predictions.as_csv if as_csv else as_text
    if as_csv:
        print(predictions.csv_header(min(top, len(learner.classes)), explain))
    elif not as_json:
        say_notes(learner)
    images = ForgivingFiles(files, learner.backbone.preprocessing)
    chunk = learner.backbone.batch_size(learner.settings.embed_batch_size)
    done = 0
    with polite_kill():
        for part in learner.stream(images, chunk):
            names = [str(path) for path in files[done : done + len(part)]]
            for row in predictions.told(names, part, learner, top, rejection, explain):
                if done in images.errors:
                    say(f"warning: {images.errors[done]}")
                else:
                    print(write(row), flush=True)
                done += 1
    if images.errors:
        raise DataError(
            f"{len(images.errors)} of {len(files)} files could not be read; the others were predicted"
        )


def find_files(words: list[str]) -> list[Path]:
    """The image files that are meant, in their order; what was typed must exist, what is listed may not."""
    from protosteer.data.files import image_files

    found: list[Path] = []
    for word in words:
        path_of(word)
        if word == "-":
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
