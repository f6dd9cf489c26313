"""Evaluate finished runs again under other settings: learned states are read, and nothing is learned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protosteer.errors import RunError
from protosteer.evaluation.comparison import run_folders
from protosteer.evaluation.experiment import Experiment
from protosteer.evaluation.run_folder import MANIFEST, read_run
from protosteer.evaluation.sweep import Plan, plan_experiments
from protosteer.methods import ENTRY_POINTS, METHODS, find_method
from protosteer.streams import folder
from protosteer.streams.options import NATURAL, SEED
from protosteer.util.plugins import entry_point_names, is_file_spec


def plan_reevaluation(run: Path, values: Mapping[str, Any]) -> Plan:
    """Plan the evaluation of a finished run, or of every run in a folder, such as those of several class orders.

    A setting that acts in training has no effect; the manifest keeps the settings that were learned with.

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
    plan: Plan = {}
    shared = set()
    for path in run_folders(run):
        configuration, seeds = read_run(path)
        shared.add((configuration["stream"]["name"], configuration["backbone"]["fingerprint"]))
        name = configuration["stream"]["name"]
        if name.startswith(folder.PREFIX) and "stream" not in values:
            raise RunError(f"{path} is of {name}; say where its images are: stream=folder:PATH", code="no-stream")
        known = run_values(path, configuration)
        _check_method(path, configuration, values.get("method"))
        own = {**known, "seeds": [figures["seed"] for figures in seeds], **values}
        own["out"] = Path(values.get("out") or _default_folder(run, values), path.relative_to(run))
        for label, experiments in plan_experiments(own).items():
            plan.setdefault(label, []).extend(experiments)
    if len(shared) > 1:
        message = f"{run} has runs of several benchmarks or backbones; evaluate each by itself"
        raise RunError(message, code="several-benchmarks", path=run)
    return plan


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
