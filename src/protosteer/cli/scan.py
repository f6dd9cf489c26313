"""What a folder of pictures holds: looked at, with a bar, and told."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from protosteer.cli.common import make_console, say

if TYPE_CHECKING:
    from protosteer.data.class_folders import Files
    from protosteer.model.file import Model
    from protosteer.model.memory import Memory
    from protosteer.workflows.learn_folder import FolderScan

MOST_NAMED = 5  # files in a line


def look(folder: Path, files: Files, old: Model | None = None, name: str | None = None) -> FolderScan:
    from rich.markup import escape
    from rich.progress import Progress

    from protosteer.workflows.learn_folder import scan_folder

    console = make_console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        row = bars.add_task(escape(f"reading {folder}"), total=None)

        def on_file(done: int, of: int) -> None:
            bars.update(row, completed=done, total=of)

        return scan_folder(folder, old.memory if old else None, on_file, files, name)


def tell_found(found: FolderScan, holdout: float, path: Path, old: Model | None) -> None:
    from protosteer.report.learn import found_table
    from protosteer.util.text import counted
    from protosteer.workflows.learn_folder import held_count

    say(f"{path}: {size_of(old.memory)}, to be extended" if old else f"{path}: a new model")
    counts, console = found.counts, make_console()
    new = " that are new" if found.again else ""
    line = f"{found.folder}: {counted(len(counts), 'class')}, {counted(len(found.files), 'image')}{new}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    if counts:
        console.print(found_table(found, {name: held_count(n, holdout) for name, n in counts.items()}))
    tell_odd(found)


def size_of(memory: Memory) -> str:
    from protosteer.util.text import counted

    return f"{counted(len(memory.classes), 'class')} in {counted(len(memory), 'task')}"


def tell_odd(found: FolderScan) -> None:
    """Files that are left out, or of which one should know."""
    from protosteer.util.text import counted, listed

    if found.unreadable:
        named = listed([str(path) for path in found.unreadable.paths], MOST_NAMED)
        say(f"warning: {counted(len(found.unreadable), 'file')} cannot be read and will be left out: {named}")
    if found.again:
        named = listed([str(path) for path in found.again], MOST_NAMED)
        say(f"left out, since learned or held out before: {counted(len(found.again), 'image')}: {named}")
    if found.other:
        named = listed([f"{path} ({name})" for path, name in found.other.items()], MOST_NAMED)
        say(f"warning: learned as another class before: {counted(len(found.other), 'image')}: {named}")
