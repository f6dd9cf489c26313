"""`protosteer correct`: set the class of one image that the model got wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from protosteer.cli import completion
from protosteer.cli.common import CommandLineError, command, print_json, say, show
from protosteer.cli.loading import PANEL, learner_of
from protosteer.cli.options import Json, Loading, ModelFile
from protosteer.errors import ProtosteerError
from protosteer.util.files import digest, writing
from protosteer.util.text import printable, similar_names

if TYPE_CHECKING:
    from protosteer.learner import Learner


@command(PANEL)
def correct(
    model: ModelFile,
    image: Annotated[
        Path | None, Argument(metavar="[IMAGE]", help="Image file; with --confirm also a folder of images.")
    ] = None,
    name: Annotated[
        str | None,
        Argument(metavar="[CLASS]", autocompletion=completion.class_names, help="Its class, which may be new."),
    ] = None,
    confirm: Annotated[
        bool, Option("--confirm", help="Learn IMAGE as the class that is predicted for it, unless you corrected it.")
    ] = False,
    undo: Annotated[bool, Option("--undo", help="Undo the last correction, or that of IMAGE, instead.")] = False,
    log: Annotated[bool, Option("--log", help="List all corrections and change nothing.")] = False,
    *,
    loading: Loading,
    as_json: Json = False,
) -> None:
    """Correct a wrong prediction: learn the right class of one image at once, without training.

    With --confirm, learn images that were predicted correctly: beside corrections they keep probabilities true. Correct
    what is wrong in a folder, then confirm the folder.
    """
    if log + undo + confirm > 1 or (log and image is not None) or (log or undo or confirm) and name is not None:
        message = "--log takes a model alone; --undo a model, or a model and an image; --confirm a model and images"
        raise CommandLineError(message, code="conflicting-options")
    if log:
        _show_log(model, as_json)
    elif undo:
        _undo(model, image, as_json)
    elif image is None or (name is None and not confirm):
        message = "give an image and its class, such as: protosteer correct shop.protosteer new/7.jpg kettle"
        raise CommandLineError(message, code="missing-argument")
    else:
        from protosteer.model.transaction import transaction
        from protosteer.util.files import writing

        with writing(model, None), transaction(model, "confirm" if confirm else "correct") as change:
            learner = learner_of(change.read(), loading)
            outcome = _confirm(learner, image) if name is None else _correct(learner, image, name)
            change.put(learner.model)
        if name is None:
            _show_confirmed(outcome, as_json)
        else:
            ((label, probability, _),) = learner.predict(image).ranked(1)[0]  # no longer under the lock
            _show_outcome({**outcome, "answer": label, "probability": probability}, image, as_json)
        say(f"Written: {model}; to undo: protosteer correct {model} --undo")


def _correct(learner: Learner, image: Path, name: str) -> dict[str, Any]:
    """Correct one image; return the outcome for JSON."""
    from protosteer.workflows.model_summary import correction

    is_new = name not in learner.classes
    near = next((near for _, near in similar_names([name], learner.classes)), None)
    return {**correction(learner.correct(image, name)), "new_class": is_new, "similar_class": near}


def _confirm(learner: Learner, images: Path) -> dict[str, Any]:
    """Confirm the predictions for an image or a folder; return the outcome for JSON."""
    from protosteer.data.sources import image_paths
    from protosteer.workflows.model_summary import correction

    return {"confirmed": [correction(record) for record in learner.confirm(image_paths(images))]}


def _show_confirmed(outcome: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(outcome)
        return
    for row in outcome["confirmed"]:
        print(printable(f"{row['image']}: {row['class']}, confirmed"))


def _show_outcome(outcome: dict[str, Any], image: Path, as_json: bool) -> None:
    if as_json:
        print_json(outcome)
        return
    name, old_label, new_label = (outcome[key] for key in ("class", "taken_for", "answer"))
    words = f"{image}: predicted {old_label}"
    words += " already, one more image" if old_label == name else f", corrected to {name}"
    words += " (a new class)" if outcome["new_class"] else ""
    print(printable(f"{words}; now predicted {new_label} ({100 * outcome['probability']:.0f} %)"))
    if outcome["similar_class"]:
        say(
            f"warning: class '{name}' is new: did you mean '{outcome['similar_class']}'? Then undo this, and correct again"
        )
    if new_label != name:
        say("one image did not outweigh the others; correct more similar images, or learn more of the class")


def _undo(path: Path, image: Path | None, as_json: bool) -> None:
    from protosteer.data.image_files import image_bytes, image_exists
    from protosteer.model.records import correction_name
    from protosteer.model.transaction import transaction
    from protosteer.model.unlearning import undo
    from protosteer.workflows.model_summary import correction

    task = None
    if image is not None:
        if not image_exists(image):
            raise ProtosteerError(f"{image} is not an image file; check the path", code="no-such-file", path=image)
        task = correction_name(digest(image_bytes(image)))
    with writing(path, None), transaction(path, "correct --undo") as change:
        model = change.read()
        if task is not None and task not in model.memory.task_names:
            message = f"{image} has not been corrected in {path}; there is nothing to undo"
            raise ProtosteerError(message, code="not-corrected", path=image)
        record = undo(model.memory, task)
        change.put(model)
    if as_json:
        print_json({"taken_back": correction(record)})
    else:
        (name,) = record.class_names
        print(printable(f"undone: {record.metadata.file or 'an image'} as {name} ({record.metadata.learned})"))
    say(f"Written: {path}")


def _show_log(path: Path, as_json: bool) -> None:
    from protosteer.model import file as model_file
    from protosteer.report.tables import plain_table
    from protosteer.workflows.model_summary import correction

    corrections = [correction(record) for record in model_file.read(path).memory.corrections]
    if as_json:
        print_json({"corrections": corrections})
        return
    if not corrections:
        print(f"{path}: no corrections")
        return
    table = plain_table(None, "Date", "Image", "Predicted", "Actual")
    for row in corrections:
        table.add_row(*(row[key] or "-" for key in ("date", "image", "taken_for", "class")))
    show([table])
