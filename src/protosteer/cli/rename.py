"""`protosteer rename` and `join`: give classes other names, or make one class of several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from protosteer.cli import completion
from protosteer.cli.common import CommandLineError, command, print_json, say
from protosteer.cli.loading import PANEL, check_classes
from protosteer.cli.options import Json, ModelFile
from protosteer.util.files import writing
from protosteer.util.text import counted, printable, similar_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protosteer.model.memory import Memory

ClassName = Annotated[str, Argument(autocompletion=completion.class_names, help="A class of the model.")]


@command(PANEL)
def rename(
    model: ModelFile,
    old: ClassName,
    new: Annotated[str, Argument(help="Its new name.")],
    as_json: Json = False,
) -> None:
    """Rename a class. What was learned of it stays as it is."""
    from protosteer.model.renaming import rename as rename_class

    classes = _change(model, "rename", [old], new, lambda memory: rename_class(memory, old, new))
    _tell(model, [old], new, classes, as_json)


@command(PANEL)
def join(
    model: ModelFile,
    names: Annotated[
        list[str],
        Argument(metavar="CLASS CLASS...", autocompletion=completion.class_names, help="Classes of the model."),
    ],
    name: Annotated[str, Option("--as", metavar="NAME", help="Name of the class that they become.")],
    as_json: Json = False,
) -> None:
    """Make one class of several."""
    from protosteer.model.renaming import join as join_classes

    if len(set(names)) < 2:
        raise CommandLineError("name at least two classes to join", code="missing-argument")
    classes = _change(model, "join", names, name, lambda memory: join_classes(memory, names, name))
    _tell(model, names, name, classes, as_json)


def _change(path: Path, command: str, names: Sequence[str], new_name: str, work: Callable[[Memory], None]) -> list[str]:
    """Change class names in a model file, keep its earlier version for `undo`, and return the new list of classes."""
    from protosteer.model.transaction import transaction

    with writing(path, None), transaction(path, command, keep=1) as change:
        model = change.read()
        check_classes(names, model.memory.classes)
        for _, near in similar_names([new_name], [name for name in model.memory.classes if name not in names]):
            say(f"warning: class '{new_name}': did you mean '{near}'? The two are different classes now")
        work(model.memory)
        change.renamed = {name: new_name for name in names if name != new_name}
        change.put(model)
    return model.memory.classes


def _tell(path: Path, old_names: Sequence[str], new_name: str, classes: list[str], as_json: bool) -> None:
    if as_json:
        print_json({"path": str(path), "renamed": list(old_names), "name": new_name, "classes": len(classes)})
    else:
        print(printable(f"{' + '.join(old_names)} -> {new_name}"))
    say(f"Written: {path}: {counted(len(classes), 'class')}; to undo: protosteer undo {path}")
