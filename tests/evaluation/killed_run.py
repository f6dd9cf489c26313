"""Run one experiment whole, and then in children that are killed at every kind of file operation; not a test itself.

    python killed_run.py OUT

A child kills itself before or right after an operation on a file of a chosen kind, so nothing depends on time. A run
that ends is followed by another: OUT/killed/0, OUT/killed/1 and so on. The run that was never killed is OUT/whole.
Prints how many children were killed, and in how many different states of the folder.

Children are forked from a process that has torch, the backbone and the data loaded already.
"""

import itertools
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from protosteer.evaluation.experiment import Experiment, run_experiment
from protosteer.evaluation.experiment_context import ExperimentContext, open_context

VALUES = {
    "stream": "split-digits", "tasks": 3, "train_per_class": 8, "test_per_class": 3, "threads": 1, "epochs": 2,
    "batch_size": 12, "neck_hidden": 16, "augmentation": "no-flip", "centroids": 2, "seeds": [0, 1], "device": "cpu",
}  # fmt: skip
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")
FILES = (
    "training-",
    "task-",
    "learned-",
    "predictions-",
    "embeddings-",
    "rows.json",
    "metrics.json",
    "matrix.csv",
    "manifest.json",
)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def child(context: ExperimentContext, out: Path, file: str, number: int, after: bool) -> bool:
    """Fork a child that resumes the run and dies at an operation on such a file; returns whether it died."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def on_event(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            if event in OPERATIONS and file in Path(str(arguments[0])).name and str(out) in str(arguments[0]):
                count += 1
                if count == number:
                    sys.setprofile(die) if after else die()

        sys.addaudithook(on_event)
        run_experiment(
            Experiment.from_values({**VALUES, "out": out}), resume=True, checkpoint_seconds=0, context=context
        )
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), f"a child failed with status {status}"
    return status != 0


def state(out: Path) -> str:
    """Describe how far the run is, by its files."""
    seeds = sorted(out.glob("seed-*"))
    return str([sorted(p.name for p in s.rglob("*") if p.is_file() and p.suffix != ".tmp") for s in seeds])


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)])  # imports torch's compiler, which every child would do otherwise
    context = open_context(Experiment.from_values(VALUES))
    assert not child(context, out / "whole", "none", 0, False)
    ways = list(itertools.product(FILES, (1, 2), (False, True)))
    random.Random(0).shuffle(ways)
    killed, runs, states = 0, 0, set()
    for way in ways:
        folder = out / "killed" / str(runs)
        if child(context, folder, *way):
            killed += 1
            states.add(state(folder))
        else:
            runs += 1
    child(context, out / "killed" / str(runs), "none", 0, False)
    print(killed, len(states))


if __name__ == "__main__":
    main()
