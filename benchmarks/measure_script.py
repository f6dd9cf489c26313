"""The command line that the scripts of this folder share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from rich.console import Console

from protosteer.bench.harness import Ratio
from protosteer.bench.report import as_json, table


def measure_script(run: Callable[[int], list[Ratio]]) -> None:
    """Run the measurement `run` and print its ratios as a table or JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ratios = run(options.repeats)
    if options.json:
        print(json.dumps(as_json(ratios), indent=1))
    else:
        Console().print(*table(ratios), sep="\n")
