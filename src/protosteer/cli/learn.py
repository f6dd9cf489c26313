"""`protosteer learn`: each folder of class folders, or list of images, becomes a task of a model file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from protosteer.cli.common import CommandLineError, app, make_console, say, show, sigterm_as_ctrl_c
from protosteer.cli.loading import (
    PANEL,
    BackboneChoice,
    backbone_of,
    check_place,
    check_writable,
    make_executor,
    prepare,
    read_model,
)
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
    parse_settings,
    path_of,
)
from protosteer.cli.torchrun import output_path

if TYPE_CHECKING:
    from protosteer.backbones import Backbone
    from protosteer.data.class_folders import Files
    from protosteer.learner import Learner
    from protosteer.model.file import Model
    from protosteer.model.memory import Memory
    from protosteer.runtime import executor
    from protosteer.runtime.checkpoint import CheckpointFile
    from protosteer.workflows.learn_folder import FolderScan, LearnResult, TaskSlot
    from protosteer.workflows.parallel_learn import TaskPlan
    from protosteer.workflows.task_writer import TaskWriter

ANOTHER = "another MODEL"  # what to choose where nothing can be written
MAX_NAMED_FILES = 5  # in a line


@app.command(rich_help_panel=PANEL)
def learn(
    paths: Annotated[
        list[Path],
        Argument(
            metavar="MODEL FOLDER...",
            parser=path_of,
            help="Model file, which is created or extended, and what to learn: folders with one sub-folder of "
            "images per class, lists (.csv, .parquet, .jsonl) with columns path and label, image sets saved by "
            "datasets. Each becomes a task.",
            show_default=False,
        ),
    ],
    model: Annotated[Path | None, Option("--model", help="The model file; then all arguments are folders.")] = None,
    name: Annotated[str | None, Option(help="Name of the task (default: that of the folder or list).")] = None,
    engine: Executor = "local",
    address: Address = None,
    backbone: NewBackbone = None,
    weights: Weights = None,
    adapted: Annotated[
        Path | None,
        Option(metavar="FILE", help="Adapted backbone for a new model, with a shared prompt for all classes."),
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
    skip_known: Annotated[bool, Option("--skip-known", help="Skip classes that the model has already.")] = False,
    thumbnails: Thumbnails = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Report what is in the folder, and learn nothing.")] = False,
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Learn the classes of a folder: a new model, or one more task of an old one.

    If a prompt is trained, you can use the model before that, after one pass over the images. Ctrl-C or a crash
    leaves it usable, and the same command resumes training, at most half a minute before where it was.
    """
    given = [*([model] if model else []), *paths]
    if len(given) < 2:
        message = "give a model file and a folder, such as: protosteer learn shop.protosteer photos/"
        raise CommandLineError(message, code="missing-argument")
    path, *folders = given
    path = output_path(path)
    who = make_executor(engine, address, device)
    if name is not None and (len(folders) > 1 or who.is_remote):
        message = "--name is for one folder with --engine local; other tasks are named after theirs"
        raise CommandLineError(message, code="conflicting-options")
    if thumbnails and who.is_remote:
        raise CommandLineError("--thumbnails needs --engine local", code="conflicting-options")
    changes = parse_settings(set_ or []) | ({} if independent is None else {"independent": independent})
    choice = BackboneChoice(backbone, weights, as_json)
    learners = _Learners(choice, adapted, preset, changes, holdout, lambda: prepare(device, threads))
    if who.is_remote and not dry_run:
        results = _learn_in_parallel(who, path, folders, holdout, skip_known, device, learners)
    else:
        if len(folders) > 1:
            folders = [plan.folder for plan in _plans(read_model(path), folders, skip_known)]
        request = _Request(path, name, holdout, skip_known, thumbnails, dry_run, as_json)
        results = [_learn_folder(folder, request, learners) for folder in folders]
    if as_json:
        choice.add_to(results)
        print(json.dumps(results[0] if len(given) == 2 and results else results, indent=1))


@dataclass
class _Learners:
    """Makes the learner of a model, or a new one; the backbone is loaded once.

    Settings in `changes` win over a preset's.
    """

    choice: BackboneChoice
    adapted: Path | None
    preset: str | None
    changes: dict[str, Any]
    holdout: float
    prepare: Callable[[], str]  # gives the device
    loaded: list[Backbone] = field(default_factory=list)

    def make(self, old: Model | None, files: Callable[[], Files]) -> Learner:
        """Return a learner. A new backbone is chosen to suit the files that are learned first."""
        from protosteer.learner import Learner
        from protosteer.workflows import shared_prompt

        prompt = shared_prompt.read(self.adapted) if self.adapted else None
        device, name, weights = self.prepare(), self.choice.name, self.choice.weights
        if old:
            backbone = self.loaded[0] if self.loaded else backbone_of(old, name, weights, device)
            learner = Learner.of_model(old, backbone)
        elif prompt:
            backbone = backbone_of(prompt.model, name, weights, device)
            learner = Learner(backbone, shared_prompt=prompt.prompt_for(backbone))
        else:
            learner = Learner(self.choice.load(device, lambda: self._learned(files())))
        settings = learner.settings.with_preset(self.preset) if self.preset else learner.settings
        learner.settings = settings.replace(**self.changes)
        if prompt:
            prompt.check_used(learner)
        self.loaded[:] = [learner.backbone]
        return learner

    def _learned(self, files: Files) -> Files:
        """Files that a new model will learn: held-out ones must not choose its backbone."""
        from protosteer.settings import DEFAULT_PRESET, Settings
        from protosteer.workflows.learn_folder import split

        settings = Settings.preset(self.preset or DEFAULT_PRESET, **self.changes)  # complains before anything is tried
        return split(files, self.holdout, settings.seed)[0]


@dataclass(frozen=True)
class _Request:
    path: Path
    name: str | None
    holdout: float
    skip_known: bool
    thumbnails: bool
    dry_run: bool
    as_json: bool


def _learn_folder(folder: Path, request: _Request, learners: _Learners) -> dict[str, Any]:
    """Scan a folder and learn it, unless it is a dry run; returns the results for JSON."""
    from protosteer.data.sources import read_labelled
    from protosteer.report.learn import as_json
    from protosteer.workflows.learn_folder import TaskSlot
    from protosteer.workflows.task_writer import TaskWriter

    path, name = output_path(request.path), request.name  # a copy as the file is after the last folder
    files = read_labelled(folder)  # complains before anything is loaded
    writer = TaskWriter(path, name, say)
    old = read_model(path)
    found = scan(folder, files, old, name)
    found = found.without_known() if request.skip_known and found.known else found
    if not request.as_json:
        _show_scan(found, request.holdout, path, old)
    if request.dry_run:
        return as_json(found, None)
    found.check_new()
    check_place(path, ANOTHER)
    learner = learners.make(old, lambda: found.files)
    slot = TaskSlot.prepare(learner, found, name, request.holdout)
    writer.unfinished = slot.unfinished.name if slot.unfinished else None
    _say_unfinished(learner, slot)
    result = _learn(learner, slot, writer)
    _show_result(result, found, learner, path, request.as_json)
    if request.thumbnails:
        _keep_thumbnails(path, slot)
    return as_json(found, result)


def scan(folder: Path, files: Files, old: Model | None = None, name: str | None = None) -> FolderScan:
    """Scan a folder with a progress bar; for a model that exists, decode its images for learning already."""
    from rich.markup import escape
    from rich.progress import Progress

    from protosteer.data.transforms import Preprocessing
    from protosteer.workflows.learn_folder import scan_folder

    console = make_console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        row = bars.add_task(escape(f"reading {folder}"), total=None)

        def on_file(done: int, of: int) -> None:
            bars.update(row, completed=done, total=of)

        preprocessing = Preprocessing.from_dict(old.backbone["preprocessing"]) if old else None
        return scan_folder(folder, old.memory if old else None, on_file, files, name, preprocessing)


def _show_scan(found: FolderScan, holdout: float, path: Path, old: Model | None) -> None:
    from protosteer.report.learn import found_table
    from protosteer.util.text import counted
    from protosteer.workflows.learn_folder import held_count

    say(f"{path}: {_size(old.memory)}, to be extended" if old else f"{path}: a new model")
    counts, console = found.counts, make_console()
    new = " that are new" if found.already_learned else ""
    line = f"{found.folder}: {counted(len(counts), 'class')}, {counted(len(found.files), 'image')}{new}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    if counts:
        console.print(found_table(found, {name: held_count(n, holdout) for name, n in counts.items()}))
    warn_of_files(found)


def _size(memory: Memory) -> str:
    from protosteer.util.text import counted

    return f"{counted(len(memory.classes), 'class')} in {counted(len(memory), 'task')}"


def warn_of_files(found: FolderScan) -> None:
    """Name files that are skipped, or that another class was learned from."""
    from protosteer.util.text import counted, listed

    def named(files: Sequence[object]) -> str:
        return f"{counted(len(files), 'file')}: {listed([str(file) for file in files], MAX_NAMED_FILES)}"

    if found.unreadable:
        say(f"warning: cannot be read and will be skipped: {named(found.unreadable.paths)}")
    if found.already_learned:
        say(f"skipped, since learned or held out before: {named(found.already_learned)}")
    if found.learned_as_other_class:
        others = [f"{path} ({name})" for path, name in found.learned_as_other_class.items()]
        say(f"warning: learned as another class before: {named(others)}")


def _say_unfinished(learner: Learner, slot: TaskSlot) -> None:
    """Say whether an unfinished task is resumed, and which conditions of the model matter to it."""
    from protosteer.rules import RULES

    others = [task for task in learner.memory.tasks if task is not slot.unfinished]
    if slot.unfinished:
        say(f"task {slot.name} is unfinished; resuming it")
    for task in (task for task in others if task.metadata.unfinished):
        say(
            f"task {task.name} is unfinished: tasks learned before its prompt is trained do not profit from it; "
            "to resume it, repeat the command that began it"
        )
    rule = RULES[learner.settings.rule]
    if not all(rule.stored(task.classes) for task in others):
        say(
            "warning: older tasks were learned by another rule, so the model predicts by CPP inference; learn all "
            "of them again in a new model, or keep to their rule"
        )


def _learn(learner: Learner, slot: TaskSlot, writer: TaskWriter) -> LearnResult:
    """Learn the task and write it, twice if a prompt is trained."""
    from protosteer.report.progress import LearnProgress
    from protosteer.runtime.checkpoint import CheckpointFile
    from protosteer.util.files import real, writing

    path = writer.path
    checkpoint = CheckpointFile(slot.checkpoint_path(real(path)))

    def put(known: Learner, result: LearnResult) -> LearnResult:
        with writing(path, ANOTHER):
            return writer.put(known, result)

    def on_usable(usable: Learner, preview: LearnResult) -> None:
        put(usable, preview)
        checked = f" (self-check {preview.check.accuracy:.1f} %)" if preview.check else ""
        say(f"Usable now: {path}{checked}; training the prompt for higher accuracy")

    try:
        with (
            sigterm_as_ctrl_c(),
            writing(checkpoint.path, ANOTHER),
            LearnProgress(make_console(stderr=True)) as progress,
        ):
            after, result = slot.learn(progress.on_stage, checkpoint, on_usable)
            learner.memory = after.memory
            result = put(learner, result)
    except KeyboardInterrupt:
        usable = "can be used as it is" if writer.unfinished else "is as it was"
        say(f"stopped; {path} {usable}{resumes(checkpoint) if writer.unfinished else ''}")
        raise
    finally:
        checkpoint.release()
    checkpoint.clear()
    return result


def resumes(checkpoint: CheckpointFile) -> str:
    """Return what the same command does next."""
    how = "resumes training" if checkpoint.path.exists() else "starts training again"
    return f"; the same command {how}"


def _show_result(result: LearnResult, found: FolderScan, learner: Learner, path: Path, as_json: bool) -> None:
    from protosteer.report.learn import check_report, why_no_prompt

    if result.check and not as_json:
        show(check_report(result.check, result.before_training))
    if result.record.prompt is None and learner.settings.prompts:
        say(why_no_prompt(result.record, found))
    if result.check is None:
        lost = "" if not learner.reader.needs_heldout else ", and predict --reject knows nothing of these classes"
        say(f"no image was held out: there is no self-check{lost}")
    size = f"{_size(learner.memory)}, {path.stat().st_size:,} bytes"
    say(f"Written: {path}: {size}; task {result.record.name} is new")


def _keep_thumbnails(path: Path, slot: TaskSlot) -> None:
    from protosteer.model.thumbnails import beside
    from protosteer.util.files import writing
    from protosteer.workflows.thumbnails import keep_thumbnails

    with writing(path, ANOTHER):
        count = keep_thumbnails(path, slot)
    say(f"Kept: {count} thumbnails in {beside(path).name}, beside the model; a forgotten class loses its own")


def _plans(old: Model | None, folders: Sequence[Path], skip_known: bool) -> list[TaskPlan]:
    """Plan the folders that are no tasks yet; what would reject one of them later rejects all now."""
    from protosteer.model.memory import Memory
    from protosteer.workflows.parallel_learn import plan_tasks

    plans, already_done = plan_tasks(old.memory if old else Memory(), folders, skip_known)
    for folder in already_done:
        say(f"{folder} is a task already, with the same classes; skipped")
    return plans


def _learn_in_parallel(
    engine: executor.Executor,
    path: Path,
    folders: Sequence[Path],
    holdout: float,
    skip_known: bool,
    device: str,
    learners: _Learners,
) -> list[dict[str, Any]]:
    """Learn each folder on a worker, then write all tasks at once, in the order of the folders."""
    from protosteer.data.class_folders import readable
    from protosteer.report.learn import as_json
    from protosteer.report.progress import LearnProgress
    from protosteer.runtime.progress import Stage
    from protosteer.util.files import real, writing
    from protosteer.util.text import counted
    from protosteer.workflows.learn_folder import held_count
    from protosteer.workflows.parallel_learn import learn_in_parallel, refuse_dependent
    from protosteer.workflows.task_writer import put_tasks

    held_count(0, holdout)  # complains before anything is started
    old = read_model(path)
    plans = _plans(old, folders, skip_known)
    if not plans:
        say(f"{path}: nothing is left to learn")
        return []
    learner = learners.make(old, lambda: readable(plans[0].files())[0])
    refuse_dependent(learner, plans)
    check_writable(path, ANOTHER)  # an earlier command's files there are still needed
    results: dict[Path, dict[str, Any]] = {}
    with LearnProgress(make_console(stderr=True)) as progress:

        def on_learned(plan: TaskPlan, outcome: tuple[FolderScan, LearnResult] | None) -> None:
            results[plan.folder] = as_json(*outcome) if outcome else {"task": {"name": plan.name}}
            check = outcome[1].check if outcome else None
            among = f", self-check {check.accuracy:.1f} % among its own classes and older ones" if check else ""
            how = f"learned as task {plan.name}{among}" if outcome else "was learned before an earlier stop"
            say(f"{plan.folder}: {how}")
            progress.on_stage(Stage("", "folders", len(results), len(plans)))

        try:
            with sigterm_as_ctrl_c(), writing(path, ANOTHER):
                records, parts = learn_in_parallel(engine, learner, plans, real(path), holdout, device, on_learned)
                put_tasks(path, learner, records)
        except KeyboardInterrupt:
            say(f"stopped; {path} is as it was; the same command learns the folders that are left")
            raise
    for part in parts:
        part.unlink(missing_ok=True)
    say(f"Written: {path}: {_size(learner.memory)}; {counted(len(records), 'task')} new")
    return [results[plan.folder] for plan in plans]
