"""Run one experiment whole, and then in children that are killed, until KILLS have been; not a test itself.

    python killed_run.py OUT KILLS

A child kills itself before or after the n-th file operation, with n drawn at random, so nothing depends on time. A run that
ends before there were enough kills is followed by another: OUT/killed/0, OUT/killed/1 and so on. The run that was
never killed is OUT/whole. Prints how many children were killed, and in how many different states of the folder.

Children are forked from a process that has torch loaded already.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from protosteer.evaluation.experiment import Experiment, run_experiment
from protosteer.streams import open_stream

VALUES = {
    "stream": "split-digits", "tasks": 3, "train_per_class": 12, "test_per_class": 6, "threads": 1, "epochs": 3,
    "batch_size": 12, "neck_hidden": 64, "augmentation": "no-flip", "centroids": 2, "seeds": [0, 1], "device": "cpu",
}  # fmt: skip
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def child(out: Path, limit: int, after: bool = False) -> int:
    """Fork a child that resumes the run and dies before, or right after, its file operation number `limit`."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def on_event(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            if event in OPERATIONS and str(arguments[0]).startswith(str(out)):
                count += 1
                if count == limit:
                    sys.setprofile(die) if after else die()

        sys.addaudithook(on_event)
        run_experiment(Experiment.from_values({**VALUES, "out": out}), resume=True, checkpoint_seconds=0)
        out.with_suffix(".count").write_text(str(count))
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def state(out: Path) -> str:
    """Describe how far the run is, by its files."""
    seeds = sorted(out.glob("seed-*"))
    return str([sorted(p.name for p in s.rglob("*") if p.is_file() and p.suffix != ".tmp") for s in seeds])


def main() -> None:
    out, kills = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)])  # imports torch's compiler, which every child would do otherwise
    wanted = Experiment.from_values(VALUES)
    open_stream(wanted.stream, wanted.options, wanted.load_backbone().preprocessing)
    assert child(out / "whole", 0) == 0
    operations = int((out / "whole.count").read_text())
    draw, killed, runs, states = random.Random(0), 0, 0, set()
    while killed < kills:
        folder = out / "killed" / str(runs)
        while child(folder, draw.randint(1, operations // 8) if killed < kills else 0, draw.random() < 0.5):
            killed += 1
            states.add(state(folder))
        runs += 1
    print(killed, len(states))


if __name__ == "__main__":
    main()
