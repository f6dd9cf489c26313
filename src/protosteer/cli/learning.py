"""`protosteer learn`: a folder of class folders becomes a task of a model file."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protosteer.cli.common import Json, app, make_console, polite_kill, say
from protosteer.cli.models import PANEL, Device, Threads, backbone_of, clear_up, prepare
from protosteer.cli.words import parse_settings

if TYPE_CHECKING:
    from rich.console import Console

    from protosteer.data.folders import Files
    from protosteer.learner import Learner
    from protosteer.modelfile import Model
    from protosteer.photos.teaching import Survey, Taught
    from protosteer.running.resume import Bookmark

NEW_BACKBONE = "nano"


@app.command(rich_help_panel=PANEL)
def learn(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL FOLDER",
            help=(
                "Model file, which is made or extended, and a folder with one sub-folder of images per class."
            ),
            show_default=False,
        ),
    ],
    model: Annotated[
        Path | None, typer.Option("--model", help="The model file; then FOLDER alone is the argument.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the task (default: the folder's).")] = None,
    backbone: Annotated[
        str | None,
        typer.Option(help="Short name, or a name of timm's (default: the model's; nano for a new one)."),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="File with the backbone's weights.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="paper|fast", help="Settings of the paper (the default), or quicker ones."),
    ] = None,
    independent: Annotated[
        bool | None,
        typer.Option(
            "--independent/--dependent",
            help="Learn this task by itself: forgetting it and merging it become exact.",
            show_default=False,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of the method; repeatable."),
    ] = None,
    holdout: Annotated[
        float, typer.Option(help="Share of each class's images that is not learned but checks the result.")
    ] = 0.1,
    skip_known: Annotated[
        bool, typer.Option("--skip-known", help="Leave classes out that the model has already.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what is in the folder, and learn nothing.")
    ] = False,
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Teach a model the classes of a folder: a new model, or one more task of an old one.

    The model file stays as it was until everything is learned. After Ctrl-C or a crash the same command goes
    on with the training, at most half a minute before where it was.
    """
    from protosteer.data.folders import read_folder
    from protosteer.photos.teaching import refuse_known
    from protosteer.util.files import Identity

    path, folder = _model_and_folder(paths, model)
    files = read_folder(folder)  # complains before anything is loaded
    identity = Identity.of(path)
    old = _read(path)
    found, console = _look(folder, files, old, skip_known), make_console()
    if not as_json:
        _tell_found(found, holdout, console, path, old)
    if dry_run:
        from protosteer.report.teaching import as_json as figures

        if as_json:
            print(json.dumps(figures(found, None), indent=1))
        return
    refuse_known(found)
    _check_place(path)
    learner = _learner(old, backbone, weights, _changes(preset, independent, set_ or []), device, threads)
    taught, bookmark = _teach(learner, found, path, name, holdout)
    taught = _save(learner, taught, path, identity, name)
    bookmark.clear()
    clear_up(path)
    _tell_taught(found, taught, learner, path, console, as_json)


def _model_and_folder(paths: list[Path], model: Path | None) -> tuple[Path, Path]:
    if model is not None and len(paths) == 1:
        return model, paths[0]
    if model is None and len(paths) == 2:
        return paths[0], paths[1]
    raise typer.BadParameter(
        "give a model file and one folder, such as: protosteer learn shop.protosteer photos/"
    )


def _read(path: Path) -> Model | None:
    from protosteer import modelfile
    from protosteer.errors import ModelFileError

    if path.is_dir():
        raise ModelFileError(f"{path} is a folder; the model file comes first, then the folder of images")
    return modelfile.read(path) if path.exists() else None


def _check_place(path: Path) -> None:
    """Where nothing can be written is better known now than when everything is learned."""
    from protosteer.util.files import writing

    folder = path.resolve().parent
    with writing(path, "another MODEL"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def _look(folder: Path, files: Files, old: Model | None, skip_known: bool) -> Survey:
    from rich.markup import escape
    from rich.progress import Progress

    from protosteer.photos.teaching import survey

    console = make_console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        row = bars.add_task(escape(f"reading {folder}"), total=None)

        def on_file(done: int, of: int) -> None:
            bars.update(row, completed=done, total=of)

        found = survey(folder, old.memory if old else None, on_file, files)
    return found.without_known() if skip_known and found.known else found


def _tell_found(found: Survey, holdout: float, console: Console, path: Path, old: Model | None) -> None:
    from protosteer.photos.teaching import held_count
    from protosteer.report.teaching import found_line, found_table, unreadable_line
    from protosteer.util.text import counted

    known = (
        f"{counted(len(old.memory.classes), 'class')} in {counted(len(old.memory), 'task')}" if old else ""
    )
    say(f"{path}: {known}, to be extended" if old else f"{path}: a new model")
    held = {name: held_count(images, holdout) for name, images in found.counts.items()}
    console.print(found_line(found), markup=False, highlight=False, soft_wrap=True)
    console.print(found_table(found, held))
    if found.unreadable:
        say(f"warning: {unreadable_line(found)}")


def _changes(preset: str | None, independent: bool | None, words: list[str]) -> dict[str, Any]:
    """Settings that were given; a preset's own follow when the backbone's depth is known."""
    changes = parse_settings(words)
    if independent is not None:
        changes["independent"] = independent
    return {**({"preset": preset} if preset else {}), **changes}


def _learner(
    old: Model | None,
    name: str | None,
    weights: Path | None,
    changes: dict[str, Any],
    device: str,
    threads: int | None,
) -> Learner:
    from protosteer.backbones import Backbone
    from protosteer.learner import Learner
    from protosteer.settings import Settings
    from protosteer.settings import preset as settings_of

    if old:
        backbone = backbone_of(old, name, weights, device, threads)
        learner = Learner.of_model(old, backbone)
    else:
        backbone = Backbone.load(name or NEW_BACKBONE, weights=weights, device=prepare(device, threads))
        learner = Learner(backbone, Settings())
        if name is None:
            say(
                f"backbone {NEW_BACKBONE}, for first tries; for photographs take a larger one: --backbone vit"
            )
    preset = changes.pop("preset", None)
    given = settings_of(preset, backbone.depth) if preset else {}
    learner.settings = learner.settings.replace(**{**given, **changes})
    return learner


def _teach(
    learner: Learner, found: Survey, path: Path, name: str | None, holdout: float
) -> tuple[Taught, Bookmark]:
    from protosteer.photos.teaching import bookmark_path, teach
    from protosteer.report.progress import LearnProgress
    from protosteer.running.resume import Bookmark
    from protosteer.util.files import writing

    bookmark = Bookmark(bookmark_path(path.resolve(), found, learner, name, holdout))
    try:
        console = make_console(stderr=True)
        with (
            polite_kill(),
            writing(bookmark.path, "another MODEL"),
            LearnProgress(console) as progress,
        ):
            taught = teach(learner, found, name, holdout, progress.on_stage, bookmark)
    except KeyboardInterrupt:
        goes_on = "; the same command goes on with the training" if bookmark.path.exists() else ""
        say(f"stopped; {path} is as it was{goes_on}")
        raise
    return taught, bookmark


def _save(learner: Learner, taught: Taught, path: Path, identity: Any, name: str | None) -> Taught:
    """Whoever has changed the file meanwhile loses nothing: the new task is added to what is there now."""
    from protosteer.util.files import Identity, writing

    if Identity.of(path) != identity and path.exists():
        say(f"{path} was changed by someone else meanwhile; the new task is added to what is there now")
        taught = _add_to_latest(learner, taught, path, name)
    with writing(path, "another MODEL"):
        learner.save(path)
    return taught


def _add_to_latest(learner: Learner, taught: Taught, path: Path, name: str | None) -> Taught:
    from protosteer import modelfile
    from protosteer.learner import Learner

    latest = Learner.of_model(modelfile.read(path), learner.backbone)
    record = taught.record
    if name is None:  # the folder's name was free when learning began
        record = dataclasses.replace(record, name=latest.memory.free_name(record.name))
    gone = [c for c in learner.classes if c not in latest.classes and c not in record.class_names]
    if gone and record.prompt is not None and not record.independent:
        say(
            f"warning: '{gone[0]}' was forgotten meanwhile, but the prompt of task '{record.name}' was "
            "trained against it; to remove that too, forget this task and learn it again"
        )
    latest.memory.add(record)
    learner.memory = latest.memory
    return dataclasses.replace(taught, record=record)


def _tell_taught(
    found: Survey, taught: Taught, learner: Learner, path: Path, console: Console, as_json: bool
) -> None:
    from protosteer.report.teaching import as_json as figures
    from protosteer.report.teaching import check_report
    from protosteer.util.text import counted

    if as_json:
        print(json.dumps(figures(found, taught), indent=1))
    elif taught.check:
        for part in check_report(taught.check):
            console.print(part)
    record = taught.record
    if record.prompt is None and learner.settings.prompts:
        say("one class and nothing to tell it from: prototypes alone were learned, no prompt")
    if taught.check is None:
        say(
            "no image was held out: there is no self-check, and predict --reject knows nothing of these "
            "classes"
        )
    say(
        f"Written: {path}: {counted(len(learner.classes), 'class')} in "
        f"{counted(len(learner.tasks), 'task')}, {path.stat().st_size:,} bytes; task {record.name} is new"
    )
