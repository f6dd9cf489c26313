"""Compare run folders: seeds of the same configuration form one row, whichever folder they are in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protosteer.errors import RunError
from protosteer.evaluation.metrics import Bins
from protosteer.evaluation.run_folder import read_run

Rows = dict[str, list[dict[str, Any]]]


def gather(given: Sequence[str]) -> Rows:
    """Read the metrics of every seed, grouped by configuration.

    Args:
        given: FOLDER or LABEL=FOLDER, each.

    Returns:
        The metrics of each seed, by the row's label.

    Raises:
        RunError: A seed is given twice (code "repeated-seed"), or a label (code "repeated-label").
    """
    groups: list[tuple[str, dict[str, Any], dict[int, dict[str, Any]]]] = []  # label, configuration, by seed
    for label, path in map(_parse, given):
        configuration, seeds = read_run(path)
        group = next((g for g in groups if g[:2] == (label, configuration)), None)
        if group is None:
            group = (label, configuration, {})
            groups.append(group)
        for figures in seeds:
            if figures["seed"] in group[2]:
                message = (
                    f"{path} has seed {figures['seed']} of a configuration that another folder has too; leave one "
                    "out, or give each its own label (LABEL=FOLDER)"
                )
                raise RunError(message, code="repeated-seed", seed=figures["seed"])
            group[2][figures["seed"]] = figures
    rows: Rows = {}
    labels = _labels([configuration for _, configuration, _ in groups])
    for (given_label, _, by_seed), label in zip(groups, labels, strict=True):
        if given_label in rows:
            message = f"label '{given_label}' stands for two configurations; give each its own"
            raise RunError(message, code="repeated-label", label=given_label)
        rows[given_label or label] = [by_seed[seed] for seed in sorted(by_seed)]
    return rows


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


def _labels(configurations: list[dict[str, Any]]) -> list[str]:
    """Label each row by its method and by what differs: data, backbone and, within a method, settings."""
    shared = [_shared(configuration) for configuration in configurations]
    settings = [_words(configuration["settings"]) for configuration in configurations]
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
    options = {name: value for name, value in stream["options"].items() if value is not None}
    weights = {
        "fingerprint": backbone["fingerprint"][:8],
        "image_size": backbone["image_size"],
        "precision": backbone["precision"],
    }
    return [stream["name"], *_words(options), backbone["name"], *_words(weights)]


def _words(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} {value}" for name, value in values.items()]
