"""`protosteer sort`: put images into class folders by their predictions, or tag them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from protosteer.cli.common import CommandLineError, command, print_json, progress, say, show, sigterm_as_ctrl_c
from protosteer.cli.loading import PANEL, open_learner
from protosteer.cli.options import Json, Loading, check_reject, path_of
from protosteer.util.files import writing
from protosteer.util.text import counted, listed

if TYPE_CHECKING:
    from protosteer.workflows.sort_files import SortCounts, Sorter


@command(PANEL)
def sort(
    paths: Annotated[
        list[Path],
        Argument(
            metavar="MODEL IN [OUT]",
            parser=path_of,
            help="Model file, folder of images, and folder for the class folders. Without OUT, with --xmp, images stay "
            "where they are and are tagged.",
        ),
    ],
    mode: Annotated[str, Option(metavar="copy|move|link", help="What to do with the files.")] = "copy",
    at_least: Annotated[
        float,
        Option(
            metavar="PROBABILITY", help="Put images whose class is less probable than this into _unsure, such as 0.9."
        ),
    ] = 0.0,
    reject: Annotated[
        float,
        Option(
            metavar="FRACTION",
            callback=check_reject,
            help="Put images that match no class into _unknown; share of known images that may be rejected by mistake (0: off).",
        ),
    ] = 0.05,
    xmp: Annotated[
        bool, Option("--xmp", help="Write the class as a tag into an XMP side file, for digiKam, Immich and others.")
    ] = False,
    watch: Annotated[bool, Option("--watch", help="Keep sorting images as they arrive, until Ctrl-C.")] = False,
    undo: Annotated[
        bool, Option("--undo", help="Undo everything that was sorted into OUT (protosteer sort OUT --undo).")
    ] = False,
    *,
    loading: Loading,
    as_json: Json = False,
) -> None:
    """Sort images into class folders by what the model sees. Nothing is overwritten, and --undo takes all back."""
    from protosteer.data.image_files import image_files, images_below
    from protosteer.workflows.sort_files import Sorter, SortOptions

    if undo:
        _undo(paths, as_json)
        return
    if len(paths) not in (2, 3):
        message = "give a model file, a folder of images and a folder to sort into, such as: protosteer sort shop.protosteer camera sorted"
        raise CommandLineError(message, code="missing-argument")
    model, source = paths[:2]
    out = paths[2] if len(paths) == 3 else None
    options = SortOptions(out, mode, at_least, reject or None, xmp)
    files = images_below(source) if watch else image_files(source)  # a watched folder may be empty yet
    sorter = Sorter(open_learner(model, loading), source, options)
    with sigterm_as_ctrl_c(), writing(out or source, None):
        _sort(sorter, files)
        if watch:
            _watch(sorter, source)
    _tell(sorter.counts, out or source, out is not None, as_json)


def _sort(sorter: Sorter, files: list[Path]) -> None:
    from protosteer.runtime.progress import Stage

    with progress() as on_stage:
        sorter.sort(files, lambda number: on_stage(Stage("", "sorting", number, len(files))))


def _watch(sorter: Sorter, source: Path) -> None:
    from protosteer.workflows.sort_files import watch

    say(f"watching {source}; Ctrl-C stops")
    try:
        for paths in watch(source):
            count = sorter.counts.folders.total()
            sorter.sort(paths)
            if increase := sorter.counts.folders.total() - count:
                say(f"sorted {counted(increase, 'image')}")
    except KeyboardInterrupt:
        say("stopped watching")


def _tell(counts: SortCounts, root: Path, sorted_away: bool, as_json: bool) -> None:
    from protosteer.report.tables import numbers, plain_table

    for error in counts.errors.values():
        say(f"warning: {error}")
    if as_json:
        print_json(vars(counts) | {"folders": dict(counts.folders)})
    elif counts.folders:
        table = plain_table(None, "Folder" if sorted_away else "Class", *numbers(["Images"]))
        for name, number in sorted(counts.folders.items()):
            table.add_row(name, f"{number:,}")
        show([table])
    if counts.side_files:
        say(f"{counted(counts.side_files, 'XMP file')} written")
    if counts.sorted_before:
        say(f"skipped {counted(counts.sorted_before, 'image')} (sorted before)")
    if counts.other_side_files:
        say(f"skipped {counted(counts.other_side_files, 'XMP file')} (there already)")
    verb = "sorted" if sorted_away else "looked at"
    result = f"{counted(counts.folders.total(), 'image')} {verb}" if counts.folders else "nothing new"
    undo = f"; to undo: protosteer sort {root} --undo" if counts.folders else ""
    say(f"{root}: {result}{undo}")


def _undo(paths: list[Path], as_json: bool) -> None:
    from protosteer.workflows.sort_files import undo_sort

    root = paths[-1]
    with writing(root, None):
        count, stay = undo_sort(root)
    if as_json:
        print_json({"taken_back": count, "left": stay})
    if stay:
        say(f"warning: {counted(len(stay), 'file')} changed since, or without a place to go back to: {listed(stay, 3)}")
    say(f"{root}: {counted(count, 'file')} taken back")
