"""Names that the Tab key offers: typer's completion asks these functions.

A press of Tab must answer at once, so nothing here imports torch: registered names are read from the source
files that declare them, a model's names from its header.
"""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from typer import Context

from protosteer.settings import PRESETS
from protosteer.util.files import open_regular

_METHOD = re.compile(r'^ {4}name = "([^"]+)"|^@register_method\(\s*"([^"]+)"', re.MULTILINE)
_BACKBONE = re.compile(r'^ {4}BackboneInfo\(\s*"?([\w-]+)', re.MULTILINE)
_STREAM = re.compile(r'\bBenchmark\(\s*"([^"]+)"')
_DATASETS = re.compile(r"\bdatasets=\(([^)]*)\)")


def method_names() -> list[str]:
    """Return the names of the registered methods."""
    return sorted({attribute or argument for attribute, argument in _find_names("methods", _METHOD)})


def method_lists() -> list[str]:
    """Return the values of `--method`: every method, and all."""
    return [*method_names(), "all"]


def backbone_names() -> list[str]:
    """Return the short names of backbones."""
    return ["auto", *(name.lower() for name in _find_names("backbones", _BACKBONE))]


def stream_names() -> list[str]:
    """Return the names of the benchmarks."""
    return [*_find_names("data/datasets", _STREAM), "folder:", "domains:"]


def dataset_names() -> list[str]:
    """Return the names of the data sets that benchmarks are made of."""
    return sorted({name for group in _find_names("data/datasets", _DATASETS) for name in re.findall(r"[\w-]+", group)})


def paper_experiments() -> list[str]:
    """Return the experiments of the paper, and all."""
    from protosteer.reproduction.definition import ALL, catalogue, names

    return [*names(catalogue()), ALL]


def preset_names() -> list[str]:
    """Return the presets."""
    return list(PRESETS)


def device_names() -> list[str]:
    """Return the kinds of devices."""
    return ["auto", "cpu", "cuda", "mps"]


def engine_names() -> list[str]:
    """Return the engines."""
    return ["local", "ray"]


def class_names(context: Context) -> list[str]:
    """Return the classes of the model file on the command line."""
    return list(dict.fromkeys(name for task in _tasks(context) for name in task["classes"]))


def task_names(context: Context) -> list[str]:
    """Return the tasks of the model file on the command line."""
    return [task["name"] for task in _tasks(context)]


def _find_names(package: str, pattern: re.Pattern[str]) -> list[Any]:
    """Return the names that a pattern finds in the source files of a package."""
    folder = resources.files("protosteer").joinpath(package)
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    texts = [file.read_text(encoding="utf-8") for file in files if file.name.endswith(".py")]
    return [name for text in texts for name in pattern.findall(text)]


def _tasks(context: Context) -> list[dict[str, Any]]:
    """Read the tasks from a model's header, unchecked; none if there is no such file."""
    try:
        # Behind an option whose value is being typed, arguments are not parsed yet.
        path = Path(context.params.get("model") or context.args[0])
        with open_regular(path) as file:
            length = min(int.from_bytes(file.read(8), "little"), path.stat().st_size)
            header = json.loads(file.read(length))
        tasks: list[dict[str, Any]] = json.loads(header["__metadata__"]["protosteer"])["header"]["tasks"]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return tasks
