"""Several methods on one stream, one after the other: each is an experiment with a run folder of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from protosteer.errors import ProtosteerError, SettingsError
from protosteer.evaluation.experiment import (
    Experiment,
    MakeReporter,
    check_choice,
    open_context,
    run_experiment,
)
from protosteer.evaluation.run_folder import RunFolder
from protosteer.methods import METHODS, find_method
from protosteer.runtime.checkpoint import SECONDS
from protosteer.runtime.executor import Executor
from protosteer.settings import unknown_setting
from protosteer.streams import StreamOptions
from protosteer.util.text import counted, listed

ALL = "all"


@dataclass
class Outcome:
    """By method: figures as `run --json` prints them, or the error that it ended with."""

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, ProtosteerError] = field(default_factory=dict)


def names_several(method: Any) -> bool:
    """Whether what stands for a method is `all`, or several names with commas between them."""
    return isinstance(method, str) and (method == ALL or "," in method)


def experiments_of(values: Mapping[str, Any]) -> list[Experiment]:
    """One for each method that `values["method"]` names, from a table as `Experiment.from_values` takes it.

    A setting or a preset goes to those methods that have it; one that none has is an error. Of blurry streams,
    `all` are those that can learn them. `out` is a folder for their run folders.
    """
    able = [
        name
        for name, method in METHODS.items()
        if method.supports_repeated_classes or not values.get("blurry")
    ]
    named = values["method"].split(",") if values["method"] != ALL else able
    names = list(dict.fromkeys(find_method(name.strip()).name for name in named))
    run = {*Experiment.hints(), *get_type_hints(StreamOptions), "seed"}  # seed: to be told that it is `seeds`
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
            raise SettingsError(f"method {name}: {error}") from error
        experiments.append(made)
    return experiments


def _settings(method: str) -> list[str]:
    return [field.name for field in dataclasses.fields(find_method(method).settings_class)]


def _check_known(settings: Mapping[str, Any], methods: Sequence[str], run: set[str]) -> None:
    known = {setting for method in methods for setting in _settings(method)}
    for name in settings:
        if name not in known:
            raise SettingsError(f"methods {listed(methods, 3)}: {unknown_setting(name, sorted(known | run))}")


def _having_preset(preset: Any, methods: Sequence[str]) -> list[str]:
    having = []
    for method in methods:
        try:
            find_method(method).preset(preset)
        except SettingsError:
            continue
        having.append(method)
    if not having:
        raise SettingsError(f"methods {listed(methods, 3)} have no preset {preset!r}; leave it out")
    return having


def run_several(
    experiments: Sequence[Experiment],
    resume: bool = False,
    overwrite: bool = False,
    command: Sequence[str] = (),
    make_reporter: MakeReporter | None = None,
    on_message: Callable[[str], None] = lambda line: None,
    bookmark_seconds: float = SECONDS,
    engine: Executor | None = None,
) -> Outcome:
    """Run experiments that differ in their method alone. One that fails does not stop the others.

    All folders are looked at before the first is written to, so that none is refused hours later.
    """
    check_choice(resume, overwrite)
    context = open_context(experiments[0], on_message)
    for experiment in experiments:
        RunFolder(experiment.folder).check(context.configuration(experiment), resume, overwrite)
    outcome = Outcome()
    for i, experiment in enumerate(experiments, 1):
        name = experiment.method
        on_message(f"{name}, {i} of {counted(len(experiments), 'method')}")
        try:
            outcome.figures[name] = run_experiment(
                experiment,
                resume,
                overwrite,
                command,
                make_reporter,
                on_message,
                bookmark_seconds,
                context,
                engine,
            )
        except ProtosteerError as error:
            outcome.failed[name] = error
            on_message(f"{name} has failed: {error}")
    return outcome
