"""Format the trials of backbones on a user's images."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from protosteer.backbones.build_vit import multiply_adds
from protosteer.report.tables import numbers, plain_table
from protosteer.workflows.backbone_selection import Choice


def choice_table(choice: Choice) -> Table:
    """Show one row per backbone that was tried, the smallest first."""
    columns = numbers(["Leave-one-out", "Parameters", "Multiplications", "Images/s"])
    table = plain_table(None, "Backbone", *columns, "Licence", "")
    for trial in choice.trials:
        info = trial.info
        table.add_row(
            info.alias,
            f"{trial.accuracy:.1f} ± {trial.standard_error:.1f} %",
            f"{info.parameters / 1e6:.1f} M",
            f"{multiply_adds(info.config) / 1e9:.2f} G",
            f"{trial.images_per_second:,.0f}" if trial.images_per_second >= 10 else f"{trial.images_per_second:.1f}",
            info.licence,
            "chosen" if info == choice.info else "",
        )
    return table


def as_json(choice: Choice) -> dict[str, Any]:
    """Return the choice and its trials as plain data."""
    return {
        "chosen": choice.info.name,
        "why": choice.why,
        "images": choice.trials[0].images if choice.trials else 0,
        "trials": [
            {
                "alias": trial.info.alias,
                "name": trial.info.name,
                "accuracy": trial.accuracy,
                "standard_error": trial.standard_error,
                "parameters": trial.info.parameters,
                "multiplications": multiply_adds(trial.info.config),
                "images_per_second": trial.images_per_second,
                "licence": trial.info.licence,
                "path": str(trial.info.path) if trial.info.path else None,
            }
            for trial in choice.trials
        ],
        "left_out": choice.left_out,
    }
