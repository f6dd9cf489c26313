"""Read models, load or choose their backbones, select an executor: steps that commands share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protosteer.cli.common import CommandLineError, progress, say, show
from protosteer.cli.options import Loading, Workers, in_flags
from protosteer.errors import LearnerError, ModelFileError, ProtosteerError, WeightsError
from protosteer.util.files import STALE, real, remove_leftovers, writing
from protosteer.util.text import counted, one_line, printable, suggestion

if TYPE_CHECKING:
    from protosteer.backbones import Backbone
    from protosteer.data.class_folders import Files
    from protosteer.learner import Learner
    from protosteer.model.file import Model
    from protosteer.runtime.executor import Executor
    from protosteer.workflows.backbone_selection import Choice

PANEL = "Your own images"


def read_model(path: Path) -> Model | None:
    """Return the model in a file; None if there is no file."""
    from protosteer.model import file as model_file

    if path.is_dir():
        message = f"{path} is a folder; the model file comes first, then the folder of images"
        raise ModelFileError(message, code="model-is-folder", path=path)
    return model_file.read(path) if path.exists() else None


def open_learner(path: Path, loading: Loading) -> Learner:
    """Return the learner of a model file."""
    return open_learners([path], loading)[0]


def open_learners(paths: Sequence[Path], loading: Loading) -> list[Learner]:
    """Return the learners of model files; models of the same backbone share one copy of it."""
    from protosteer.learner import Learner
    from protosteer.model import file as model_file

    prepare(loading)  # a wrong device is reported before any file is read
    learners_by_backbone: dict[str, Learner] = {}
    learners = []
    for model in [model_file.read(path) for path in paths]:
        about = model.backbone
        backbone_key = repr((about["fingerprint"], about["preprocessing"]))
        if backbone_key in learners_by_backbone:
            learners.append(Learner.of_model(model, learners_by_backbone[backbone_key].backbone))
        else:
            learners.append(learners_by_backbone.setdefault(backbone_key, learner_of(model, loading)))
    return learners


def learner_of(model: Model, loading: Loading) -> Learner:
    """Return the learner of a model that was read; its backbone is loaded."""
    from protosteer.learner import Learner

    return Learner.of_model(model, backbone_of(model, loading))


def say_notes(learner: Learner) -> None:
    """Print notes about a model on standard error: possible improvements, and how to make them."""
    from protosteer.workflows.model_summary import notes

    for note in notes(learner.memory, learner.reader):
        say(printable(f"note: {note}"))


def backbone_of(model: Model, loading: Loading) -> Backbone:
    """Load the backbone of a model: the one that options name, or else the one in its header."""
    model_name, user_choice = model.backbone["name"], loading.weights or loading.backbone
    device = prepare(loading)
    try:
        return model.load_backbone(loading.backbone, loading.weights, device, loading.precision)
    except WeightsError as error:
        if loading.weights or loading.backbone not in (None, model_name):
            message = f"{model.path} uses backbone '{model_name}' and cannot be opened with '{user_choice}' ({error})"
            raise ModelFileError(message, code="other-backbone", path=model.path, name=model_name) from error
        advice = "" if error.code == "replaced-weights" else "; say where its weights are with --weights FILE"
        message = f"{model.path} needs backbone '{model_name}', which cannot be loaded ({error}){advice}"
        raise ModelFileError(message, code="backbone-not-found", path=model.path, name=model_name) from error


def prepare(loading: Loading) -> str:
    """Set the number of threads; check the device and return it."""
    import torch

    from protosteer.runtime.device import choose_device

    if loading.threads is not None:
        torch.set_num_threads(loading.threads)
    return str(choose_device(loading.device))


def make_executor(workers: Workers, device: str) -> Executor:
    """Return the executor that `--engine` names."""
    from protosteer.runtime.executor import LocalExecutor

    name = workers.engine
    if name == "local":
        if workers.address is not None:
            raise CommandLineError("--address is that of a Ray cluster; add --engine ray", code="address-without-ray")
        return LocalExecutor()
    if name != "ray":
        raise CommandLineError(f"engine {name!r} is not known; choose local or ray", code="unknown-engine", name=name)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        message = "--engine ray and torchrun exclude each other; start the command without torchrun"
        raise CommandLineError(message, code="ray-under-torchrun")
    from protosteer.runtime.ray_executor import RayExecutor

    return RayExecutor(workers.address, device)


def check_place(path: Path, option: str) -> None:
    """Fail now, not after learning, if a file cannot be written; remove leftovers of killed processes beside it."""
    check_writable(path, option)
    place = real(path)
    remove_leftovers(place.parent, place.name, older_than=STALE)


def check_writable(path: Path, option: str) -> None:
    """Fail if a file cannot be written."""
    folder = real(path).parent
    with writing(path, option):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def check_classes(names: Sequence[str], known_names: Sequence[str]) -> None:
    """Reject a class that a model does not have, and suggest the one that was meant."""
    for name in names:
        if name not in known_names:
            message = f"no class named '{name}'; {suggestion(name, known_names)}"
            raise LearnerError(message, code="unknown-class", name=name, known=list(known_names))


def refuse_existing(out: Path, option: str = "--out") -> None:
    """Raise an error if a file that an option names is there already."""
    if out.exists():
        raise ProtosteerError(f"{out} exists already; choose another file with {option}", code="file-exists", path=out)


def write_new(path: Path, model: Model, command: str, option: str | None = None) -> None:
    """Write a model to a file that must not exist yet."""
    from protosteer.model.transaction import transaction

    with writing(path, option), transaction(path, command) as change:
        refuse_existing(path)  # another process may have written it
        change.put(model)


class BackboneChoice:
    """Options about the backbone: where an existing model finds its own, or which one a new model gets."""

    def __init__(self, loading: Loading, as_json: bool = False):
        from protosteer.backbones import AUTO

        if loading.backbone == AUTO and loading.weights is not None:
            message = f"--backbone {AUTO} finds weights by itself; leave --weights out"
            raise CommandLineError(message, code="conflicting-options")
        self.loading = replace(loading, backbone=None) if loading.backbone == AUTO else loading
        self.as_json = as_json
        self.choice: Choice | None = None  # None until it is made

    @property
    def is_named(self) -> bool:
        """Return True if there is nothing to choose."""
        return self.loading.backbone is not None or self.loading.weights is not None

    def load(self, files: Callable[[], Files]) -> Backbone:
        """Load the backbone of a new model; one that was not named is chosen to suit `files()`."""
        from protosteer.backbones import Backbone

        device, precision = prepare(self.loading), self.loading.precision
        name, weights = self.loading.backbone, self.loading.weights
        if name is None and weights is not None:
            name = weights.stem  # the file name may hold what the header lacks
        if name is not None:
            return Backbone.load(name, weights=weights, device=device, precision=precision)
        self.choice = choose_backbone(files(), self.loading, self.as_json)
        return self.choice.load(device, precision)

    def add_to(self, figures: list[dict[str, Any]]) -> None:
        """Add the choice to the results of the first folder, whose images it was made with."""
        from protosteer.report.backbone_selection import as_json

        if self.choice:
            figures[0]["backbone"] = as_json(self.choice)


@dataclass
class LearnerFactory:
    """Makes the learner of a model, or a new one; the backbone is loaded once.

    Settings in `changes` win over a preset's.
    """

    choice: BackboneChoice
    adapted: Path | None
    preset: str | None
    changes: dict[str, Any]
    holdout: float
    may_skip: bool  # training, where hardly an error is left
    loaded: Backbone | None = None

    def with_backbone(self, name: str) -> LearnerFactory:
        """Return a factory whose new models get the backbone of that name."""
        return replace(self, choice=BackboneChoice(replace(self.choice.loading, backbone=name)), loaded=None)

    def make(self, model: Model | None, files: Callable[[], Files]) -> Learner:
        """Return a learner. A new backbone is chosen to suit the files that are learned first."""
        from protosteer.learner import Learner
        from protosteer.workflows import shared_prompt

        prompt = shared_prompt.read(self.adapted) if self.adapted else None
        if model:
            learner = Learner.of_model(model, self.loaded or backbone_of(model, self.choice.loading))
        elif prompt:
            backbone = backbone_of(prompt.model, self.choice.loading)
            learner = Learner(backbone, shared_prompt=prompt.prompt_for(backbone))
        else:
            learner = Learner(self.choice.load(lambda: self._select_training(files())))
        settings = learner.settings.with_preset(self.preset) if self.preset else learner.settings
        learner.settings = settings.replace(**self.changes)
        if prompt:
            prompt.check_used(learner)
        self.loaded = learner.backbone
        return learner

    def _select_training(self, files: Files) -> Files:
        """Return the files that a new model will learn: held-out ones must not choose its backbone."""
        from protosteer.settings import DEFAULT_PRESET, Settings
        from protosteer.workflows.learn_folder import split_files

        settings = Settings.preset(self.preset or DEFAULT_PRESET, **self.changes)  # complains before anything is tried
        return split_files(files, self.holdout, settings.seed)[0]


def choose_backbone(files: Files, loading: Loading, as_json: bool = False) -> Choice:
    """Choose a backbone by trying those available on labelled files; print the accuracy of each."""
    from protosteer.report.backbone_selection import choice_table
    from protosteer.workflows import backbone_selection

    def tell(line: str) -> None:
        say(in_flags(one_line(line)))

    data, device = (files.paths, files.labels), prepare(loading)
    with progress() as on_stage:
        choice = backbone_selection.choose_backbone(
            data, device, True, say=tell, on_stage=on_stage, precision=loading.precision
        )
    for name, reason in choice.left_out.items():
        tell(printable(f"backbone {name} was not tried: {reason}"))
    if choice.trials and not as_json:
        show([choice_table(choice)])
    tell(_describe_choice(choice))
    return choice


def _describe_choice(choice: Choice) -> str:
    info = choice.info
    if choice.trials:
        images = counted(choice.trials[0].images, "image")
        return f"backbone {info.alias}: {choice.why}, by leave-one-out on {images}"
    if not info.shipped:
        return f"backbone {info.alias}: {choice.why}"
    return f"backbone {info.alias}, {choice.why}; {_recommend_download()}"


def _recommend_download() -> str:
    """Recommend the first download, and say where to put its file if there is no network."""
    from protosteer.backbones.auto_candidates import worth_fetching
    from protosteer.backbones.hub import place_for

    if not (candidates := worth_fetching()):
        return "for higher accuracy name another with --backbone"
    info = candidates[0]
    return (
        f"for higher accuracy use --backbone {info.alias}, a download of {4 * info.parameters / 1e6:.0f} MB; without a "
        f"network, put timm's file at {place_for(info)}"
    )
