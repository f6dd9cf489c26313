"""Several methods on one stream, one after the other: each is an experiment with its own run folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from protosteer.backbones.precision import AUTO_PRECISION, FP32
from protosteer.errors import ProtosteerError, SettingsError
from protosteer.evaluation.experiment import Experiment, check_choice, open_context, run_experiment
from protosteer.evaluation.run_folder import RunFolder
from protosteer.methods import METHODS, find_method
from protosteer.settings import unknown_setting
from protosteer.streams import StreamOptions
from protosteer.util.text import counted, listed

ALL = "all"


@dataclass
class Outcome:
    """The results of several experiments, by method.

    Attributes:
        figures: Metrics as `run --json` prints them.
        failed: The errors of methods that failed.
    """

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, ProtosteerError] = field(default_factory=dict)


def names_several(method: Any) -> bool:
    """Return whether a method option is `all`, or several names separated by commas."""
    return isinstance(method, str) and (method == ALL or "," in method)


def experiments_of(values: Mapping[str, Any]) -> list[Experiment]:
    """Create one experiment for each method that `values["method"]` names; see `Experiment.from_values`.

    A setting or a preset goes to the methods that have it; it is an error if none has. For blurry streams, `all` means
    the methods that can learn them. `out` is a folder for their run folders.
    """
    able = [name for name, method in METHODS.items() if method.supports_repeated_classes or not values.get("blurry")]
    named = values["method"].split(",") if values["method"] != ALL else able
    names = list(dict.fromkeys(find_method(name.strip()).name for name in named))
    run = {*Experiment.hints(), *get_type_hints(StreamOptions), "seed"}  # seed: its error says that it is `seeds`
    shared = {name: value for name, value in values.items() if name in run and name != "preset"}
    settings = {name: value for name, value in values.items() if name not in run}
    _check_known(settings, names, run)
    with_preset = _having_preset(values.get("preset"), names)
    experiments = []
    for name in names:
        preset = values.get("preset") if name in with_preset else None
        made = Experiment.from_values({**shared, "method": name, "preset": preset})
        own = {key: value for key, value in settings.items() if key in _settings(name)}
        out = None if made.out is None else made.out / name
        made = dataclasses.replace(made, settings=own, out=out)
        try:
            made.settings_for(0)
        except SettingsError as error:
            raise SettingsError(f"method {name}: {error}", code=error.code, **error.details) from error
        experiments.append(made)
    if experiments[0].precision == AUTO_PRECISION and any(made.reproduces_paper for made in experiments):
        return [dataclasses.replace(made, precision=FP32) for made in experiments]  # what is compared computes alike
    return experiments


def _settings(method: str) -> list[str]:
    return [field.name for field in dataclasses.fields(find_method(method).settings_class)]


def _check_known(settings: Mapping[str, Any], methods: Sequence[str], run: set[str]) -> None:
    known = {setting for method in methods for setting in _settings(method)}
    for name in settings:
        if name not in known:
            message = f"methods {listed(methods, 3)}: {unknown_setting(name, sorted(known | run))}"
            raise SettingsError(message, code="unknown-setting", name=name)


def _having_preset(preset: Any, methods: Sequence[str]) -> list[str]:
    having = []
    for method in methods:
        try:
            find_method(method).preset(preset)
        except SettingsError:
            continue
        having.append(method)
    if not having:
        message = f"methods {listed(methods, 3)} have no preset {preset!r}; leave it out"
        raise SettingsError(message, code="unknown-preset", name=preset)
    return having


def run_several(
    experiments: Sequence[Experiment],
    resume: bool = False,
    overwrite: bool = False,
    on_message: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> Outcome:
    """Run experiments that differ only in their method. One that fails does not stop the others.

    All folders are checked before the first is written to, so that none is rejected hours later. `options` are further
    arguments of `run_experiment`.
    """
    check_choice(resume, overwrite)
    context = open_context(experiments[0], on_message)
    for experiment in experiments:
        RunFolder(experiment.folder).check(context.configuration(experiment), resume, overwrite)
    outcome = Outcome()
    options |= {"resume": resume, "overwrite": overwrite, "on_message": on_message, "context": context}
    for i, experiment in enumerate(experiments, 1):
        name = experiment.method
        on_message(f"{name}, {i} of {counted(len(experiments), 'method')}")
        try:
            outcome.figures[name] = run_experiment(experiment, **options)
        except ProtosteerError as error:
            outcome.failed[name] = error
            on_message(f"{name} failed: {error}")
    return outcome
