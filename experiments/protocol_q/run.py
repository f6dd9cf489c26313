"""Protocol Q: Split CIFAR-100 with few images, DeiT-Tiny at 224 px. Q3 is the first 3 tasks, Q10 all ten.

    python experiments/protocol_q/run.py --cifar DIR/cifar-100-python --weights deit_tiny_patch16_224.safetensors \
        --tasks 10 --seed 0 --out experiments/protocol_q/results

Tasks of 10 classes in numerical order; per class the first 20 training and first 10 test images in file order;
15 epochs, batch 50, as many prototypes per step as images; everything else is the default. Since nothing that is
learned later can change an earlier row of the matrix, row 3 of a Q10 run is the Q3 result of the same seed.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch

import protosteer
from protosteer.backbones import Backbone
from protosteer.data.cifar import read_cifar100
from protosteer.data.images import ArrayImages
from protosteer.evaluation import metrics
from protosteer.evaluation.protocol import Run, run_stream
from protosteer.learner import Learner
from protosteer.settings import Settings
from protosteer.streams.base import Stream, Task

PROTOCOL = {"epochs": 15, "batch_size": 50}


def first_per_class(labels: torch.Tensor, wanted: list[int], count: int) -> torch.Tensor:
    """Rows of the first `count` images of each wanted class, in file order."""
    return torch.cat([(labels == c).nonzero()[:count, 0] for c in wanted])


def protocol_q(folder: Path, tasks: int) -> Stream:
    parts = {split: read_cifar100(folder, split) for split in ("train", "test")}
    names = parts["train"][2]
    made = []
    for t in range(tasks):
        wanted = list(range(10 * t, 10 * t + 10))
        halves = []
        for split, count in (("train", 20), ("test", 10)):
            pixels, labels, _ = parts[split]
            rows = first_per_class(labels, wanted, count)
            halves.append((ArrayImages(pixels[rows]), [names[c] for c in labels[rows].tolist()]))
        (train, train_labels), (test, test_labels) = halves
        made.append(Task(f"task-{t + 1}", [names[c] for c in wanted], train, train_labels, test, test_labels))
    return Stream("protocol-q", made)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Protocol Q: reduced Split CIFAR-100, DeiT-Tiny.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder with train, test and meta")
    parser.add_argument("--weights", required=True, help="deit_tiny_patch16_224.safetensors")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another setting")
    parser.add_argument("--label", default="cpp", help="name of the variant in the result file")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    parser.add_argument("--model", type=Path, help="also keep the learned model, in this file")
    return parser.parse_args()


def overrides(pairs: list[str]) -> dict[str, object]:
    """NAME=VALUE, where a value is JSON or else a bare word."""
    values: dict[str, object] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return values


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    backbone = Backbone.load("deit_tiny_patch16_224", weights=args.weights, image_size=224, crop=1.0)
    settings = Settings.from_dict({**PROTOCOL, "seed": args.seed, **overrides(args.set)})
    learner = Learner(backbone, settings)

    def on_task(i: int, run: Run) -> None:
        about = learner.memory.tasks[-1].about
        print(
            f"{time.strftime('%H:%M:%S')} {args.label} seed {args.seed} task {i + 1}: "
            f"accuracy {metrics.average_accuracy(run.matrix, i):.2f}  forgetting {metrics.forgetting(run.matrix, i):.2f}  "
            f"retrieval {run.retrieval[-1]:.1f}  prompts/image {run.prompts_per_image[-1]:.2f}  "
            f"spread {about['key_spread']:.2f} -> {about['value_spread']:.2f}  "
            f"train {run.train_seconds:.0f} s  eval {run.eval_seconds:.0f} s",
            flush=True,
        )

    run = run_stream(learner, protocol_q(args.cifar, args.tasks), on_task=on_task)
    if args.model:
        learner.save(args.model)
    assert run.diagnosis is not None
    print(json.dumps(run.diagnosis.mean(), indent=1))
    result = {
        "label": args.label,
        "tasks": args.tasks,
        "seed": args.seed,
        "settings": settings.to_dict(),
        "backbone": backbone.describe(),
        "versions": {
            "protosteer": protosteer.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {"processor": platform.machine(), "threads": args.threads},
        **run.figures(),
        "accuracy_after_each_task": [metrics.average_accuracy(run.matrix, i) for i in range(args.tasks)],
        "matrix": run.matrix,
        "diagnosis": run.diagnosis.to_dict(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"q{args.tasks}-{args.label}-seed{args.seed}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
