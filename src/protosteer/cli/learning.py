"""`protosteer learn`: a folder of class folders becomes a task of a model file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from protosteer.cli.common import app, make_console, polite_kill, say, show
from protosteer.cli.models import PANEL, backbone_of, clear_up, prepare
from protosteer.cli.options import Device, Json, Preset, Settings, Threads, Weights, path_of
from protosteer.cli.saving import ANOTHER, TaskWriter
from protosteer.cli.words import parse_settings

if TYPE_CHECKING:
    from protosteer.backbones import Backbone
    from protosteer.data.folders import Files
    from protosteer.learner import Learner
    from protosteer.method.memory import Memory, TaskRecord
    from protosteer.modelfile import Model
    from protosteer.photos.teaching import Survey, Taught
    from protosteer.running.resume import Bookmark

MOST_NAMED = 5  # unreadable files in a line


@app.command(rich_help_panel=PANEL)
def learn(
    paths: Annotated[
        list[Path],
        Argument(
            metavar="MODEL FOLDER",
            parser=path_of,
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
    adapted: Annotated[
        Path | None,
        Option(metavar="FILE", help="Adapted backbone for a new model: its prompt serves all classes."),
    ] = None,
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

    Where a prompt is trained, the model can be used before that, after one pass over the images. Ctrl-C or a
    crash leaves it usable, and the same command goes on with the training, at most half a minute before where
    it was.
    """
    from protosteer.data.folders import read_folder
    from protosteer.photos.teaching import refuse_known
    from protosteer.report.teaching import as_json as figures

    path, folder = _model_and_folder(paths, model)
    files = read_folder(folder)  # complains before anything is loaded
    writer = TaskWriter(path, name)
    old = _read(path)
    found = look(folder, files, old, name)
    found = found.without_known() if skip_known and found.known else found
    if not as_json:
        _tell_found(found, holdout, path, old)
    elif dry_run:
        print(json.dumps(figures(found, None), indent=1))
    if dry_run:
        return
    refuse_known(found)
    check_place(path, ANOTHER)
    changes = parse_settings(set_ or []) | ({} if independent is None else {"independent": independent})
    learner = _learner(old, backbone, weights, adapted, preset, changes, prepare(device, threads))
    _tell_begun(learner, found, writer)
    taught = _teach(learner, found, writer, holdout)
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


def look(folder: Path, files: Files, old: Model | None = None, name: str | None = None) -> Survey:
    from rich.markup import escape
    from rich.progress import Progress

    from protosteer.photos.teaching import survey

    console = make_console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        row = bars.add_task(escape(f"reading {folder}"), total=None)

        def on_file(done: int, of: int) -> None:
            bars.update(row, completed=done, total=of)

        return survey(folder, old.memory if old else None, on_file, files, name)


def _tell_found(found: Survey, holdout: float, path: Path, old: Model | None) -> None:
    from protosteer.photos.teaching import held_count
    from protosteer.report.teaching import found_table
    from protosteer.util.text import counted

    say(f"{path}: {_size(old.memory)}, to be extended" if old else f"{path}: a new model")
    counts, console = found.counts, make_console()
    line = f"{found.folder}: {counted(len(counts), 'class')}, {counted(len(found.files), 'image')}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(found_table(found, {name: held_count(n, holdout) for name, n in counts.items()}))
    tell_unreadable(found)


def tell_unreadable(found: Survey) -> None:
    from protosteer.util.text import counted, listed

    if found.unreadable:
        named = listed([str(path) for path in found.unreadable], MOST_NAMED)
        say(f"warning: {counted(len(found.unreadable), 'file')} cannot be read and will be left out: {named}")


def _size(memory: Memory) -> str:
    from protosteer.util.text import counted

    return f"{counted(len(memory.classes), 'class')} in {counted(len(memory), 'task')}"


def check_place(path: Path, option: str) -> None:
    """Where nothing can be written is better known now than when everything is learned. Clears up there, too."""
    from protosteer.util.files import real, writing

    folder = real(path).parent
    with writing(path, option):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    clear_up(path)


def _learner(
    old: Model | None,
    name: str | None,
    weights: Path | None,
    adapted: Path | None,
    preset: str | None,
    changes: dict[str, Any],
    device: str,
) -> Learner:
    """A new one, or that of the model; `changes` are settings that were given, and win over a preset's."""
    from protosteer.learner import Learner
    from protosteer.photos import adapting

    prompt = adapting.read(adapted) if adapted else None
    if old:
        learner = Learner.of_model(old, backbone_of(old, name, weights, device))
    elif prompt:
        backbone = backbone_of(prompt.model, name, weights, device)
        learner = Learner(backbone, domain=prompt.prompt_for(backbone))
    else:
        learner = Learner(new_backbone(name, weights, device))
    settings = learner.settings.under(preset) if preset else learner.settings
    learner.settings = settings.replace(**changes)
    if prompt:
        prompt.check_used(learner)
    return learner


def new_backbone(name: str | None, weights: Path | None, device: str) -> Backbone:
    from protosteer.backbones import NANO, Backbone

    backbone = Backbone.load(name or NANO, weights=weights, device=device)
    if name is None:
        say(f"backbone {NANO}, for first tries; for photographs take a larger one: --backbone vit")
    return backbone


def _tell_begun(learner: Learner, found: Survey, writer: TaskWriter) -> None:
    """Whether this goes on with a task that was begun, and what is odd about the model as it is."""
    from protosteer.photos.teaching import unfinished_task

    memory = learner.memory
    begun = unfinished_task(memory, found.folder, found.files.labels, writer.name)
    writer.begun = begun.name if begun else None
    others = [task for task in memory.tasks if task is not begun]
    if begun:
        say(f"task {begun.name} is unfinished; going on with it")
    for task in (task for task in others if task.about.unfinished):
        say(
            f"task {task.name} is unfinished: what is learned before its prompt is trained does not profit from "
            "it; the command that began it goes on"
        )
    evidence = learner.settings.rule == "evidence"
    if any((record.plain is not None) != evidence for task in others for record in task.classes):
        say(
            "warning: older tasks were learned by another rule, so that the model predicts by the paper's; "
            "learn all of them again in a new model, or keep to their rule"
        )


def _teach(learner: Learner, found: Survey, writer: TaskWriter, holdout: float) -> Taught:
    """Learn the task and write it, twice if a prompt is trained."""
    from protosteer.photos.teaching import bookmark_path, teach
    from protosteer.report.progress import LearnProgress
    from protosteer.running.resume import Bookmark
    from protosteer.util.files import real, writing

    path, name = writer.path, writer.name
    bookmark = Bookmark(bookmark_path(real(path), found, learner, name, holdout))
    console = make_console(stderr=True)

    def on_usable(usable: Learner, early: Taught) -> None:
        writer.put(usable, early)
        checked = f" (self-check {early.check.accuracy:.1f} %)" if early.check else ""
        say(f"Usable now: {path}{checked}; training the prompt for what more it brings")

    try:
        with polite_kill(), writing(bookmark.path, ANOTHER), LearnProgress(console) as progress:
            taught = teach(learner, found, name, holdout, progress.on_stage, bookmark, on_usable)
            taught = writer.put(learner, taught)
    except KeyboardInterrupt:
        usable = "can be used as it is" if writer.begun else "is as it was"
        say(f"stopped; {path} {usable}{goes_on(bookmark) if writer.begun else ''}")
        raise
    finally:
        bookmark.release()
    bookmark.clear()
    return taught


def goes_on(bookmark: Bookmark) -> str:
    how = "goes on with the training" if bookmark.path.exists() else "begins the training again"
    return f"; the same command {how}"


def _why_no_prompt(record: TaskRecord) -> str:
    if record.domain is not None:
        return "no prompt was trained: the one for all classes serves these too"
    if len(record.classes) == 1:
        return "one class and nothing to tell it from: prototypes alone were learned, no prompt"
    return "no prompt was trained: by these settings only the first task has one"


def _tell_taught(taught: Taught, learner: Learner, path: Path, as_json: bool) -> None:
    from protosteer.report.teaching import check_report

    if taught.check and not as_json:
        show(check_report(taught.check, taught.before_training))
    if taught.record.prompt is None and learner.settings.prompts:
        say(_why_no_prompt(taught.record))
    if taught.check is None:
        lost = "" if learner.fusion else ", and predict --reject knows nothing of these classes"
        say(f"no image was held out: there is no self-check{lost}")
    size = f"{_size(learner.memory)}, {path.stat().st_size:,} bytes"
    say(f"Written: {path}: {size}; task {taught.record.name} is new")
