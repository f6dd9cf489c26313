"""`protosteer learn`: each folder of class folders, or list of images, becomes a task of a model file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from protosteer.cli.common import CommandLineError, command, print_json, progress, say
from protosteer.cli.learn_parallel import ANOTHER, learn_folders_in_parallel, plan_folders
from protosteer.cli.loading import (
    PANEL,
    BackboneChoice,
    LearnerFactory,
    check_place,
    make_executor,
    prepare,
    read_model,
)
from protosteer.cli.options import Json, NewLoading, Preset, Settings, Thumbnails, Workers, parse_settings, path_of
from protosteer.cli.scanning import check_nested, model_size, scan, show_scan, warn_of_files
from protosteer.cli.torchrun import output_path
from protosteer.util.files import real, writing
from protosteer.util.text import printable

if TYPE_CHECKING:
    from protosteer.learner import Learner
    from protosteer.model.file import Model
    from protosteer.runtime.checkpoint import CheckpointFile
    from protosteer.workflows.folder_scan import FolderScan
    from protosteer.workflows.learn_folder import LearnResult, TaskSlot
    from protosteer.workflows.task_writer import TaskWriter

QUICK_BACKBONE = "mini"  # whose speed stands for that of a backbone that is still to be chosen


@dataclass(frozen=True)
class FolderOptions:
    """Options that say how each folder is learned."""

    holdout: Annotated[
        float,
        Option(
            min=0.0,
            max=0.5,
            help="Fraction of each class held out to judge training; these images are learned afterwards.",
        ),
    ] = 0.1
    skip_known: Annotated[bool, Option("--skip-known", help="Skip classes that the model already has.")] = False
    thumbnails: Thumbnails = False
    yes: Annotated[
        bool, Option("--yes", help="Do not ask: if folders contain folders, learn the outer ones as classes.")
    ] = False
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show what would be learned and how long it would take, then exit.")
    ] = False


@command(PANEL)
def learn(
    paths: Annotated[
        list[Path],
        Argument(
            metavar="MODEL FOLDER...",
            parser=path_of,
            help="Model file to create or extend, then the data: folders with one subfolder per class, lists (.csv, .parquet, .jsonl) with path and label columns, or saved Hugging Face datasets. Each becomes one task.",
        ),
    ],
    model: Annotated[Path | None, Option("--model", help="Model file (alternative to the first argument).")] = None,
    name: Annotated[str | None, Option(help="Name of the task (default: the name of the folder or list).")] = None,
    *,
    workers: Workers,
    loading: NewLoading,
    adapted: Annotated[
        Path | None, Option(metavar="FILE", help="Shared prompt for a new model, written by protosteer adapt.")
    ] = None,
    preset: Preset = None,
    independent: Annotated[
        bool | None,
        Option(
            "--independent/--dependent",
            help="Train this task without using other tasks, so that it can later be forgotten or merged exactly.",
        ),
    ] = None,
    set_: Settings = None,
    folder_options: FolderOptions,
    as_json: Json = False,
) -> None:
    """Learn the classes of a folder: create a model, or add classes and images to one.

    The model is usable after one pass over the images; training follows if it may help. You can stop at any time:
    the same command resumes.
    """
    model_path, *folders = _check_paths([*([model] if model else []), *paths])
    path, single = output_path(model_path), len(folders) == 1
    executor = make_executor(workers, loading.device)
    if name is not None and (len(folders) > 1 or executor.is_remote):
        message = "--name is for one folder with --engine local; other tasks are named after theirs"
        raise CommandLineError(message, code="conflicting-options")
    if folder_options.thumbnails and executor.is_remote:
        raise CommandLineError("--thumbnails needs --engine local", code="conflicting-options")
    changes = parse_settings(set_ or []) | ({} if independent is None else {"independent": independent})
    check_settings(preset, changes)
    if loading.device != "auto" and not executor.is_remote:
        prepare(loading)
    for folder in folders:
        check_nested(folder, path, folder_options.yes, folder_options.dry_run)
    choice, skip_known = BackboneChoice(loading, as_json), folder_options.skip_known
    may_skip = preset is None and not set_
    learners = LearnerFactory(choice, adapted, preset, changes, folder_options.holdout, may_skip)
    if executor.is_remote and not folder_options.dry_run:
        results = learn_folders_in_parallel(executor, path, folders, skip_known, learners)
    else:
        if len(folders) > 1:
            folders = [plan.folder for plan in plan_folders(read_model(path), folders, skip_known)]
        results = [_learn_folder(folder, path, name, folder_options, learners) for folder in folders]
    if as_json:
        choice.add_to(results)
        print_json(results[0] if single and results else results)


def _check_paths(paths: list[Path]) -> list[Path]:
    """Check that a model file and folders are given, in this order."""
    if len(paths) < 2:
        message = "give a model file and a folder, such as: protosteer learn shop.protosteer photos/"
        raise CommandLineError(message, code="missing-argument")
    if models := [folder for folder in paths[1:] if folder.suffix == ".protosteer" and not folder.is_dir()]:
        message = f"{models[0]} is a model file; the model file comes first, then the folders of images"
        raise CommandLineError(message, code="model-not-first", path=models[0])
    return paths


def check_settings(preset: str | None, changes: dict[str, Any]) -> None:
    """Reject an unknown preset or setting before any image is read."""
    from protosteer.settings import Settings

    Settings.preset(preset or "best", **changes)


def _learn_folder(
    folder: Path, path: Path, name: str | None, options: FolderOptions, learners: LearnerFactory
) -> dict[str, Any]:
    """Scan a folder and learn it, unless it is a dry run; returns the results for JSON."""
    from protosteer.data.sources import read_labelled
    from protosteer.report.learn import as_json
    from protosteer.workflows.learn_folder import TaskSlot
    from protosteer.workflows.task_writer import TaskWriter

    path, silent = output_path(path), learners.choice.as_json  # on other ranks: a copy that has the last folder's task
    files = read_labelled(folder)  # complains before anything is loaded
    writer = TaskWriter(path, name, say)
    model = read_model(path)
    folder_scan = scan(folder, files, model, name)
    folder_scan = folder_scan.without_known() if options.skip_known and folder_scan.known else folder_scan
    if not silent:
        show_scan(folder_scan, path, model)
    warn_of_files(folder_scan, model)
    if not len(folder_scan.files):
        say(f"nothing new in {folder}; {path} stays as it is")
        return as_json(folder_scan, None)
    if options.dry_run:
        _say_estimate(learners, model, folder_scan, name)
        return as_json(folder_scan, None)
    check_place(path, ANOTHER)
    learner = learners.make(model, lambda: folder_scan.files)
    slot = TaskSlot.prepare(learner, folder_scan, name, options.holdout)
    writer.unfinished = slot.unfinished.name if slot.unfinished else None
    _say_unfinished(learner, slot)
    result = _learn(learner, slot, writer, learners.may_skip)
    _show_result(result, folder_scan, learner, path, silent)
    if options.thumbnails:
        _keep_thumbnails(path, slot)
    return as_json(folder_scan, result)


def _say_estimate(learners: LearnerFactory, model: Model | None, folder_scan: FolderScan, name: str | None) -> None:
    """Print how long learning would take, by the time of a few images; a new model is timed with a small backbone."""
    from protosteer.runtime.progress_bar import duration
    from protosteer.workflows.learn_folder import TaskSlot

    is_named = model is not None or learners.choice.is_named
    learner = (learners if is_named else learners.with_backbone(QUICK_BACKBONE)).make(model, lambda: folder_scan.files)
    slot = TaskSlot.prepare(learner, folder_scan, name, learners.holdout)
    image_seconds = slot.seconds_per_image()
    words = f"Time: about {duration(image_seconds * len(folder_scan.files))} until usable"
    if training := slot.training_seconds(image_seconds):
        condition = ", if it is needed" if learners.may_skip else ""
        words += f", then about {duration(training)} of training{condition}"
    say(words if is_named else f"{words} (backbone {QUICK_BACKBONE})")


def _say_unfinished(learner: Learner, slot: TaskSlot) -> None:
    """Print whether an unfinished task is resumed, and which states of other tasks affect it."""
    from protosteer.rules import RULES

    tasks = [task for task in learner.memory.tasks if task is not slot.unfinished]
    if slot.unfinished:
        say(f"task {slot.name} is unfinished; resuming it")
    for task in (task for task in tasks if task.metadata.unfinished):
        say(
            f"task {task.name} is unfinished: tasks learned before its prompt is trained do not profit from it; "
            "to resume it, repeat the command that began it"
        )
    rule = RULES[learner.settings.rule]
    if not all(rule.has_stored(task.classes) for task in tasks):
        say(
            "warning: older tasks were learned by another rule, so the model predicts by CPP inference; learn all "
            "of them again in a new model, or keep to their rule"
        )


def _learn(learner: Learner, slot: TaskSlot, writer: TaskWriter, may_skip: bool) -> LearnResult:
    """Learn the task and write it, twice if a prompt is trained."""
    from protosteer.runtime.checkpoint import CheckpointFile
    from protosteer.runtime.progress_bar import duration

    path, is_update = writer.path, writer.path.exists()
    checkpoint = CheckpointFile(slot.checkpoint_path(real(path)))

    def put(new_learner: Learner, result: LearnResult) -> LearnResult:
        with writing(path, ANOTHER):
            return writer.put(new_learner, result)

    def on_usable(preview_learner: Learner, preview: LearnResult) -> None:
        put(preview_learner, preview)
        checked = f", self-check {preview.accuracy}" if preview.accuracy else ""
        condition = ", if it is needed" if may_skip else ""
        time_left = duration(slot.training_seconds(slot.seconds_per_image()))
        say(f"Usable now: {path}{checked}; training takes about {time_left}{condition}")

    try:
        with progress() as on_stage, writing(checkpoint.path, ANOTHER):
            new_learner, result = slot.learn(on_stage, checkpoint, on_usable, may_skip)
            learner.memory = new_learner.memory
            result = put(learner, result)
    except KeyboardInterrupt:
        state = "can be used" if writer.unfinished else "is as it was" if is_update else "was not written yet"
        say(f"stopped; {path} {state}{resumes(checkpoint) if writer.unfinished else ''}")
        raise
    finally:
        checkpoint.release()
    checkpoint.clear()
    return result


def resumes(checkpoint: CheckpointFile) -> str:
    """Return a clause about what the same command will do: resume training, or start it again."""
    action = "resumes training" if checkpoint.path.exists() else "starts training again"
    return f"; the same command {action}"


def _show_result(result: LearnResult, folder_scan: FolderScan, learner: Learner, path: Path, as_json: bool) -> None:
    from protosteer.report.learn import result_lines, why_no_prompt

    if not as_json:
        for line in result_lines(result, len(learner.classes)):
            print(printable(line))
    if result.record.prompt is None and learner.settings.prompts and result.training is None:
        say(why_no_prompt(result.record, folder_scan))
    if result.accuracy is None:
        reason = "one class alone cannot be mistaken" if len(learner.classes) < 2 else "there are too few images"
        say(f"no self-check: {reason}")
    size = f"{model_size(learner.memory)}, {path.stat().st_size:,} bytes"
    say(f"Written: {path}: {size}; task {result.record.name} is new")


def _keep_thumbnails(path: Path, slot: TaskSlot) -> None:
    from protosteer.model.thumbnails import beside
    from protosteer.workflows.thumbnails import keep_thumbnails

    with writing(path, ANOTHER):
        count = keep_thumbnails(path, slot)
    say(f"Kept: {count} thumbnails in {beside(path).name}, beside the model; a forgotten class loses its own")
