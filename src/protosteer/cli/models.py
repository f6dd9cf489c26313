"""Options and steps that the commands on model files share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from protosteer.backbones import Backbone
    from protosteer.learner import Learner
    from protosteer.modelfile import Model

PANEL = "Your own images"
# Seconds after which what a killed learning left behind is of no use: one that runs writes much more often.
STALE = 3600.0

ModelFile = Annotated[Path, typer.Argument(metavar="MODEL", help="Model file.", show_default=False)]
BackboneName = Annotated[
    str | None, typer.Option("--backbone", help="Short name, or a name of timm's (default: the model's own).")
]
Weights = Annotated[
    Path | None,
    typer.Option("--weights", help="File with the backbone's weights, if they are not where they were."),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads of the processor.")]


def open_learner(
    path: Path, name: str | None, weights: Path | None, device: str, threads: int | None
) -> Learner:
    """The model with its backbone, which it knows by name, fingerprint, and where the weights were."""
    from protosteer import modelfile
    from protosteer.learner import Learner

    model = modelfile.read(path)
    return Learner.of_model(model, backbone_of(model, name, weights, device, threads))


def backbone_of(
    model: Model, name: str | None, weights: Path | None, device: str, threads: int | None
) -> Backbone:
    from protosteer.errors import ModelFileError, WeightsError

    place = prepare(device, threads)
    try:
        return model.backbone_for(model.load_backbone(name, weights, place))
    except WeightsError as error:
        if name or weights:
            raise ModelFileError(
                f"{model.path} was learned with backbone '{model.backbone['name']}', and {weights or name} "
                f"cannot be it ({error})"
            ) from error
        raise ModelFileError(
            f"{model.path} needs backbone '{model.backbone['name']}', which cannot be loaded ({error}); say "
            "where its weights are with --weights FILE"
        ) from error


def prepare(device: str, threads: int | None) -> str:
    """Set the threads; returns the device, checked."""
    import torch

    from protosteer.running.devices import choose_device

    if threads is not None:
        torch.set_num_threads(threads)
    return str(choose_device(device))


def clear_up(path: Path) -> None:
    """Remove what killed processes left beside a model file; it may hold what has been forgotten since."""
    from protosteer.util.files import remove_leftovers

    real = path.resolve()
    remove_leftovers(real.parent, real.name, older_than=STALE)
