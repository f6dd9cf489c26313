"""Commands on model files: `forget`, `merge`, `inspect`, `export`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from protosteer import __version__
from protosteer.cli import completion
from protosteer.cli.adapt import tell as tell_adapted
from protosteer.cli.common import CommandLineError, check_plot, command, print_json, say, show, write_output
from protosteer.cli.loading import PANEL, check_classes, open_learner, refuse_existing, write_new
from protosteer.cli.options import Json, Loading, ModelBackbone, ModelFile, ModelWeights, parse_pairs
from protosteer.errors import ModelFileError
from protosteer.util.files import file_hash, read_regular, real, remove_leftovers, write_atomically, writing
from protosteer.util.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protosteer.model.file import Model
    from protosteer.model.unlearning import Forgotten


@command(PANEL)
def forget(
    model: ModelFile,
    names: Annotated[
        list[str] | None,
        Argument(
            metavar="NAME", autocompletion=completion.class_names, help="Classes; after -- if one begins with a dash."
        ),
    ] = None,
    task: Annotated[
        str | None, Option(autocompletion=completion.task_names, help="Forget all classes of this task.")
    ] = None,
    backup: Annotated[Path | None, Option(help="Keep the old model in this file.")] = None,
    certificate: Annotated[
        Path | None, Option(metavar="FILE", help="Write what was removed, as JSON that protosteer verify checks.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove classes or a task from a model, and report what that guarantees. Needs no backbone."""
    from protosteer.model.certificate import make as make_certificate
    from protosteer.model.transaction import transaction
    from protosteer.model.unlearning import forget as forget_one
    from protosteer.model.unlearning import forget_all

    if bool(names) == (task is not None):
        raise CommandLineError("name the classes to forget, or one task with --task", code="conflicting-options")
    if certificate is not None:
        refuse_existing(certificate, "--certificate")
    with writing(model, None), transaction(model, "forget", keep=None) as change:
        contents = change.read()
        memory, old_size = contents.memory, _size(contents)
        check_classes(names or [], memory.classes)
        outcome = [forget_one(memory, task=task)] if task is not None else forget_all(memory, names or [])
        if backup:
            refuse_existing(backup, "--backup")
            with writing(backup, "--backup"):
                write_atomically(backup, read_regular(model), like=model)
        sha256 = file_hash(model, "sha256") if certificate else ""
        change.forgotten = [name for part in outcome for name in part.classes], task
        change.put(contents)
    if certificate is not None:
        proof = make_certificate(model, change.before, sha256, memory.tasks, outcome, __version__)
        with writing(certificate, "--certificate"):
            write_atomically(certificate, f"{json.dumps(proof, indent=1)}\n".encode())
        say(f"Written: {certificate}; to check it: protosteer verify {certificate} {model}")
    leftovers = remove_leftovers(real(model).parent, real(model).name, older_than=0.0)  # unfinished training, too
    new_size = _size(contents)
    if as_json:
        parts = [dataclasses.asdict(part) for part in outcome]
        backup_path = str(backup) if backup else None
        print_json({"forgotten": parts, "before": old_size, "after": new_size, "backup": backup_path})
    else:
        _show_forgotten(outcome)
        print(f"before: {_describe_size(old_size)}\nafter: {_describe_size(new_size)}")
    if change.cleaned:
        say(f"removed from {counted(change.cleaned, 'kept version')}, too")
    if leftovers:
        say(f"warning: {leftovers[0]} may hold forgotten classes: it is in use, or cannot be removed")
    note = f"; old model: {backup}" if backup else "" if leftovers else "; no copy of the old model was kept"
    say(f"Written: {model}{note}")


def _show_forgotten(outcome: Sequence[Forgotten]) -> None:
    for part in outcome:
        tasks = f"{'task' if len(part.tasks) == 1 else 'tasks'} {', '.join(part.tasks)}"
        print(printable(f"forgotten: {', '.join(part.classes)} ({tasks}), {part.bytes:,} bytes of state"))
        print(printable(f"  {part.guarantee}"))


def _size(model: Model) -> dict[str, int]:
    memory = model.memory
    return {"classes": len(memory.classes), "tasks": len(memory), "bytes": sum(t.bytes for t in memory.tasks)}


def _describe_size(size: dict[str, int]) -> str:
    return f"{counted(size['classes'], 'class')}, {counted(size['tasks'], 'task')}, {size['bytes']:,} bytes of state"


@command(PANEL)
def merge(
    models: Annotated[list[Path], Argument(metavar="MODEL MODEL...", help="Model files.")],
    out: Annotated[Path, Option("-o", "--out", help="File for the merged model.")],
    rename: Annotated[
        list[str] | None, Option("--rename", metavar="OLD=NEW", help="Rename a class of the second and later models.")
    ] = None,
    rename_task: Annotated[
        list[str] | None,
        Option("--rename-task", metavar="OLD=NEW", help="Rename a task of the second and later models."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Merge the tasks of several models of one backbone into one file. Needs no backbone."""
    from protosteer.model import file as model_file

    if len(models) < 2:
        raise CommandLineError("give at least two model files", code="missing-argument")
    refuse_existing(out)
    parts = [model_file.read(path) for path in models]
    classes = {name for part in parts[1:] for name in part.memory.classes}
    tasks = {name for part in parts[1:] for name in part.memory.task_names}
    renames = parse_pairs(rename or [], "--rename", classes)
    model = model_file.merge(parts, renames, parse_pairs(rename_task or [], "--rename-task", tasks))
    write_new(out, model, "merge", "--out")
    if model.memory.shared_prompt is None and any(part.memory.shared_prompt is not None for part in parts):
        say("the models have no shared prompt in common: the merged model has none")
    size = _size(model)
    if as_json:
        print_json({**size, "path": str(out), "names": model.memory.classes})
    else:
        print(f"{out}: {_describe_size(size)}")


@command(PANEL)
def inspect(
    model: ModelFile,
    plot: Annotated[Path | None, Option(help="PNG file for a plot of class similarities.")] = None,
    all_classes: Annotated[bool, Option("--all", help="List every class, however many there are.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a model file holds: tasks, classes, sizes, backbone, settings. Needs no backbone."""
    from protosteer.model import file as model_file
    from protosteer.rules import reader_of
    from protosteer.workflows.model_summary import describe, similarity

    check_plot(plot)
    try:
        contents = model_file.read(model)
    except ModelFileError:
        if plot or not tell_adapted(model, as_json):
            raise
        return
    about = describe(contents, reader_of(contents.memory, contents.settings))
    if as_json:
        print_json(about)
    else:
        from protosteer.report.model_summary import overview

        show(overview(about, all_classes=all_classes))
    if plot:
        from protosteer.report.plots import class_similarity

        write_output(plot, class_similarity(*similarity(contents.memory)), "--plot")


@command(PANEL)
def export(
    model: ModelFile,
    onnx: Annotated[Path | None, Option("--onnx", metavar="DIR", help="Folder for the ONNX files.")] = None,
    web: Annotated[
        Path | None, Option("--web", metavar="DIR", help="Folder for a web page that predicts in the browser.")
    ] = None,
    link: Annotated[
        bool, Option("--link", help="With --web: load onnxruntime-web from a CDN instead of adding it to the folder.")
    ] = False,
    backbone: ModelBackbone = None,
    weights: ModelWeights = None,
    as_json: Json = False,
) -> None:
    """Export a model to ONNX with a program that predicts, or to a web page; neither needs protosteer."""
    from protosteer.export.onnx import export_onnx
    from protosteer.export.web import export_web

    if not (onnx or web):
        raise CommandLineError("give --onnx DIR, --web DIR or both", code="missing-argument")
    learner = open_learner(model, Loading(backbone, weights, "cpu", "fp32"))
    paths = export_onnx(learner, onnx, say, option="--onnx") if onnx else []
    if web:
        paths += export_web(learner, web, model.stem, link, say, option="--web")
    files = {str(path): path.stat().st_size for path in paths}
    if as_json:
        print_json({"files": files})
    else:
        print("\n".join(f"{path}  {size:,} bytes" for path, size in files.items()))
        if web:
            say(f"try it: python -m http.server --directory {web}, then open http://localhost:8000")
