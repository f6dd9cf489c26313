"""Compare run folders: runs of one configuration, over seeds and class orders, form one row, wherever they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protosteer.errors import RunError
from protosteer.evaluation.run_folder import MANIFEST, RunFolder, read_run
from protosteer.methods import METHODS
from protosteer.streams import StreamOptions
from protosteer.util.statistics import Bins

Rows = dict[str, list[dict[str, Any]]]


def gather(given: Sequence[str]) -> Rows:
    """Read the metrics of every run, grouped by configuration; runs that differ in class order are one group.

    Args:
        given: FOLDER or LABEL=FOLDER, each; the folder of a run, or one that holds folders of runs.

    Returns:
        By the row's label, the metrics of every class order and seed, with `class_order`, the `folder` they are in and
        `test_images`: of runs that were tested on the same images it is equal. Copies of a run count once.

    Raises:
        RunError: A folder is given twice, or another run of the same configuration, class order and seed (code
            "repeated-seed"), or a label (code "repeated-label").
    """
    groups: list[tuple[str, dict[str, Any], dict[Any, dict[str, Any]]]] = []  # label, configuration, runs
    for label, path in ((label, path) for label, root in map(_parse, given) for path in run_folders(root)):
        configuration, seeds = read_run(path)
        order, shared = without_order(configuration)
        group = next((g for g in groups if (g[0], without_order(g[1])[1]) == (label, shared)), None)
        if group is None:
            group = (label, configuration, {})
            groups.append(group)
        for figures in seeds:
            seed = figures["seed"]
            known = group[2].get((order, seed))
            if known and known["folder"] != str(RunFolder(path).seed(seed)) and _is_same_training(known, figures):
                continue  # a copy, or an evaluation under the settings that the run has anyway
            if known:
                message = (
                    f"{path} has seed {seed} of a configuration that another folder has too; leave one "
                    "out, or give each its own label (LABEL=FOLDER)"
                )
                raise RunError(message, code="repeated-seed", seed=seed)
            name = configuration["stream"]["options"].get("class_order", "natural")
            place = str(RunFolder(path).seed(seed))
            images = _test_images(configuration["stream"])
            group[2][order, seed] = {**figures, "class_order": name, "folder": place, "test_images": images}
    rows: Rows = {}
    labels = row_labels([configuration for _, configuration, _ in groups])
    for (given_label, _, runs), label in zip(groups, labels, strict=True):
        if given_label in rows:
            message = f"label '{given_label}' stands for two configurations; give each its own"
            raise RunError(message, code="repeated-label", label=given_label)
        rows[given_label or label] = sorted(runs.values(), key=lambda run: (run["class_order"], run["seed"]))
    return rows


def _is_same_training(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether metrics are of one training: seconds are never equal otherwise."""
    names = ("matrix", "train_seconds")
    return bool(first.get("train_seconds")) and all(first.get(name) == second.get(name) for name in names)


def run_folders(root: Path) -> list[Path]:
    """Return the run folders in a folder, itself included; the folder alone if there are none."""
    return sorted(path.parent for path in root.rglob(MANIFEST)) or [root]


def _test_images(stream: Mapping[str, Any]) -> str:
    """Return a fingerprint of the data and of the options that choose test images, the number per class aside."""
    options = stream["options"]
    chosen = [stream.get("checksums"), *(options.get(name) for name in ("draw", "validation"))]
    if options.get("validation"):
        chosen.append(options.get("train_per_class"))
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:12]


def without_order(configuration: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the class order, and the rest of a configuration; a task file's order stays part of the latter."""
    stream = configuration["stream"]
    if stream["options"].get("task_file"):
        return (), configuration
    options = {name: value for name, value in stream["options"].items() if name != "class_order"}
    kept = {name: value for name, value in stream.items() if name not in ("class_order", "tasks")}
    sizes = [len(task["classes"]) for task in stream["tasks"]]
    return tuple(stream["class_order"]), {**configuration, "stream": {**kept, "options": options, "sizes": sizes}}


def bins_of(rows: Rows) -> dict[str, list[Bins]]:
    """Return the calibration bins of every seed, for the rows that have them; an error if none has."""
    found = {label: [seed.get("reliability") for seed in seeds] for label, seeds in rows.items()}
    known = {label: [bins for bins in seeds if bins] for label, seeds in found.items() if all(seeds)}
    if not known:
        message = "none of these runs has confidences: their methods report none, or their version is older"
        raise RunError(message, code="no-confidence")
    return known


def _parse(word: str) -> tuple[str, Path]:
    """Split LABEL=FOLDER; an existing folder whose name contains = is a folder."""
    label, equals, path = word.partition("=")
    return (label, Path(path)) if equals and label and not Path(word).is_dir() else ("", Path(word))


def row_labels(configurations: list[dict[str, Any]]) -> list[str]:
    """Label each row by its method, by data and backbone if they differ, and by what is not a default.

    Defaults are omitted, and so are settings that all rows of a method share.
    """
    shared = [_shared(configuration) for configuration in configurations]
    settings = [_setting_words(configuration) for configuration in configurations]
    methods = [configuration["method"] for configuration in configurations]
    labels = []
    for method, mine, own in zip(methods, shared, settings, strict=True):
        others = [words for words, name in zip(settings, methods, strict=True) if name == method]
        parts = [word for word in mine if any(word not in other for other in shared)]
        parts += [word for word in own if any(word not in other for other in others)]
        labels.append(", ".join([method, *parts]))
    return [f"{label} ({i + 1})" if labels.count(label) > 1 else label for i, label in enumerate(labels)]


def _shared(configuration: dict[str, Any]) -> list[str]:
    """Describe stream and backbone; the rest of a stream follows from its options."""
    stream, backbone = configuration["stream"], configuration["backbone"]
    options = {name: value for name, value in stream["options"].items() if name != "class_order"}
    weights = {
        "fingerprint": backbone["fingerprint"][:8],
        "image_size": backbone["image_size"],
        "precision": backbone["precision"],
    }
    return [stream["name"], *_words(options, StreamOptions().to_dict()), backbone["name"], *_words(weights)]


def _defaults(configuration: dict[str, Any]) -> dict[str, Any]:
    """Return the default settings of a method; none of one that is not installed."""
    method = METHODS.get(configuration["method"])
    return dict(method.settings_from(method.preset(None)).to_dict()) if method else {}


def _setting_words(configuration: dict[str, Any]) -> list[str]:
    """Describe settings that are no defaults, and those of a run that was evaluated again under others."""
    settings, learned_with = configuration["settings"], configuration.get("learned_with", {})
    words = _words({name: v for name, v in settings.items() if name not in learned_with}, _defaults(configuration))
    return words + [f"{name} {settings.get(name)} (learned with {old})" for name, old in learned_with.items()]


def _words(values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> list[str]:
    known = defaults or {}
    return [f"{name} {value}" for name, value in values.items() if name not in known or known[name] != value]
