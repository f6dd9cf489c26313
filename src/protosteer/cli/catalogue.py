"""Commands that list what is available: `methods`, `backbones`, `datasets`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from protosteer.cli import completion
from protosteer.cli.common import app, command, make_console, print_json, say, show
from protosteer.cli.loading import choose_backbone, prepare
from protosteer.cli.options import Device, Json, Loading, Precision, Threads
from protosteer.cli.scanning import scan, warn_of_files
from protosteer.util.files import cache_dir

if TYPE_CHECKING:
    from rich.table import Table

    from protosteer.backbones import BackboneInfo
    from protosteer.data.datasets.registry import DatasetStatus

PANEL = "Lists"


@command(PANEL)
def methods(
    name: Annotated[
        str | None,
        Argument(autocompletion=completion.method_names, help="Show only this method: what it does, and its settings."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods: paper, images or features stored, what is trained."""
    from protosteer.backbones import NANO, Backbone
    from protosteer.evaluation.method_info import CLASSES, describe, first_task_parameters
    from protosteer.methods import METHODS, find_method, load_plugins
    from protosteer.report.methods import method_report, methods_table

    if name is None:
        load_plugins()
    method_classes = [find_method(name)] if name is not None else list(METHODS.values())
    console, backbone, parameters = make_console(), Backbone.load(NANO), {}
    with make_console(stderr=True).status("") as status:
        for i, method in enumerate(method_classes, 1):
            status.update(f"counting what {method.name} trains, {i} of {len(method_classes)}")
            parameters[method.name] = first_task_parameters(method, backbone)
    infos = [describe(method) for method in method_classes]
    if as_json:
        results = [{**info.to_dict(), "trained_parameters": parameters[info.name]} for info in infos]
        print_json(results[0] if name is not None else {"methods": results})
    elif name is not None:
        show(method_report(infos[0], parameters[method_classes[0].name]), console)
    else:
        show([methods_table(infos, parameters)], console)
    say(f"Parameters: trained for a first task of {CLASSES} classes on {NANO}, default settings.")
    if name is None:
        say("For one method and its settings: protosteer methods NAME")


@command(PANEL)
def backbones(
    try_: Annotated[
        Path | None,
        Option(
            "--try",
            metavar="FOLDER",
            help="Try all on this disk, and a few small ones that are downloaded, on the images of a folder with one "
            "sub-folder per class.",
        ),
    ] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """List the backbones that have a short name, and whether their weights are on this disk."""
    from protosteer.backbones import list_backbones
    from protosteer.backbones.hub import names_on_disk

    if try_ is not None:
        _try(try_, Loading(None, None, device, precision, threads), as_json)
        return
    folder = cache_dir() / "weights"
    rows = list_backbones()
    other_names = [name for name in names_on_disk() if name not in {row.name for row in rows}]
    if as_json:
        results = {"backbones": [_backbone(row) for row in rows], "others": other_names, "folder": str(folder)}
        print_json(results)
        return
    show([_backbones_table(rows)])
    if other_names:
        say(f"Also on this disk: {', '.join(other_names)}")
    say(
        "Weights that are not on disk are downloaded when first used, or put the file at "
        f"{folder}/CHECKPOINT.safetensors"
    )


def _try(folder: Path, loading: Loading, as_json: bool) -> None:
    """Choose a backbone for a folder as `learn` would."""
    from protosteer.data.sources import read_labelled
    from protosteer.report.backbone_selection import as_json as figures

    prepare(loading)  # a wrong device is reported before any file is read
    folder_scan = scan(folder, read_labelled(folder))
    warn_of_files(folder_scan)
    choice = choose_backbone(folder_scan.files, loading, as_json)
    if as_json:
        print_json(figures(choice))


def _backbone(row: BackboneInfo) -> dict[str, Any]:
    return {
        "alias": row.alias,
        "name": row.name,
        "parameters": row.parameters,
        "image_size": row.preprocessing.image_size,
        "mean": list(row.preprocessing.mean),
        "std": list(row.preprocessing.std),
        "pool": row.pool,
        "licence": row.licence,
        "on_disk": row.on_disk,
        "path": str(row.path) if row.path else None,
    }


def _backbones_table(rows: Sequence[BackboneInfo]) -> Table:
    from rich.table import Column

    from protosteer.report.tables import plain_table

    headings = ("Name", "Checkpoint", "Parameters", "Input", "Mean", "Std", "Pooling", "Licence", "On disk")
    table = plain_table(None, *(Column(heading, overflow="fold") for heading in headings))
    table.columns[2].justify = table.columns[3].justify = "right"
    for row in rows:
        p = row.preprocessing
        table.add_row(
            row.alias, row.name, f"{row.parameters / 1e6:.1f} M", f"{p.image_size} px", _triple(p.mean),
            _triple(p.std), {"token": "class token", "mean": "patch mean"}[row.pool], row.licence,
            str(row.path) if row.path else "no",
        )  # fmt: skip
    return table


def _triple(values: Sequence[float]) -> str:
    """Return statistics of three channels, as one number if they are equal."""
    return " ".join(f"{value:g}" for value in dict.fromkeys(values))


datasets_app = typer.Typer(invoke_without_command=True)
app.add_typer(datasets_app, name="datasets", rich_help_panel=PANEL)

DataDir = Annotated[
    Path | None, Option("--data-dir", help="Folder for data sets (default: PROTOSTEER_DATA, or the cache).")
]


@datasets_app.callback()
def datasets(context: typer.Context, data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets that benchmarks are made of, and whether they are on this disk."""
    context.obj = data_dir
    if context.invoked_subcommand:
        return
    from protosteer.data.datasets.registry import data_root, list_datasets

    root, rows = data_root(data_dir), list_datasets(data_dir)
    if as_json:
        print_json({"datasets": [_dataset(row) for row in rows], "folder": str(root)})
        return
    console = make_console()
    show([_datasets_table(rows, root, hosts_only=console.width < 120)], console)
    say(
        f"Data sets are looked for in {root}; missing ones are downloaded when first used, "
        "or by: protosteer datasets get NAME"
    )


@datasets_app.command("get")
def get_datasets(
    context: typer.Context,
    names: Annotated[
        list[str], Argument(metavar="NAME...", autocompletion=completion.dataset_names, help="Data sets to download.")
    ],
    data_dir: DataDir = None,
) -> None:
    """Download missing data sets and verify their files."""
    from protosteer.data.datasets.prepare import get_dataset
    from protosteer.data.datasets.registry import data_root, find_dataset

    root = data_root(data_dir or context.obj)
    for info in [find_dataset(name) for name in names]:
        folder, checksums = get_dataset(info, root)
        md5_count = sum(value.startswith("md5:") for value in checksums.values())
        remark = f", {md5_count} files as published" if md5_count else ""
        print(f"{info.name}: in {folder}{remark}")


def _dataset(row: DatasetStatus) -> dict[str, Any]:
    info = row.info
    return {
        "name": info.name,
        "title": info.title,
        "classes": info.classes,
        "bytes": info.size,
        "licence": info.licence,
        "source": info.source,
        "files": [{"name": f.name, "bytes": f.size, "md5": f.md5, "urls": list(f.urls)} for f in info.files],
        "note": info.note or None,
        "by_hand": info.by_hand or None,
        "present": row.path is not None,
        "path": str(row.path) if row.path else None,
    }


def _datasets_table(rows: Sequence[DatasetStatus], root: Path, hosts_only: bool) -> Table:
    """Return a table of data sets; `hosts_only` shortens each source to its host, so that a row fits one line."""
    from rich.table import Column

    from protosteer.report.tables import numbers, plain_table

    texts = (Column(heading, overflow="fold") for heading in ("Licence", "Source", "On disk"))
    columns = numbers(["Classes", "Download"], no_wrap=True)
    table = plain_table(None, Column("Name", no_wrap=True), *columns, *texts)
    for row in rows:
        info = row.info
        size = "by hand" if info.by_hand else "unknown" if info.files else "none"
        if info.size:
            size = f"{info.size / 1e6:,.0f} MB"
        source = info.source.partition("://")[2].removeprefix("www.").rstrip("/")
        source = source.partition("/")[0] if hosts_only else source
        table.add_row(info.name, str(info.classes), size, info.licence, source, _describe_place(row, root))
    return table


def _describe_place(row: DatasetStatus, root: Path) -> str:
    """Return where a data set is, relative to the data folder, which is named below the table."""
    path = row.path
    if path is None:
        return "no"
    if row.info.shipped_with:
        return f"with {row.info.shipped_with}"
    return str(path.relative_to(root)) if path.is_relative_to(root) and path != root else str(path)
