"""Evaluate finished runs again under other settings: learned states are read, and nothing is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from protosteer.errors import RunError
from protosteer.evaluation.comparison import row_labels, run_folders, without_order
from protosteer.evaluation.experiment import Experiment
from protosteer.evaluation.run_folder import MANIFEST, read_run
from protosteer.evaluation.sweep import Plan, parse_sweep, plan_experiments
from protosteer.methods import ENTRY_POINTS, METHODS, find_method
from protosteer.streams import BENCHMARKS, StreamOptions, folder
from protosteer.streams import ENTRY_POINTS as STREAMS
from protosteer.streams.options import NATURAL, SEED
from protosteer.util.plugins import entry_point_names, is_file_spec


def plan_reevaluation(run: Path, values: Mapping[str, Any]) -> Plan:
    """Plan the evaluation of a finished run, or of every run in a folder, such as those of several class orders.

    A setting that acts in training has no effect; the manifest keeps the settings that were learned with. Of several
    runs, those whose method has a changed setting take part, and no evaluations of other runs.

    Args:
        run: The folder.
        values: Changed settings, a `sweep` over settings, and fields of `Experiment` that a manifest does not have:
            `stream` (of folder:PATH), `method` (of a file: path/to/file.py:Class), `weights`, `data_dir`, `device`,
            `threads`, `out`.

    Returns:
        The experiments, for `run_several`.

    Raises:
        RunError: The runs are of several benchmarks or backbones (code "several-benchmarks"), of a folder that `stream`
            must name (code "no-stream"), or of another method than `method` (code "other-method").
    """
    runs = [(path, *read_run(path)) for path in run_folders(run)]
    runs = [one for one in runs if "learned_with" not in one[1]] or runs
    for path, configuration, _ in runs:
        _check_stream(path, configuration, values)
        _check_method(path, configuration, values.get("method"))
    if len({(known["stream"]["name"], known["backbone"]["fingerprint"]) for _, known, _ in runs}) > 1:
        message = f"{run} has runs of several benchmarks or backbones; evaluate each by itself"
        raise RunError(message, code="several-benchmarks", path=run)
    axes = parse_sweep(values.get("sweep", ()))
    fields = {*Experiment.hints(), *get_type_hints(StreamOptions), "sweep"}
    changed = {*values, *axes} - fields
    runs = [one for one in runs if changed.intersection(one[1]["settings"])] or runs
    having = {name for _, known, _ in runs for name in changed.intersection(known["settings"])}
    labels = _run_labels([configuration for _, configuration, _ in runs])
    plan: Plan = {}
    for (path, configuration, seeds), label in zip(runs, labels, strict=True):
        lacking = having.difference(configuration["settings"])
        own = {name: value for name, value in run_values(path, configuration).items() if name not in axes}
        own["seeds"] = [figures["seed"] for figures in seeds]
        own |= {name: value for name, value in values.items() if name not in lacking}
        own["sweep"] = {name: choices for name, choices in axes.items() if name not in lacking}
        own["out"] = Path(values.get("out") or _default_folder(run, values), path.relative_to(run))
        for point, experiments in plan_experiments(own).items():
            plan.setdefault(label + point.removeprefix(configuration["method"]), []).extend(experiments)
    return plan


def _run_labels(configurations: Sequence[dict[str, Any]]) -> list[str]:
    """Label every run by what it learned with; runs that differ in class order alone have one label."""
    shared = [without_order(configuration)[1] for configuration in configurations]
    distinct = [one for i, one in enumerate(shared) if one not in shared[:i]]
    labels = row_labels(distinct)
    return [labels[distinct.index(one)] for one in shared]


def _check_stream(path: Path, configuration: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise RunError unless the run's stream is known by name, or given."""
    name = configuration["stream"]["name"]
    if "stream" in values:
        return
    for prefix in (folder.PREFIX, folder.DOMAINS):
        if name.startswith(prefix):
            raise RunError(f"{path} is of {name}; say where its images are: stream={prefix}PATH", code="no-stream")
    if name not in [*BENCHMARKS, *entry_point_names(STREAMS)]:
        message = f"{path} is of {name}, which no installed benchmark is called; name it: stream=path/to/file.py:NAME"
        raise RunError(message, code="no-stream", path=path)


def _check_method(path: Path, configuration: Mapping[str, Any], given: str | None) -> None:
    """Raise RunError unless a given method is the run's, or the run's is installed."""
    name = configuration["method"]
    if given is None and "plugin" in configuration and name not in [*METHODS, *entry_point_names(ENTRY_POINTS)]:
        message = f"{path} is a run of {name}, which is not installed; name its file: method=path/to/file.py:Class"
        raise RunError(message, code="other-method", path=path)
    if given is not None and find_method(given).name != name:
        message = f"{path} is a run of {name}, not of {given}; leave method out, or name that of the run"
        raise RunError(message, code="other-method", path=path)


def run_values(path: Path, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `Experiment.from_values` needs to open a run's images and backbone again."""
    stream, backbone = configuration["stream"], configuration["backbone"]
    if is_file_spec(configuration["method"]):  # a folder may be another's; only the user names code to run
        message = f"{path / MANIFEST} names a file as its method, which no run does; the folder was altered"
        raise RunError(message, code="bad-manifest", path=path)
    options = dict(stream["options"])
    order = str(options["class_order"])
    if options["task_file"] or (order != NATURAL and not order.startswith(SEED)):  # its file may be gone
        options |= dict.fromkeys(("tasks", "base", "increment")) | {"class_order": NATURAL}
        options["task_file"] = path / MANIFEST
    return {
        **options,
        **configuration["settings"],
        "stream": stream["name"],
        "method": configuration["method"],
        "backbone": backbone["name"],
        "image_size": backbone["image_size"],
        "crop": backbone["preprocessing"]["crop"],
        "precision": backbone.get("precision", "fp32"),
        "states_from": path,
    }


def _default_folder(run: Path, values: Mapping[str, Any]) -> Path:
    """Return a folder beside the run that names the changed settings."""
    settings = [f"{name}-{v}" for name, v in values.items() if name not in (*Experiment.hints(), "sweep")]
    return run.with_name("-".join([run.resolve().name, *(settings or ["evaluated"])]))
