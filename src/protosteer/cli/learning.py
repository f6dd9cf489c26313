"""`protosteer learn`: a folder of class folders becomes a task of a model file."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from protosteer.cli.common import app, make_console, polite_kill, say, show
from protosteer.cli.models import PANEL, backbone_of, clear_up, prepare
from protosteer.cli.options import Device, Json, Preset, Settings, Threads, Weights
from protosteer.cli.words import parse_settings

if TYPE_CHECKING:
    from protosteer.data.folders import Files
    from protosteer.learner import Learner
    from protosteer.method.memory import Memory
    from protosteer.modelfile import Model
    from protosteer.photos.teaching import Survey, Taught
    from protosteer.running.resume import Bookmark

ANOTHER = "another MODEL"  # what to choose where nothing can be written
MOST_NAMED = 5  # unreadable files in a line


@app.command(rich_help_panel=PANEL)
def learn(
    paths: Annotated[
        list[Path],
        Argument(
            metavar="MODEL FOLDER",
            help="Model file, which is made or extended, and a folder with one sub-folder of images per "
            "class.",
            show_default=False,
        ),
    ],
    model: Annotated[
        Path | None, Option("--model", help="The model file; then FOLDER alone is the argument.")
    ] = None,
    name: Annotated[str | None, Option(help="Name of the task (default: the folder's).")] = None,
    backbone: Annotated[
        str | None, Option(help="Short name, or a name of timm's (default: the model's; nano for a new one).")
    ] = None,
    weights: Weights = None,
    preset: Preset = None,
    independent: Annotated[
        bool | None,
        Option(
            "--independent/--dependent",
            help="Learn this task by itself: forgetting it and merging it become exact.",
            show_default=False,
        ),
    ] = None,
    set_: Settings = None,
    holdout: Annotated[
        float, Option(help="Share of each class's images that is not learned but checks the result.")
    ] = 0.1,
    skip_known: Annotated[
        bool, Option("--skip-known", help="Leave classes out that the model has already.")
    ] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Say what is in the folder, and learn nothing.")
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
    from protosteer.report.teaching import as_json as figures
    from protosteer.util.files import Identity

    path, folder = _model_and_folder(paths, model)
    files = read_folder(folder)  # complains before anything is loaded
    identity = Identity.of(path)
    old = _read(path)
    found = _look(folder, files, old, skip_known)
    if not as_json:
        _tell_found(found, holdout, path, old)
    elif dry_run:
        print(json.dumps(figures(found, None), indent=1))
    if dry_run:
        return
    refuse_known(found)
    _check_place(path)
    changes = parse_settings(set_ or []) | ({} if independent is None else {"independent": independent})
    learner = _learner(old, backbone, weights, preset, changes, prepare(device, threads))
    taught, bookmark = _teach(learner, found, path, name, holdout)
    taught = _save(learner, taught, path, identity, name)
    bookmark.clear()
    clear_up(path)
    if as_json:
        print(json.dumps(figures(found, taught), indent=1))
    _tell_taught(taught, learner, path, as_json)


def _model_and_folder(paths: list[Path], model: Path | None) -> tuple[Path, Path]:
    given = [*([model] if model else []), *paths]
    if len(given) != 2:
        raise typer.BadParameter(
            "give a model file and one folder, such as: protosteer learn shop.protosteer photos/"
        )
    return given[0], given[1]


def _read(path: Path) -> Model | None:
    from protosteer import modelfile
    from protosteer.errors import ModelFileError

    if path.is_dir():
        raise ModelFileError(f"{path} is a folder; the model file comes first, then the folder of images")
    return modelfile.read(path) if path.exists() else None


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


def _tell_found(found: Survey, holdout: float, path: Path, old: Model | None) -> None:
    from protosteer.photos.teaching import held_count
    from protosteer.report.teaching import found_table
    from protosteer.util.text import counted, listed

    say(f"{path}: {_size(old.memory)}, to be extended" if old else f"{path}: a new model")
    counts, console = found.counts, make_console()
    line = f"{found.folder}: {counted(len(counts), 'class')}, {counted(len(found.files), 'image')}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(found_table(found, {name: held_count(n, holdout) for name, n in counts.items()}))
    if found.unreadable:
        named = listed([str(path) for path in found.unreadable], MOST_NAMED)
        say(f"warning: {counted(len(found.unreadable), 'file')} cannot be read and will be left out: {named}")


def _size(memory: Memory) -> str:
    from protosteer.util.text import counted

    return f"{counted(len(memory.classes), 'class')} in {counted(len(memory), 'task')}"


def _check_place(path: Path) -> None:
    """Where nothing can be written is better known now than when everything is learned."""
    from protosteer.util.files import writing

    folder = path.resolve().parent
    with writing(path, ANOTHER):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def _learner(
    old: Model | None,
    name: str | None,
    weights: Path | None,
    preset: str | None,
    changes: dict[str, Any],
    device: str,
) -> Learner:
    """A new one, or that of the model; `changes` are settings that were given, and win over a preset's."""
    from protosteer.backbones import NANO, Backbone
    from protosteer.learner import Learner
    from protosteer.settings import preset as settings_of

    if old:
        learner = Learner.of_model(old, backbone_of(old, name, weights, device))
    else:
        learner = Learner(Backbone.load(name or NANO, weights=weights, device=device))
        if name is None:
            say(f"backbone {NANO}, for first tries; for photographs take a larger one: --backbone vit")
    given = settings_of(preset) if preset else {}
    learner.settings = learner.settings.replace(**(given | changes))
    return learner


def _teach(
    learner: Learner, found: Survey, path: Path, name: str | None, holdout: float
) -> tuple[Taught, Bookmark]:
    from protosteer.photos.teaching import bookmark_path, teach
    from protosteer.report.progress import LearnProgress
    from protosteer.running.resume import Bookmark
    from protosteer.util.files import writing

    bookmark = Bookmark(bookmark_path(path.resolve(), found, learner, name, holdout))
    console = make_console(stderr=True)
    try:
        with polite_kill(), writing(bookmark.path, ANOTHER), LearnProgress(console) as progress:
            return teach(learner, found, name, holdout, progress.on_stage, bookmark), bookmark
    except KeyboardInterrupt:
        goes_on = "; the same command goes on with the training" if bookmark.path.exists() else ""
        say(f"stopped; {path} is as it was{goes_on}")
        raise


def _save(learner: Learner, taught: Taught, path: Path, identity: Any, name: str | None) -> Taught:
    """Whoever has changed the file meanwhile loses nothing: the new task is added to what is there now."""
    from protosteer.util.files import Identity, writing

    if Identity.of(path) != identity and path.exists():
        say(f"{path} was changed by someone else meanwhile; the new task is added to what is there now")
        taught = _add_to_latest(learner, taught, path, name)
    with writing(path, ANOTHER):
        learner.save(path)
    return taught


def _add_to_latest(learner: Learner, taught: Taught, path: Path, name: str | None) -> Taught:
    from protosteer import modelfile
    from protosteer.learner import Learner

    latest = Learner.of_model(modelfile.read(path), learner.backbone)  # refuses one of another backbone
    memory, record = latest.memory, taught.record
    if name is None:  # the folder's name was free when learning began
        record = dataclasses.replace(record, name=memory.free_name(record.name))
    gone = [c for c in learner.classes if c not in memory.classes and c not in record.class_names]
    if gone and record.prompt is not None and not record.independent:
        say(
            f"warning: '{gone[0]}' was forgotten meanwhile, but the prompt of task '{record.name}' was "
            "trained against it; to remove that too, forget this task and learn it again"
        )
    memory.add(record)
    learner.memory = memory
    return dataclasses.replace(taught, record=record)


def _tell_taught(taught: Taught, learner: Learner, path: Path, as_json: bool) -> None:
    from protosteer.report.teaching import check_report

    if taught.check and not as_json:
        show(check_report(taught.check))
    if taught.record.prompt is None and learner.settings.prompts:
        say("one class and nothing to tell it from: prototypes alone were learned, no prompt")
    if taught.check is None:
        lost = "there is no self-check, and predict --reject knows nothing of these classes"
        say(f"no image was held out: {lost}")
    size = f"{_size(learner.memory)}, {path.stat().st_size:,} bytes"
    say(f"Written: {path}: {size}; task {taught.record.name} is new")
