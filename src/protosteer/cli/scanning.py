"""Scan a folder that is to be learned, and report what is in it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from protosteer.cli.common import make_console, say
from protosteer.errors import DataError
from protosteer.util.text import counted, listed

if TYPE_CHECKING:
    from protosteer.data.class_folders import Files
    from protosteer.model.file import Model
    from protosteer.model.memory import Memory
    from protosteer.workflows.folder_scan import FolderScan

MAX_NAMED_FILES = 5  # in a line


def check_nested(folder: Path, path: Path, yes: bool, dry_run: bool) -> None:
    """Ask before folders of class folders, such as months, are learned as classes."""
    from protosteer.data.class_folders import nested_folders

    parents = [] if yes else nested_folders(folder)
    if not parents:
        return
    inner = next(entry.name for entry in sorted(parents[0].iterdir()) if entry.is_dir())
    names = listed([entry.name for entry in parents], MAX_NAMED_FILES)
    problem = f"{folder} has folders in its folders, such as {parents[0].name}/{inner}: its classes would be {names}"
    command = shlex.join(["protosteer", "learn", str(path), *map(str, parents)])
    if dry_run:
        say(f"warning: {problem}; if {inner} is a class, the command is: {command}")
    elif sys.stdin.isatty() and sys.stderr.isatty():
        say(f"{problem}.\nIf {inner} is a class, the command is: {command}")
        if not typer.confirm(f"Learn {names} as classes?", err=True):
            raise typer.Abort
    else:
        message = f"{problem}; if {inner} is a class: {command}; if not, add --yes"
        raise DataError(message, code="nested-folders", path=folder)


def scan(folder: Path, files: Files, model: Model | None = None, name: str | None = None) -> FolderScan:
    """Scan a folder with a progress bar; for a model that exists, decode its images for learning already."""
    from rich.markup import escape
    from rich.progress import Progress

    from protosteer.data.transforms import Preprocessing
    from protosteer.workflows.folder_scan import scan_folder

    console = make_console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        row = bars.add_task(escape(f"reading {folder}"), total=None)

        def on_file(count: int, total: int) -> None:
            bars.update(row, completed=count, total=total)

        preprocessing = Preprocessing.from_dict(model.backbone["preprocessing"]) if model else None
        return scan_folder(folder, model.memory if model else None, on_file, files, name, preprocessing)


def show_scan(folder_scan: FolderScan, path: Path, model: Model | None) -> None:
    """Print what will be learned, and into which model."""
    from protosteer.report.learn import found_table

    say(f"{path}: {model_size(model.memory)}, to be extended" if model else f"{path}: a new model")
    counts, console = folder_scan.counts, make_console()
    suffix = " that are new" if folder_scan.already_learned else ""
    line = f"{folder_scan.folder}: {counted(len(counts), 'class')}, {counted(len(folder_scan.files), 'image')}{suffix}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    if counts:
        console.print(found_table(folder_scan))


def warn_of_files(folder_scan: FolderScan, model: Model | None = None) -> None:
    """Name files that are skipped and why, copies, and classes that are probably misspelt."""
    from protosteer.report.learn import scan_lines

    for line in scan_lines(folder_scan, model.memory.classes if model else ()):
        say(line)


def model_size(memory: Memory) -> str:
    """Return how many classes and tasks a model has, in words."""
    return f"{counted(len(memory.classes), 'class')} in {counted(len(memory), 'task')}"
