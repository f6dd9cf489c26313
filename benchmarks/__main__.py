"""`make bench`: every benchmark of this folder, as one table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks import augmentation, centroids, training_step


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats; medians are reported")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    ratios = {}
    modules = {"training_step": training_step, "centroids": centroids, "augmentation": augmentation}
    for name, module in modules.items():
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        ratios[name] = module.run(args.repeats)
    if args.json:
        print(json.dumps({"ratios": ratios}))
        return
    print(f"{'what':<16}{'reference / ours':>18}{'target':>9}{'spread':>9}")
    for name, figures in ratios.items():
        print(f"{name:<16}{figures['value']:>18.2f}{figures['target']:>9.2f}{figures['spread']:>9.2f}")


if __name__ == "__main__":
    main()
