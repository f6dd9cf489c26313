"""Run folders side by side: runs of one configuration are one row, whichever folder their seeds are in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protosteer.errors import RunError
from protosteer.evaluation.runs import read_run

Rows = dict[str, list[dict[str, Any]]]


def gather(given: Sequence[str]) -> Rows:
    """Figures of every seed by the row's label; each argument is FOLDER or LABEL=FOLDER."""
    groups: list[tuple[str | None, dict[str, Any], list[dict[str, Any]]]] = []
    for word in given:
        label, path = _parse(word)
        configuration, seeds = read_run(path)
        same = next((g for g in groups if g[1] == configuration and g[0] == label), None)
        if same is None:
            groups.append((label, configuration, list(seeds)))
            continue
        for figures in seeds:
            if any(known["seed"] == figures["seed"] for known in same[2]):
                raise RunError(
                    f"{path} has seed {figures['seed']} of a configuration that another folder has too; leave one "
                    "out, or give each a label of its own (LABEL=FOLDER)"
                )
            same[2].append(figures)
    names = [name for name, _, _ in groups if name is not None]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise RunError(f"label '{twice}' stands for two different configurations; give each its own")
    labels = _labels([configuration for _, configuration, _ in groups])
    return {
        given_label or label: sorted(seeds, key=lambda figures: int(figures["seed"]))
        for (given_label, _, seeds), label in zip(groups, labels, strict=True)
    }


def _parse(word: str) -> tuple[str | None, Path]:
    """A folder whose own name has an = in it is still a folder."""
    label, equals, path = word.partition("=")
    if equals and label and not Path(word).is_dir():
        return label, Path(path)
    return None, Path(word)


def _labels(configurations: list[dict[str, Any]]) -> list[str]:
    """The method, and what tells a row from others: of the data and backbone, and within a method of its settings."""
    shared = [_shared(configuration) for configuration in configurations]
    labels = []
    for mine, configuration in zip(shared, configurations, strict=True):
        method, settings = configuration["method"], configuration["settings"]
        others = [c["settings"] for c in configurations if c["method"] == method]
        parts = [_part(n, v) for n, v in mine.items() if any(other.get(n) != v for other in shared)]
        parts += [_part(n, v) for n, v in settings.items() if any(other.get(n) != v for other in others)]
        labels.append(", ".join([method, *parts]))
    return [f"{label} ({i + 1})" if labels.count(label) > 1 else label for i, label in enumerate(labels)]


def _shared(configuration: dict[str, Any]) -> dict[str, Any]:
    """What a reader would want to know apart; the rest of a stream follows from its options."""
    stream, backbone = configuration["stream"], configuration["backbone"]
    return {
        "stream": stream["name"],
        **{name: value for name, value in stream["options"].items() if value is not None},
        "backbone": backbone["name"],
        "fingerprint": backbone["fingerprint"][:8],
        "image_size": backbone["image_size"],
    }


def _part(name: str, value: Any) -> str:
    return str(value) if name in ("stream", "backbone") else f"{name} {value}"
