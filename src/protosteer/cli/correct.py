"""`protosteer correct`: set the class of one image that the model got wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from protosteer.cli import completion
from protosteer.cli.common import CommandLineError, app, say, show
from protosteer.cli.loading import PANEL, clear_up, open_learner
from protosteer.cli.options import Device, Json, ModelBackbone, ModelFile, ModelWeights, Threads
from protosteer.errors import ProtosteerError
from protosteer.util.text import printable

if TYPE_CHECKING:
    from protosteer.learner import Learner


@app.command(rich_help_panel=PANEL)
def correct(
    model: ModelFile,
    image: Annotated[Path | None, Argument(metavar="[IMAGE]", show_default=False, help="Image file.")] = None,
    name: Annotated[
        str | None,
        Argument(
            metavar="[CLASS]",
            autocompletion=completion.class_names,
            show_default=False,
            help="Its class, which may be new.",
        ),
    ] = None,
    undo: Annotated[
        bool, Option("--undo", help="Undo the last correction, or that of IMAGE, instead.")
    ] = False,
    log: Annotated[bool, Option("--log", help="List all corrections and change nothing.")] = False,
    backbone: ModelBackbone = None,
    weights: ModelWeights = None,
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Correct a wrong prediction: learn the right class of one image at once, without training."""
    wanted = (image is None) + (name is None)
    if (log and wanted < 2) or (undo and name is not None) or (log and undo):
        raise CommandLineError(
            "--log takes a model alone; --undo a model, or a model and an image", code="conflicting-options"
        )
    if log:
        _show_log(model, as_json)
    elif undo:
        _undo(model, image, as_json)
    elif image is None or name is None:
        raise CommandLineError(
            "give an image and its class, such as: protosteer correct shop.protosteer new/7.jpg kettle",
            code="missing-argument",
        )
    else:
        from protosteer.util.files import real, replacing, writing

        with writing(model, None), replacing(real(model)):
            learner = open_learner(model, backbone, weights, device, threads)
            _correct(learner, image, name, as_json)
            learner.save(model)
            clear_up(model)
        say(f"Written: {model}; to undo: protosteer correct {model} --undo")


def _correct(learner: Learner, image: Path, name: str, as_json: bool) -> None:
    from protosteer.workflows.model_summary import correction

    new = name not in learner.classes
    record = learner.correct(image, name)
    ((now, probability, _),) = learner.predict(image).ranked(1)[0]
    if as_json:
        print(
            json.dumps(
                {**correction(record), "new_class": new, "answer": now, "probability": probability}, indent=1
            )
        )
        return
    words = f"{image}: predicted {record.corrected_from}"
    words += " already, one more image" if record.corrected_from == name else f", corrected to {name}"
    words += " (a new class)" if new else ""
    print(printable(f"{words}; now predicted {now} ({100 * probability:.0f} %)"))
    if now != name:
        say("one image did not outweigh the others; correct more similar images, or learn more of the class")


def _undo(path: Path, image: Path | None, as_json: bool) -> None:
    from protosteer.data.image_files import image_bytes, image_exists
    from protosteer.model import file as model_file
    from protosteer.model.memory import Memory
    from protosteer.model.records import correction_name
    from protosteer.model.unlearning import undo
    from protosteer.util.files import digest, real, replacing, writing
    from protosteer.workflows.model_summary import correction

    task = None
    if image is not None:
        if not image_exists(image):
            raise ProtosteerError(
                f"{image} is not an image file; check the path", code="no-such-file", path=image
            )
        task = correction_name(digest(image_bytes(image)))
    with writing(path, None), replacing(real(path)):
        old = model_file.read(path)
        memory = Memory(old.memory.tasks)
        if task is not None and task not in memory.task_names:
            raise ProtosteerError(
                f"{image} has not been corrected in {path}; there is nothing to undo",
                code="not-corrected",
                path=image,
            )
        record = undo(memory, task)
        dataclasses.replace(old, memory=memory).write(path)
        clear_up(path)
    if as_json:
        print(json.dumps({"taken_back": correction(record)}, indent=1))
    else:
        (name,) = record.class_names
        print(
            printable(f"undone: {record.metadata.file or 'an image'} as {name} ({record.metadata.learned})")
        )
    say(f"Written: {path}")


def _show_log(path: Path, as_json: bool) -> None:
    from rich.text import Text

    from protosteer.model import file as model_file
    from protosteer.report.tables import plain_table
    from protosteer.workflows.model_summary import correction

    made = [correction(record) for record in model_file.read(path).memory.corrections]
    if as_json:
        print(json.dumps({"corrections": made}, indent=1))
        return
    if not made:
        print(f"{path}: no corrections")
        return
    table = plain_table(None, "Date", "Image", "Predicted", "Actual")
    for one in made:
        table.add_row(*(Text(printable(one[key] or "-")) for key in ("date", "image", "taken_for", "class")))
    show([table])
