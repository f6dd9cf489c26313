"""Steps that the commands on model files share."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from protosteer.cli.common import say
from protosteer.util.text import printable

if TYPE_CHECKING:
    from protosteer.backbones import Backbone
    from protosteer.learner import Learner
    from protosteer.model.file import Model

PANEL = "Your own images"


def read_model(path: Path) -> Model | None:
    from protosteer.errors import ModelFileError
    from protosteer.model import file as model_file

    if path.is_dir():
        raise ModelFileError(f"{path} is a folder; the model file comes first, then the folder of images")
    return model_file.read(path) if path.exists() else None


def open_learner(
    path: Path, name: str | None, weights: Path | None, device: str, threads: int | None
) -> Learner:
    """The model with its backbone, which it knows by name, fingerprint, and where the weights were."""
    return open_learners([path], name, weights, device, threads)[0]


def open_learners(
    paths: Sequence[Path], name: str | None, weights: Path | None, device: str, threads: int | None
) -> list[Learner]:
    """Several at once: models that were learned with the same backbone share one copy of it."""
    from protosteer.learner import Learner
    from protosteer.model import file as model_file

    models = [model_file.read(path) for path in paths]
    chosen = prepare(device, threads)
    loaded: dict[str, Backbone] = {}
    learners = []
    for model in models:
        about = model.backbone
        same = repr((about["fingerprint"], about["preprocessing"]))
        if same not in loaded:
            loaded[same] = backbone_of(model, name, weights, chosen)
        learners.append(Learner.of_model(model, loaded[same]))
    return learners


def say_notes(learner: Learner) -> None:
    """What whoever predicts with a model may not know about it, on standard error."""
    from protosteer.workflows.model_summary import notes

    for note in notes(learner.memory, learner.fusion):
        say(printable(f"note: {note}"))


def backbone_of(model: Model, name: str | None, weights: Path | None, device: str) -> Backbone:
    from protosteer.errors import ModelFileError, WeightsError

    known = model.backbone["name"]
    try:
        return model.load_backbone(name, weights, device)
    except WeightsError as error:
        if name or weights:
            raise ModelFileError(
                f"{model.path} was learned with backbone '{known}', and {weights or name} cannot be it "
                f"({error})"
            ) from error
        raise ModelFileError(
            f"{model.path} needs backbone '{known}', which cannot be loaded ({error}); say where its weights "
            "are with --weights FILE"
        ) from error


def prepare(device: str, threads: int | None) -> str:
    """Set the threads; returns the device, checked."""
    import torch

    from protosteer.runtime.device import choose_device

    if threads is not None:
        torch.set_num_threads(threads)
    return str(choose_device(device))


def clear_up(path: Path, checkpoints: bool = False) -> list[Path]:
    """Remove what killed processes left beside a file; it may hold what has been forgotten since.

    checkpoints: also those with which learning could go on, if it were not to. Gives what had to stay.
    """
    from protosteer.util.files import STALE, real, remove_leftovers

    place = real(path)
    return remove_leftovers(place.parent, place.name, older_than=0.0 if checkpoints else STALE)


def check_place(path: Path, option: str) -> None:
    """Where nothing can be written is better known now than when everything is learned. Clears up there, too."""
    check_writable(path, option)
    clear_up(path)


def check_writable(path: Path, option: str) -> None:
    from protosteer.util.files import real, writing

    folder = real(path).parent
    with writing(path, option):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
