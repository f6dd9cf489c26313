"""The table of README.md, from the runs beside this file: means and sample deviations over the class orders."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path

METHODS = ("protosteer", "cpp", "ncm", "slda", "ranpac", "er", "finetune")
FIGURES = ("last_image_accuracy", "anytime_accuracy", "last_forgetting")


def main() -> None:
    found: dict[tuple[str, float], list[dict[str, float]]] = defaultdict(list)
    for path in sorted(Path(__file__).parent.glob("runs/*/*/metrics.json")):
        options = json.loads((path.parent / "manifest.json").read_text())["configuration"]["stream"]["options"]
        found[path.parent.name, options["blurry"]] += json.loads(path.read_text())["seeds"]
    shares = sorted({share for _, share in found})
    print("| method | " + " | ".join(f"{figure}, {share:g}" for figure in FIGURES for share in shares) + " |")
    print("|---" * (1 + len(FIGURES) * len(shares)) + "|")
    for method in METHODS:
        cells = [_spread([seed[f] for seed in found[method, share]]) for f in FIGURES for share in shares]
        print(f"| `{method}` | " + " | ".join(cells) + " |")


def _spread(values: list[float]) -> str:
    assert len(values) == 3, values
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"


if __name__ == "__main__":
    main()
