"""`protosteer history` and `undo`: the changes of a model file, and the way back."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from protosteer.cli.common import command, print_json, say, show
from protosteer.cli.loading import PANEL
from protosteer.cli.options import Json, ModelFile
from protosteer.util.files import real, replacing, writing
from protosteer.util.text import counted


@command(PANEL)
def history(
    model: ModelFile,
    keep_versions: Annotated[
        int | None,
        Option(min=0, max=1000, help="Keep the last N versions for undo from now on; 0 removes all kept versions."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the changes of a model file: when, by which command, which classes, how many images. Needs no backbone."""
    from protosteer.model import file as model_file
    from protosteer.model import history as log
    from protosteer.report.history import overview

    model_file.read(model)  # complains if there is none
    if keep_versions is not None:
        with writing(log.beside(model), None), replacing(real(model)):
            log.keep_versions(model, keep_versions)
        state = f"the last {keep_versions} versions are kept" if keep_versions else "no version is kept"
        say(f"{model}: from now on {state}")
    entries, keep = log.read(model)
    versions = [path.name for path in log.versions(model)]
    if as_json:
        print_json({"keep_versions": keep, "versions": versions, "changes": [*map(vars, entries)]})
    elif entries:
        show(overview(entries, versions))
    else:
        print(f"{model}: no change is logged")


@command(PANEL)
def undo(model: ModelFile, as_json: Json = False) -> None:
    """Take back the last change of a model file, if its earlier version is kept.

    Those before rename and join are; of other commands as many as history --keep-versions says. Forgetting cannot be
    taken back. Corrections are taken back one by one with correct --undo.
    """
    from protosteer.model import file as model_file
    from protosteer.model import history as log

    model_file.read(model)  # complains if there is none
    with writing(model, None), replacing(real(model)):
        log.undo(model)
    memory = model_file.read(model).memory
    if as_json:
        print_json({"path": str(model), "classes": memory.classes})
    say(f"Written: {model}: {counted(len(memory.classes), 'class')} in {counted(len(memory), 'task')}, as before")
