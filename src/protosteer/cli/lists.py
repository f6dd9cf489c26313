"""Commands that list what there is: backbones and data sets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protosteer.cli.common import Json, app, make_console, say

if TYPE_CHECKING:
    from rich.console import Console

    from protosteer.backbones import BackboneInfo
    from protosteer.data.sets.catalogue import DatasetStatus

PANEL = "Lists"


@app.command(rich_help_panel=PANEL)
def backbones(as_json: Json = False) -> None:
    """List the backbones that have a short name, and whether their weights are on this disk."""
    from protosteer.backbones import list_backbones
    from protosteer.util.files import cache_dir

    folder = cache_dir() / "weights"
    rows = list_backbones()
    if as_json:
        print(json.dumps({"backbones": [_backbone(row) for row in rows], "folder": str(folder)}, indent=2))
        return
    _show_backbones(rows, make_console())
    say(
        "Weights that are not on disk are fetched when first used, or put the file at "
        f"{folder}/CHECKPOINT.safetensors"
    )


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


def _show_backbones(rows: Sequence[BackboneInfo], console: Console) -> None:
    from protosteer.report.tables import plain_table

    table = plain_table()
    for heading in (
        "Name",
        "Checkpoint",
        "Parameters",
        "Input",
        "Mean",
        "Std",
        "Pooling",
        "Licence",
        "On disk",
    ):
        table.add_column(
            heading, justify="right" if heading in ("Parameters", "Input") else "left", overflow="fold"
        )
    for row in rows:
        p = row.preprocessing
        table.add_row(
            row.alias, row.name, f"{row.parameters / 1e6:.1f} M", f"{p.image_size} px", _triple(p.mean),
            _triple(p.std), {"token": "class token", "mean": "patch mean"}[row.pool], row.licence,
            str(row.path) if row.path else "no",
        )  # fmt: skip
    console.print(table)


def _triple(values: Sequence[float]) -> str:
    """Statistics of three channels, as one number where they are equal."""
    return " ".join(f"{value:g}" for value in dict.fromkeys(values))


datasets_app = typer.Typer(invoke_without_command=True)
app.add_typer(datasets_app, name="datasets", rich_help_panel=PANEL)

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder for data sets (default: PROTOSTEER_DATA, or the cache)."),
]


@datasets_app.callback()
def datasets(context: typer.Context, data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets that streams are made of, and whether they are on this disk."""
    context.obj = data_dir
    if context.invoked_subcommand:
        return
    from protosteer.data.sets.catalogue import data_root, list_datasets

    root, rows = data_root(data_dir), list_datasets(data_dir)
    if as_json:
        print(json.dumps({"datasets": [_dataset(row) for row in rows], "folder": str(root)}, indent=2))
        return
    _show_datasets(rows, root, make_console())
    say(
        f"Data sets are looked for in {root}; what is absent is fetched when first used, "
        "or by: protosteer datasets get NAME"
    )


@datasets_app.command("get")
def get_datasets(
    context: typer.Context,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Data sets to get.", show_default=False)
    ],
    data_dir: DataDir = None,
) -> None:
    """Download data sets that are not there yet, and check their files."""
    from protosteer.data.sets.catalogue import data_root, find_dataset
    from protosteer.data.sets.obtaining import get_dataset

    root = data_root(data_dir or context.obj)
    for info in [find_dataset(name) for name in names]:
        folder, checksums = get_dataset(info, root)
        official = sum(value.startswith("md5:") for value in checksums.values())
        checked = f", {official} files as published" if official else ""
        print(f"{info.name}: in {folder}{checked}")


def _dataset(row: DatasetStatus) -> dict[str, Any]:
    info = row.info
    return {
        "name": info.name,
        "title": info.title,
        "classes": info.classes,
        "bytes": info.size,
        "licence": info.licence,
        "source": info.source,
        "files": [
            {"name": file.name, "bytes": file.size, "md5": file.md5, "urls": list(file.urls)}
            for file in info.files
        ],
        "note": info.note or None,
        "by_hand": info.by_hand or None,
        "present": row.path is not None,
        "path": str(row.path) if row.path else None,
    }


def _show_datasets(rows: Sequence[DatasetStatus], root: Path, console: Console) -> None:
    from protosteer.report.tables import plain_table

    table = plain_table()
    table.add_column("Name", no_wrap=True)
    table.add_column("Classes", justify="right")
    table.add_column("Download", justify="right", no_wrap=True)
    for heading in ("Licence", "Source", "On disk"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        info = row.info
        size = "by hand" if info.by_hand else "unknown" if info.files else "none"
        if info.size:
            size = f"{info.size / 1e6:,.0f} MB"
        source = info.source.partition("://")[2].removeprefix("www.").rstrip("/")
        if console.width < 120:  # the host alone fits into one line
            source = source.partition("/")[0]
        table.add_row(info.name, str(info.classes), size, info.licence, source, _place(row, root))
    console.print(table)


def _place(row: DatasetStatus, root: Path) -> str:
    """Short where it lies in the folder for data, which is named below the table."""
    path = row.path
    if path is None:
        return "no"
    if row.info.shipped_with:
        return f"with {row.info.shipped_with}"
    return str(path.relative_to(root)) if path.is_relative_to(root) and path != root else str(path)
