"""Several experiments in one command: methods, values of settings, class orders; each has its own run folder."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from protosteer.backbones.precision import AUTO_PRECISION, FP32
from protosteer.errors import ProtosteerError, SettingsError
from protosteer.evaluation.experiment import (
    Experiment,
    check_choice,
    check_local_logger,
    published_settings,
    run_experiment,
)
from protosteer.evaluation.experiment_context import open_context
from protosteer.evaluation.metrics import over_seeds
from protosteer.evaluation.run_folder import RunFolder
from protosteer.evaluation.seed_runs import opened, run_remotely
from protosteer.methods import METHODS, find_method, load_plugins
from protosteer.runtime.checkpoint import SECONDS
from protosteer.runtime.executor import Executor
from protosteer.settings import parse_value, unknown_setting
from protosteer.streams import StreamOptions, find_benchmark
from protosteer.streams.options import SEED
from protosteer.util.text import listed

ALL = "all"

# By label of a row: its experiments, one for each class order.
Plan = dict[str, list[Experiment]]


@dataclass
class Outcome:
    """The results of several experiments, by label of the row.

    Attributes:
        figures: Metrics as `run --json` prints them; over all class orders of the row.
        failed: The errors of rows that failed.
    """

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, ProtosteerError] = field(default_factory=dict)


def names_several(values: Mapping[str, Any]) -> bool:
    """Return whether options name several methods, several class orders, or a sweep."""
    method = values.get("method")
    several = isinstance(method, str) and (method == ALL or "," in method)
    return several or bool(values.get("class_orders") or values.get("sweep"))


def plan_experiments(values: Mapping[str, Any]) -> Plan:
    """Plan an experiment for each method, point of the sweep and class order that options name.

    A setting, a preset or published settings go to the methods that have them; it is an error if none has. For blurry
    streams, `all` means the methods that can learn them. Run folders are `out`/METHOD/SETTING-VALUE/order-N, of which
    the method is omitted if there is one.

    Args:
        values: Fields, stream options and settings as `Experiment.from_values` takes them; and `class_orders`, such as
            "1993,1,2", and `sweep`, such as ["temperature=0.2,0.6"] or {"temperature": (0.2, 0.6)}.

    Returns:
        The experiments of every row of the comparison.
    """
    values = dict(values)
    orders, axes = parse_orders(values.pop("class_orders", None)), parse_sweep(values.pop("sweep", ()))
    if orders and "class_order" in values:
        raise SettingsError("class_order and class_orders are given; choose one", code="conflicting-options")
    specs = {find_method(word).name: word for word in _methods(values)}  # a file's method is found by its file
    names = list(specs)
    run = {*Experiment.hints(), *get_type_hints(StreamOptions), "seed"}  # seed: its error says that it is `seeds`
    _check_axes(axes, run, values)
    _check_known([name for name in {**values, **axes} if name not in run], names, run)
    having = {
        "preset": _having(values.get("preset"), names, lambda name: find_method(name).preset(values["preset"])),
        "published": _having(values.get("published"), names, lambda name: published_settings(name, values["stream"])),
    }
    plan: Plan = {}
    for name in names:
        known = run | set(_settings(name))
        own = {key: value for key, value in values.items() if key in known and name in having.get(key, names)}
        swept = {key: choices for key, choices in axes.items() if key in known}
        for point in itertools.product(*swept.values()):
            chosen = dict(zip(swept, point, strict=True))
            parts = [name] if len(names) > 1 else []
            parts += [f"{key}-{value}" for key, value in chosen.items()]
            label = ", ".join([name, *(f"{key} {value}" for key, value in chosen.items())])
            one = functools.partial(_experiment, {**own, **chosen, "method": specs[name]}, parts)
            plan[label] = [one(order) for order in orders] or [one()]
    return _in_one_precision(plan)


def _in_one_precision(plan: Plan) -> Plan:
    """Return the plan in fp32 if one of its experiments needs that: what is compared computes alike."""
    experiments = [experiment for row in plan.values() for experiment in row]
    if experiments[0].precision != AUTO_PRECISION or not any(made.reproduces_paper for made in experiments):
        return plan
    return {label: [dataclasses.replace(made, precision=FP32) for made in row] for label, row in plan.items()}


def _methods(values: Mapping[str, Any]) -> list[str]:
    named: str = values.get("method", Experiment.method)
    if named != ALL:
        return [word.strip() for word in named.split(",")]
    load_plugins()
    repeats = values.get("blurry") or ("stream" in values and find_benchmark(values["stream"]).domains)
    return [name for name, method in METHODS.items() if method.supports_repeated_classes or not repeats]


def _experiment(values: Mapping[str, Any], parts: Sequence[str], order: str | None = None) -> Experiment:
    if order is not None:
        parts, values = [*parts, f"order-{order.removeprefix(SEED)}"], {**values, "class_order": order}
    try:
        made = Experiment.from_values(values)
    except SettingsError as error:
        message = str(error) if str(error).startswith("method ") else f"method {values['method']}: {error}"
        raise SettingsError(message, code=error.code, **error.details) from error
    # The default folder names the method already.
    name = find_method(made.method).name
    own = [re.sub(r"[^\w.+-]+", "-", part) for part in parts if made.out is not None or part != name]
    return dataclasses.replace(made, out=Path(made.folder, *own)) if own else made


def parse_orders(given: Any) -> list[str]:
    """Parse class orders such as "1993,1,2", seeds of permutations, or "natural,seed:1"; None: none."""
    words = given.split(",") if isinstance(given, str) else given or []
    listed = words if isinstance(words, (list, tuple)) else [words]
    names = [str(word).strip() for word in listed]
    orders = [f"{SEED}{name}" if name.isdecimal() else name for name in names]
    if not all(orders) or len(set(orders)) < len(orders):
        message = f"class_orders = {given!r}: give different orders, such as 1993,1,2 or natural,1"
        raise SettingsError(message, code="bad-class-orders")
    return orders


def parse_sweep(given: Sequence[str] | Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """Parse words such as "temperature=0.2,0.6" into the values of each setting; a table of values is taken as it is."""
    if isinstance(given, Mapping):
        return {name: tuple(values) for name, values in given.items()}
    axes: dict[str, tuple[Any, ...]] = {}
    for word in [given] if isinstance(given, str) else given:
        name, equals, text = word.partition("=")
        values = tuple(parse_value(value) for value in text.split(","))
        if not equals or "" in values or len(set(values)) < len(values) or name in axes:
            message = f"sweep {word!r}: write NAME=VALUE,VALUE once for each setting, such as temperature=0.2,0.6"
            raise SettingsError(message, code="bad-sweep", word=word)
        axes[name.strip()] = values
    return axes


def _check_axes(axes: Mapping[str, Any], run: set[str], values: Mapping[str, Any]) -> None:
    for name in axes:
        if name in run and name not in get_type_hints(StreamOptions):
            message = f"sweep: {name} is neither a setting of the method nor an option of the stream; run it by itself"
            raise SettingsError(message, code="bad-sweep", word=name)
        if values.get(name) is not None:
            message = f"{name} = {values[name]} is given, and a sweep over {name}; choose one"
            raise SettingsError(message, code="conflicting-options", name=name)


def _settings(method: str) -> list[str]:
    return [field.name for field in dataclasses.fields(find_method(method).settings_class)]


def _check_known(settings: Sequence[str], methods: Sequence[str], run: set[str]) -> None:
    known = {setting for method in methods for setting in _settings(method)}
    for name in settings:
        if name not in known:
            named = f"method {methods[0]}" if len(methods) == 1 else f"methods {listed(methods, 3)}"
            message = f"{named}: {unknown_setting(name, sorted(known | run))}"
            raise SettingsError(message, code="unknown-setting", name=name)


def _having(wanted: Any, methods: Sequence[str], find: Callable[[str], Any]) -> list[str]:
    """Return the methods that have what is wanted; the error of the last one if none has."""
    having, error = [], None
    for method in methods if wanted else ():
        try:
            find(method)
        except SettingsError as missing:
            error = missing
        else:
            having.append(method)
    if error and not having:
        raise error
    return having


def run_several(
    plan: Plan,
    resume: bool = False,
    overwrite: bool = False,
    on_message: Callable[[str], None] = lambda line: None,
    engine: Executor | None = None,
    **options: Any,
) -> Outcome:
    """Run planned experiments. One that fails does not stop the others.

    All folders are checked before the first is written to, so that none is rejected hours later. With a remote engine,
    the seeds of all experiments run in parallel.

    Args:
        plan: The experiments; see `plan_experiments`.
        resume: Continue the runs in the folders, and reuse finished ones.
        overwrite: Remove the runs in the folders.
        on_message: Called with lines for the user.
        engine: Runs the seeds; None: this process, one after the other.
        **options: Further arguments of `run_experiment`.

    Returns:
        The metrics of every row.
    """
    check_choice(resume, overwrite)
    experiments = [experiment for row in plan.values() for experiment in row]
    context = open_context(experiments[0], on_message)
    for experiment in experiments:
        RunFolder(experiment.folder).check(context.configuration(experiment), resume, overwrite)
    found: list[dict[str, Any] | ProtosteerError]
    if engine and engine.is_remote:
        check_local_logger(options.get("logger"))
        opening = functools.partial(opened, context, resume, overwrite, options.get("command", ()), on_message)
        seconds = options.get("checkpoint_seconds", SECONDS)
        resolved = [context.with_precision(experiment) for experiment in experiments]
        found = run_remotely(engine, resolved, opening, options.get("make_reporter"), seconds)
    else:
        options |= {"resume": resume, "overwrite": overwrite, "on_message": on_message, "context": context}
        found = []
        names = [f"{label}{_order_name(one, row)}" for label, row in plan.items() for one in row]
        for i, (name, experiment) in enumerate(zip(names, experiments, strict=True), 1):
            on_message(f"{name}: run {i} of {len(experiments)}")
            try:
                found.append(run_experiment(experiment, **options))
            except ProtosteerError as error:
                found.append(error)
                on_message(f"{name} failed: {error}")
    results, outcome = iter(found), Outcome()
    for label, row in plan.items():
        parts = [next(results) for _ in row]
        errors = [part for part in parts if isinstance(part, ProtosteerError)]
        if errors:
            outcome.failed[label] = errors[0]
        else:
            outcome.figures[label] = _over_orders(row, parts)
    return outcome


def _order_name(experiment: Experiment, row: Sequence[Experiment]) -> str:
    return f", class order {experiment.options.class_order.removeprefix(SEED)}" if len(row) > 1 else ""


def _over_orders(row: Sequence[Experiment], parts: Sequence[Any]) -> dict[str, Any]:
    """Join the metrics of a row's class orders, as `run --json` prints those of one."""
    if len(parts) == 1:
        return dict(parts[0])
    seeds = [
        {"class_order": experiment.options.class_order, **seed}
        for experiment, part in zip(row, parts, strict=True)
        for seed in part["seeds"]
    ]
    mean, std = over_seeds(seeds)
    return {"mean": mean, "std": std, "seeds": seeds}
