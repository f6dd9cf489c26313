"""`protosteer learn`: a folder of class folders, or a list of images, becomes a task of a model file."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from protosteer.cli.backbone_choice import Wanted, not_held_out
from protosteer.cli.common import app, make_console, say, show, sigterm_as_ctrl_c
from protosteer.cli.executor import make_executor
from protosteer.cli.loading import PANEL, backbone_of, check_place, prepare, read_model
from protosteer.cli.options import (
    Address,
    Device,
    Executor,
    Json,
    NewBackbone,
    Preset,
    Settings,
    Threads,
    Thumbnails,
    Weights,
    path_of,
)
from protosteer.cli.parallel_learn import learn_apart, to_learn
from protosteer.cli.parsing import parse_settings
from protosteer.cli.saving import ANOTHER, TaskWriter, keep_thumbnails
from protosteer.cli.scan import look, size_of, tell_found

if TYPE_CHECKING:
    from protosteer.backbones import Backbone
    from protosteer.cli.parallel_learn import LearnerOf
    from protosteer.data.class_folders import Files
    from protosteer.learner import Learner
    from protosteer.model.file import Model
    from protosteer.model.records import TaskRecord
    from protosteer.runtime.checkpoint import CheckpointFile
    from protosteer.workflows.learn_folder import FolderScan, LearnResult


@app.command(rich_help_panel=PANEL)
def learn(
    paths: Annotated[
        list[Path],
        Argument(
            metavar="MODEL FOLDER...",
            parser=path_of,
            help="Model file, which is made or extended, and what to learn: folders with one sub-folder of images "
            "per class, lists (.csv, .parquet, .jsonl) with columns path and label, image sets that datasets has "
            "saved. Each becomes a task.",
            show_default=False,
        ),
    ],
    model: Annotated[
        Path | None, Option("--model", help="The model file; then folders alone are the arguments.")
    ] = None,
    name: Annotated[
        str | None, Option(help="Name of the task (default: that of the folder or list).")
    ] = None,
    engine: Executor = "local",
    address: Address = None,
    backbone: NewBackbone = None,
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
    thumbnails: Thumbnails = False,
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
    path, folders = _model_and_folders(paths, model)
    who = make_executor(engine, address, device)
    if name is not None and (len(folders) > 1 or who.elsewhere):
        raise typer.BadParameter(
            "--name is of one folder that is learned here; else tasks are named after theirs"
        )
    if thumbnails and who.elsewhere:
        raise typer.BadParameter(
            "--thumbnails are kept of folders that are learned here, with --engine local"
        )
    changes = parse_settings(set_ or []) | ({} if independent is None else {"independent": independent})
    wanted = Wanted(backbone, weights, as_json)
    loaded: list[Backbone] = []

    def learner_of(old: Model | None, files: Callable[[], Files]) -> Learner:
        """The backbone is loaded once; that of a new model suits the files that are learned first."""
        learned = functools.partial(not_held_out, files, holdout, preset, changes)
        learner = _learner(old, wanted, learned, adapted, preset, changes, prepare(device, threads), *loaded)
        loaded[:] = [learner.backbone]
        return learner

    if who.elsewhere and not dry_run:
        told = learn_apart(who, path, folders, holdout, skip_known, device, learner_of)
    else:
        several = to_learn(path, folders, skip_known) if len(folders) > 1 else folders
        told = [
            _learn_folder(path, folder, name, holdout, skip_known, thumbnails, dry_run, as_json, learner_of)
            for folder in several
        ]
    if as_json:
        wanted.add_to(told)
        print(json.dumps(told[0] if len(folders) == 1 and told else told, indent=1))


def _learn_folder(
    path: Path,
    folder: Path,
    name: str | None,
    holdout: float,
    skip_known: bool,
    thumbnails: bool,
    dry_run: bool,
    as_json: bool,
    learner_of: LearnerOf,
) -> dict[str, Any]:
    """Look at a folder, and unless it is a dry run teach it; gives the figures."""
    from protosteer.data.sources import read_labelled
    from protosteer.report.learn import as_json as figures

    files = read_labelled(folder)  # complains before anything is loaded
    writer = TaskWriter(path, name)
    old = read_model(path)
    found = look(folder, files, old, name)
    found = found.without_known() if skip_known and found.known else found
    if not as_json:
        tell_found(found, holdout, path, old)
    if dry_run:
        return figures(found, None)
    found.check_new()
    check_place(path, ANOTHER)
    learner = learner_of(old, lambda: found.files)
    _tell_begun(learner, found, writer)
    taught = _teach(learner, found, writer, holdout)
    _tell_taught(taught, found, learner, path, as_json)
    if thumbnails:
        keep_thumbnails(path, learner, found, holdout)
    return figures(found, taught)


def _model_and_folders(paths: list[Path], model: Path | None) -> tuple[Path, list[Path]]:
    given = [*([model] if model else []), *paths]
    if len(given) < 2:
        raise typer.BadParameter(
            "give a model file and a folder, such as: protosteer learn shop.protosteer photos/"
        )
    return given[0], given[1:]


def _learner(
    old: Model | None,
    wanted: Wanted,
    files: Callable[[], Files],
    adapted: Path | None,
    preset: str | None,
    changes: dict[str, Any],
    device: str,
    loaded: Backbone | None = None,
) -> Learner:
    """A new one, or that of the model; `changes` are settings that were given, and win over a preset's.

    files: that a new backbone should suit. loaded: the model's, if it was loaded already.
    """
    from protosteer.learner import Learner
    from protosteer.workflows import shared_prompt

    prompt = shared_prompt.read(adapted) if adapted else None
    if old:
        learner = Learner.of_model(old, loaded or backbone_of(old, wanted.name, wanted.weights, device))
    elif prompt:
        backbone = backbone_of(prompt.model, wanted.name, wanted.weights, device)
        learner = Learner(backbone, domain=prompt.prompt_for(backbone))
    else:
        learner = Learner(wanted.load(device, files))
    settings = learner.settings.with_preset(preset) if preset else learner.settings
    learner.settings = settings.replace(**changes)
    if prompt:
        prompt.check_used(learner)
    return learner


def _tell_begun(learner: Learner, found: FolderScan, writer: TaskWriter) -> None:
    """Whether this goes on with a task that was begun, and what is odd about the model as it is."""
    from protosteer.workflows.learn_folder import unfinished_task

    memory = learner.memory
    begun = unfinished_task(memory, found.folder, found.files.labels, writer.name)
    writer.begun = begun.name if begun else None
    others = [task for task in memory.tasks if task is not begun]
    if begun:
        say(f"task {begun.name} is unfinished; going on with it")
    for task in (task for task in others if task.metadata.unfinished):
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


def _teach(learner: Learner, found: FolderScan, writer: TaskWriter, holdout: float) -> LearnResult:
    """Learn the task and write it, twice if a prompt is trained."""
    from protosteer.report.progress import LearnProgress
    from protosteer.runtime.checkpoint import CheckpointFile
    from protosteer.util.files import real, writing
    from protosteer.workflows.learn_folder import checkpoint_path, learn_folder

    path, name = writer.path, writer.name
    checkpoint = CheckpointFile(checkpoint_path(real(path), found, learner, name, holdout))
    console = make_console(stderr=True)

    def on_usable(usable: Learner, early: LearnResult) -> None:
        writer.put(usable, early)
        checked = f" (self-check {early.check.accuracy:.1f} %)" if early.check else ""
        say(f"Usable now: {path}{checked}; training the prompt for what more it brings")

    try:
        with sigterm_as_ctrl_c(), writing(checkpoint.path, ANOTHER), LearnProgress(console) as progress:
            taught = learn_folder(learner, found, name, holdout, progress.on_stage, checkpoint, on_usable)
            taught = writer.put(learner, taught)
    except KeyboardInterrupt:
        usable = "can be used as it is" if writer.begun else "is as it was"
        say(f"stopped; {path} {usable}{goes_on(checkpoint) if writer.begun else ''}")
        raise
    finally:
        checkpoint.release()
    checkpoint.clear()
    return taught


def goes_on(checkpoint: CheckpointFile) -> str:
    how = "goes on with the training" if checkpoint.path.exists() else "begins the training again"
    return f"; the same command {how}"


def _why_no_prompt(record: TaskRecord, found: FolderScan) -> str:
    if found.known.keys() >= {*record.class_names}:
        return "no prompt was trained: more images of known classes need none"
    if record.shared_prompt is not None:
        return "no prompt was trained: the one for all classes serves these too"
    if len(record.classes) == 1:
        return "one class and nothing to tell it from: prototypes alone were learned, no prompt"
    return "no prompt was trained: by these settings only the first task has one"


def _tell_taught(taught: LearnResult, found: FolderScan, learner: Learner, path: Path, as_json: bool) -> None:
    from protosteer.report.learn import check_report

    if taught.check and not as_json:
        show(check_report(taught.check, taught.before_training))
    if taught.record.prompt is None and learner.settings.prompts:
        say(_why_no_prompt(taught.record, found))
    if taught.check is None:
        lost = "" if learner.fusion else ", and predict --reject knows nothing of these classes"
        say(f"no image was held out: there is no self-check{lost}")
    size = f"{size_of(learner.memory)}, {path.stat().st_size:,} bytes"
    say(f"Written: {path}: {size}; task {taught.record.name} is new")
