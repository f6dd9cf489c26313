"""Which backbone a new model begins with: the one that was named, or the one that suits its images best."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from protosteer.cli.common import make_console, say, show
from protosteer.cli.parsing import in_flags
from protosteer.util.text import counted, one_line, printable

if TYPE_CHECKING:
    from protosteer.backbones import Backbone
    from protosteer.data.class_folders import Files
    from protosteer.workflows.backbone_selection import Choice


class Wanted:
    """What a user said of the backbone: of a model that is there, to find it; of a new one, to choose it."""

    def __init__(self, name: str | None, weights: Path | None, as_json: bool = False):
        from protosteer.backbones import AUTO

        if name == AUTO and weights is not None:
            raise typer.BadParameter(f"--backbone {AUTO} looks for weights by itself; leave --weights out")
        self.name = None if name == AUTO else name
        self.weights = weights
        self.as_json = as_json
        self.choice: Choice | None = None  # once it is made

    def load(self, device: str, files: Callable[[], Files]) -> Backbone:
        """Of a new model. files: the images that it should suit, asked for only if it was not named."""
        from protosteer.backbones import Backbone

        if self.name is not None:
            return Backbone.load(self.name, weights=self.weights, device=device)
        if self.weights is not None:  # what it is called may tell what is not in the file
            return Backbone.load(self.weights.stem, weights=self.weights, device=device)
        self.choice = choose(files(), device, self.as_json)
        return self.choice.load(device)

    def add_to(self, figures: list[dict[str, Any]]) -> None:
        """To those of the folder that it was chosen by, which is the first."""
        from protosteer.report.backbone_selection import as_json

        if self.choice:
            figures[0]["backbone"] = as_json(self.choice)


def not_held_out(
    files: Callable[[], Files], holdout: float, preset: str | None, changes: dict[str, Any]
) -> Files:
    """Images that a new model will learn: those that check it must not choose its backbone.

    What is wrong with its settings is told now, before anything is tried.
    """
    from protosteer.settings import Settings
    from protosteer.workflows.learn_folder import split

    return split(files(), holdout, Settings.preset(preset or "best", **changes).seed)[0]


def choose(files: Files, device: str, as_json: bool = False) -> Choice:
    """Try what there is; the table goes to standard output unless figures do, all else is said."""
    from protosteer.report.backbone_selection import choice_table
    from protosteer.report.progress import LearnProgress
    from protosteer.workflows.backbone_selection import choose_backbone

    def tell(line: str) -> None:
        say(in_flags(one_line(line)))

    with LearnProgress(make_console(stderr=True)) as progress:
        data = files.paths, files.labels
        choice = choose_backbone(data, device, fetch=True, say=tell, on_stage=progress.on_stage)
    for name, why in choice.left_out.items():
        tell(printable(f"backbone {name} was not tried: {why}"))
    if choice.trials and not as_json:
        show([choice_table(choice)])
    tell(_decision(choice))
    return choice


def _decision(choice: Choice) -> str:
    info = choice.info
    if choice.trials:
        images = counted(choice.trials[0].images, "image")
        return f"backbone {info.alias}: {choice.why}, by {images} that were left out in turn"
    if not info.shipped:
        return f"backbone {info.alias}: {choice.why}"
    return f"backbone {info.alias}, {choice.why}: {info.expect}; {_better()}"


def _better() -> str:
    """Which file to put where, for whoever has no network."""
    from protosteer.backbones.auto_candidates import worth_fetching
    from protosteer.backbones.hub import place_for

    places = [f"put timm's file at {place_for(info)}, or " for info in worth_fetching()[:1]]
    return f"for more {''.join(places)}name another with --backbone"
