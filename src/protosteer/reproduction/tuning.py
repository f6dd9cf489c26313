"""Tune the methods of a comparison: the same small search for each, on validation images of the first task.

The first class order and the first seed are searched, and the settings found are used for all. Test images are not read.
A setting that a row fixes is not searched.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

from protosteer.errors import ProtosteerError
from protosteer.evaluation.tuning import tune
from protosteer.methods import find_method
from protosteer.reproduction.grid import Cell, Place, tuned_file
from protosteer.util.files import write_atomically


def tune_missing(cells: Sequence[Cell], place: Place, say: Callable[[str], None]) -> None:
    """Search the grids of cells that were not tuned yet, and write what was found.

    Args:
        cells: The cells; those without `tuning_run` are skipped.
        place: Where the files are written to.
        say: Called with lines for the user. A search that fails is reported; the run then fails for the same reason.
    """
    for run in (cell.tuning_run for cell in cells if cell.tuning_run):
        file = tuned_file(place, run)
        if file.is_file():
            continue
        grid = {name: values for name, values in find_method(run.method).grid.items() if name not in run.settings}
        try:
            trials = tune(dataclasses.replace(run, seeds=(run.seeds or (0,))[:1]), grid) if grid else []
        except ProtosteerError as error:
            say(f"{run.method} on {run.stream} was not tuned: {error}")
            continue
        entries = [{"settings": dict(trial.settings), "accuracy": trial.accuracy} for trial in trials]
        settings = entries[0]["settings"] if entries else {}
        write_atomically(file, (json.dumps({"best": settings, "trials": entries}, indent=1) + "\n").encode())
        say(f"{run.method} on {run.stream}, tuned: {settings}")
