"""Ideas for more speed, each measured against the plain form: `python -m benchmarks.tried [NAME ...]`.

A figure is plain time / idea's time within one run; above 1 the idea pays. docs/performance.md says which were kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import (
    attention,
    chunked_step,
    compiled,
    int8,
    kept_memory,
    mixed_batches,
    patch_embedding,
    processes,
    shared_start,
    wait_policy,
)
from benchmarks.tools import NotHere
from protosteer.bench.timing import Ratio

IDEAS: dict[str, Callable[[int], list[Ratio]]] = {
    "mixed_batches": mixed_batches.run,
    "shared_patches": shared_start.run_patches,
    "shared_layer1_kv": shared_start.run_layer1,
    "compile": compiled.run,
    "int8": int8.run,
    "channels_last": patch_embedding.run,
    "processes": processes.run,
    "wait_policy": wait_policy.run,
    "kept_memory": kept_memory.run,
    "attention": attention.run,
    "chunked_step": chunked_step.run,
}


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parse(arguments)
    figures: dict[str, Any] = {"threads": torch.get_num_threads(), "ratios": {}, "not_here": {}}
    if not args.json:
        print(f"{torch.get_num_threads()} threads, {args.repeats} repeats; plain / idea, above 1 pays\n")
        print(f"{'what':<32}{'ratio':>7}{'spread':>8}")
    for name in args.names or IDEAS:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        try:
            ratios = IDEAS[name](args.repeats)
        except NotHere as reason:
            figures["not_here"][name] = str(reason)
            if not args.json:
                print(f"{name:<32}not measured: {reason}", flush=True)
            continue
        figures["ratios"] |= {ratio.name: _plain(ratio) for ratio in ratios}
        if not args.json:
            print("\n".join(_lines(ratio) for ratio in ratios), flush=True)
    if args.json:
        print(json.dumps(figures))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.tried", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(IDEAS)}")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats; medians are reported")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args(arguments)
    unknown = [name for name in args.names if name not in IDEAS]
    if unknown:
        parser.error(f"no idea is called {unknown[0]!r}; choose from {', '.join(IDEAS)}")
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}; it must be at least 1")
    return args


def _plain(ratio: Ratio) -> dict[str, Any]:
    return {
        "value": round(ratio.value, 4),
        "target": ratio.target,
        "spread": round(ratio.spread, 4),
        "about": ratio.about,
        "notes": ratio.notes,
    }


def _lines(ratio: Ratio) -> str:
    indented = [f"    {line}" for line in (ratio.about, *ratio.notes)]
    return "\n".join([f"{ratio.name:<32}{ratio.value:>7.2f}{ratio.spread:>8.2f}", *indented])


if __name__ == "__main__":
    main()
