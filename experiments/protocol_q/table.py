"""Print the results of Protocol Q as Markdown: python experiments/protocol_q/table.py experiments/protocol_q/results"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any


def accuracy_after(result: dict[str, Any], tasks: int) -> float:
    return float(result["accuracy_after_each_task"][tasks - 1])


def spread(values: list[float]) -> str:
    """Mean and, of several seeds, the standard deviation between them."""
    mean = f"{statistics.mean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def main() -> None:
    results = [json.loads(path.read_text()) for path in sorted(Path(sys.argv[1]).glob("*.json"))]
    results.sort(key=lambda r: (r["label"], r["seed"]))
    print("| variant | seed | tasks | Q3 Last | Q10 Last | Avg | forgetting | retrieval | prompts/image |")
    print("|---|---|---|---|---|---|---|---|---|")
    for r in results:
        q10 = f"{accuracy_after(r, 10):.2f}" if r["tasks"] == 10 else "–"
        print(
            f"| {r['label']} | {r['seed']} | {r['tasks']} | {accuracy_after(r, 3):.2f} | {q10} | "
            f"{r['avg_accuracy']:.2f} | {r['last_forgetting']:.2f} | {r['retrieval_accuracy']:.1f} | "
            f"{r['prompts_per_image']:.2f} |"
        )
    print("\n| variant | seeds | Q3 Last, mean ± std |\n|---|---|---|")
    for label in dict.fromkeys(r["label"] for r in results):
        values = [accuracy_after(r, 3) for r in results if r["label"] == label]
        print(f"| {label} | {len(values)} | {spread(values)} |")
    print(
        "\n| variant | seed | tasks | true task, with prompt | without | not retrieved | wrong prompt won | wrong class "
        "| key spread | value spread |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for r in results:
        mean = r["diagnosis"]["mean"]
        columns = ("true_task_with_prompt", "true_task_without_prompt", "not_retrieved", "wrong_prompt_won")
        percents = " | ".join(f"{mean[name]:.1f}" for name in (*columns, "wrong_class"))
        spreads = f"{mean['key_spread']:.2f} | {mean['value_spread']:.2f}"
        print(f"| {r['label']} | {r['seed']} | {r['tasks']} | {percents} | {spreads} |")


if __name__ == "__main__":
    main()
