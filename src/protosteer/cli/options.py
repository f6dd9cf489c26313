"""Options that several commands share, and how their words are parsed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from protosteer.cli import completion
from protosteer.cli.common import CommandLineError
from protosteer.errors import SettingsError
from protosteer.settings import parse_value

Json = Annotated[bool, Option("--json", help="Print results as JSON.")]
Device = Annotated[
    str, Option("--device", autocompletion=completion.device_names, help="Device: auto, cpu, cuda or mps.")
]
PrecisionName = Literal["auto", "fp32", "bf16"]
PRECISION = Option(
    "--precision",
    help="Precision of forward passes. auto: bf16 where the hardware supports it, else fp32; always fp32 to reproduce the paper.",
)
Precision = Annotated[PrecisionName, PRECISION]


def path_of(text: str) -> Path:
    """Return the path of a word; reject an empty one, which is probably a shell variable that is not set."""
    if not text:
        raise CommandLineError("the path is empty; name a file or folder", code="empty-path")
    return Path(text)


def _check_threads(threads: int | None) -> int | None:
    """Return the number of threads; reject one that is far beyond the machine's processors."""
    limit = 16 * (os.cpu_count() or 1)
    if threads is not None and threads > limit:
        message = f"{threads} threads are more than 16 per processor; give at most {limit}"
        raise CommandLineError(message, code="too-many-threads", most=limit)
    return threads


def check_reject(fraction: float | None) -> float | None:
    """Return the value of `--reject`, which is checked before a model is opened."""
    if fraction is not None and not 0.0 <= fraction < 1.0:
        message = f"{fraction:g} is not a fraction from 0 to below 1, such as 0.05"
        raise CommandLineError(message, code="bad-reject", value=fraction)
    return fraction


Threads = Annotated[
    int | None, Option("--threads", min=1, callback=_check_threads, help="Number of CPU threads (default: all cores).")
]
NewBackbone = Annotated[
    str | None,
    Option(
        "--backbone",
        autocompletion=completion.backbone_names,
        help="Backbone of a new model: a short name, a timm model name, or auto, which tries local and a few small downloadable ones on your images (default: auto).",
    ),
]
Thumbnails = Annotated[
    bool, Option("--thumbnails", help="Keep thumbnails of some images in MODEL.thumbs, for the web UI.")
]
Weights = Annotated[Path | None, Option("--weights", help="Path to the backbone weights.")]
Preset = Annotated[
    str | None,
    Option(
        "--preset",
        metavar="NAME",
        autocompletion=completion.preset_names,
        help="instant: no training; fast (default): one shared prompt; best: also one prompt per task; paper: CPP, 50 epochs; paper-text and authors: as its text or its code has it.",
    ),
]
Settings = Annotated[
    list[str] | None, Option("--set", metavar="NAME=VALUE", help="Change a setting, such as epochs=20; repeatable.")
]

ModelFile = Annotated[Path, Argument(metavar="MODEL", parser=path_of, help="Model file.")]
ModelBackbone = Annotated[
    str | None,
    Option(
        "--backbone",
        autocompletion=completion.backbone_names,
        help="Backbone: a short name or a timm model name (default: the model's own).",
    ),
]
ModelWeights = Annotated[Path | None, Option("--weights", help="Path to the backbone weights, if they have moved.")]


@dataclass(frozen=True)
class Loading:
    """Options of every command that loads a model with its backbone."""

    backbone: ModelBackbone = None
    weights: ModelWeights = None
    device: Device = "auto"
    precision: Precision = "auto"
    threads: Threads = None


@dataclass(frozen=True)
class NewLoading(Loading):
    """Options of commands that may also create a model."""

    backbone: NewBackbone = None
    weights: Weights = None


@dataclass(frozen=True)
class Workers:
    """Options that say where parallel work is done."""

    engine: Annotated[
        str,
        Option(
            metavar="local|ray",
            autocompletion=completion.engine_names,
            help="Where to run: local (this process) or ray (parallel workers with --threads CPUs or one GPU each).",
        ),
    ] = "local"
    address: Annotated[
        str | None,
        Option(metavar="HOST:PORT|auto", help="Address of a running Ray cluster (default: start a temporary one)."),
    ] = None


# How messages of the library name a parameter, and the flag for it. A value may follow the sign.
FLAGS = {
    "folder=": "--onnx",
    "holdout=": "--holdout",
    "host=": "--host",
    "keep_versions=": "--keep-versions",
    "link=True": "--link",
    "method=": "--method",
    "out=": "--out",
    "overwrite=True": "--overwrite",
    "port=": "--port",
    "published=True": "--settings published",
    "resume=True": "--resume",
    "seeds=": "--seeds",
    "skip_unreadable=True": "--skip-unreadable",
    "stream=": "--stream",
    "task_renames=": "--rename-task OLD=NEW",
    "weights=": "--weights",
}
# Not within a longer word, a path or quotes: there it is part of a name that a user has given.
_NAMED = re.compile(rf"(?<![\w./'\"-])({'|'.join(map(re.escape, FLAGS))})(?=(\w?))")


def in_flags(message: str) -> str:
    """Return a message of the library with flags in place of the parameters it names."""
    return _NAMED.sub(lambda match: FLAGS[match[1]] + (" " if match[2] else ""), message)


def command_line() -> list[str]:
    """Return the command as it was typed."""
    return ["protosteer", *sys.argv[1:]]


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE pairs; a value is JSON (5, 0.1, true) or else a bare word."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise SettingsError(
                f"--set {pair}: write NAME=VALUE, for instance --set epochs=20", code="not-a-pair", word=pair
            )
        values[name.strip()] = parse_value(text)
    return values


def parse_pairs(words: list[str], option: str, known_names: Collection[str]) -> dict[str, str]:
    """Parse OLD=NEW pairs. In a word with several equals signs, the first after a known name separates."""
    pairs: dict[str, str] = {}
    for word in words:
        places = [i for i, character in enumerate(word) if character == "=" and 0 < i < len(word) - 1]
        if not places:
            raise CommandLineError(f"{word!r} is not old=new", option=option, code="not-a-pair", word=word)
        place = next((i for i in places if word[:i] in known_names), places[0])
        old_name, new_name = word[:place], word[place + 1 :]
        if old_name in pairs:
            raise CommandLineError(f"{old_name!r} is given two names", option=option, code="named-twice", name=old_name)
        pairs[old_name] = new_name
    return pairs
