"""Options that mean the same in several commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

from protosteer.cli import completion

Json = Annotated[bool, Option("--json", help="Print the figures as JSON.")]
Device = Annotated[
    str, Option("--device", autocompletion=completion.device_names, help="auto, cpu, cuda or mps.")
]


def path_of(text: str) -> Path:
    """An empty word is not the current folder: more likely a variable of a shell that was not set."""
    if not text:
        raise BadParameter("the path is empty; name a file or folder")
    return Path(text)


def _bounded(threads: int | None) -> int | None:
    most = 16 * (os.cpu_count() or 1)
    if threads is not None and threads > most:
        raise BadParameter(f"{threads} threads are more than 16 per processor; give at most {most}")
    return threads


Threads = Annotated[
    int | None, Option("--threads", min=1, callback=_bounded, help="Threads of the processor.")
]
NewBackbone = Annotated[
    str | None,
    Option(
        "--backbone",
        autocompletion=completion.backbone_names,
        help="Short name, a name of timm's, or auto: of those on this disk, and of a few small ones that are "
        "fetched, the one that suits the images best (default: that of the model; auto for a new one).",
    ),
]
Thumbnails = Annotated[
    bool,
    Option(
        "--thumbnails",
        help="Keep small pictures of some images beside the model, in MODEL.thumbs, for the page.",
    ),
]
Weights = Annotated[Path | None, Option("--weights", help="File with the backbone's weights.")]
Preset = Annotated[
    str | None,
    Option(
        "--preset",
        metavar="NAME",
        autocompletion=completion.preset_names,
        help="What is trained: nothing (instant), one prompt for all classes (fast), a prompt per task (best, "
        "the default), or that and all else as in the paper (paper).",
    ),
]
Settings = Annotated[
    list[str] | None, Option("--set", metavar="NAME=VALUE", help="A setting of the method; repeatable.")
]

# Who does what can be done at once.
Executor = Annotated[
    str,
    Option(
        "--engine",
        metavar="local|ray",
        autocompletion=completion.engine_names,
        help="local: this process, one after the other. ray: workers, each with --threads processors, or a GPU.",
    ),
]
Address = Annotated[
    str | None,
    Option(
        metavar="HOST:PORT|auto", help="Of a Ray cluster that runs (default: one is started here, and ended)."
    ),
]

# Of a model file, which knows its backbone and where its weights were.
ModelFile = Annotated[Path, Argument(metavar="MODEL", parser=path_of, help="Model file.", show_default=False)]
ModelBackbone = Annotated[
    str | None,
    Option(
        "--backbone",
        autocompletion=completion.backbone_names,
        help="Short name, or a name of timm's (default: the model's own).",
    ),
]
ModelWeights = Annotated[
    Path | None,
    Option("--weights", help="File with the backbone's weights, if they are not where they were."),
]
