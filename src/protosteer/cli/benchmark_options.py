"""Options of `protosteer run` in groups, and those that other commands on benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from protosteer.cli import completion
from protosteer.cli.options import PRECISION, PrecisionName, Preset, Threads, Weights

STREAMS = (
    "split-cifar100, five-datasets, split-digits and others (`protosteer datasets` lists their data), folder:PATH, "
    "domains:PATH, or path/to/file.py:NAME."
)
RunBackbone = Annotated[
    str | None, Option(autocompletion=completion.backbone_names, help="Short name or timm name (default: nano).")
]
Base = Annotated[int | None, Option(help="Classes of the first task, with --increment.")]
Increment = Annotated[int | None, Option(help="Classes of every further task.")]
TrainPerClass = Annotated[int | None, Option(help="Maximum training images per class, in file order.")]
DataDir = Annotated[Path | None, Option(help="Where data sets are, or are downloaded to.")]
Sweep = Annotated[
    list[str] | None,
    Option("--sweep", metavar="NAME=VALUE,...", help="A run for each value of a setting; repeatable, for a grid."),
]


@dataclass(frozen=True)
class ExperimentOptions:
    """Options of `run` that select the experiment."""

    stream: Annotated[str | None, Argument(help=STREAMS, autocompletion=completion.stream_names)] = None
    method: Annotated[
        str | None,
        Option(
            metavar="NAME,...|all",
            autocompletion=completion.method_lists,
            help="A method, several separated by commas, or all: see `protosteer methods` (default: protosteer).",
        ),
    ] = None
    backbone: RunBackbone = None
    weights: Weights = None
    image_size: Annotated[int | None, Option(help="Image size to run the backbone at.")] = None
    crop: Annotated[float | None, Option(help="Fraction kept by the centre crop (default: the benchmark's).")] = None
    seeds: Annotated[str | None, Option(help="Seeds, such as 0,1,2 (default: 0, or the resumed run's).")] = None
    class_orders: Annotated[
        str | None, Option(metavar="N,...", help="Seeds of class orders, such as 1993,1,2: a run for each.")
    ] = None
    sweep: Sweep = None
    preset: Preset = None


@dataclass(frozen=True)
class SplitOptions:
    """Options of `run` that split a benchmark into tasks and select its images."""

    class_order: Annotated[
        str | None, Option(metavar="natural|seed:N|FILE", help="Order in which classes are learned.")
    ] = None
    tasks: Annotated[int | None, Option(help="Number of tasks, as equal in size as possible.")] = None
    base: Base = None
    increment: Increment = None
    task_file: Annotated[Path | None, Option(help="Text file with the classes of each task.")] = None
    train_per_class: TrainPerClass = None
    shots: Annotated[
        int | None, Option(help="Training images per class after the first task: few-shot class-incremental learning.")
    ] = None
    test_per_class: Annotated[int | None, Option(help="Maximum test images per class, in file order.")] = None
    draw: Annotated[
        int | None, Option(metavar="SEED", help="Draw the images per class at random instead of in file order.")
    ] = None
    validation: Annotated[
        float | None, Option(help="Evaluate on this share of the training images instead of the test images.")
    ] = None
    blurry: Annotated[
        float | None, Option(help="This share of each class's training images arrives in other tasks.")
    ] = None
    disjoint: Annotated[
        float | None, Option(help="With --blurry: this share of the classes stays in one task each.")
    ] = None
    data_dir: DataDir = None
    skip_unreadable: Annotated[bool | None, Option("--skip-unreadable", help="Skip images that cannot be read.")] = None


@dataclass(frozen=True)
class ComputeOptions:
    """Options of `run` that select device, precision and threads."""

    device: Annotated[
        str | None, Option(autocompletion=completion.device_names, help="auto (the default), cpu, cuda or mps.")
    ] = None
    precision: Annotated[PrecisionName | None, PRECISION] = None
    threads: Threads = None
