"""Runs one experiment in children that are killed at random moments, until KILLS have been; not a test
itself.

    python killed_run.py OUT KILLS LONGEST

A run that ends before there were enough kills is followed by another, in OUT/1, OUT/2 and so on.

Children are forked from a process that has torch loaded already, so that most of a child's time is the run's.
Prints how many were killed, in how many different places of the run, and how long the last child took.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from protosteer.evaluation.experiment import Experiment, run_experiment
from protosteer.streams import open_stream

VALUES = {
    "stream": "split-digits", "tasks": 3, "train_per_class": 12, "test_per_class": 6, "threads": 1, "epochs": 3,
    "batch_size": 12, "neck_hidden": 64, "augmentation": "no-flip", "centroids": 2, "seeds": [0, 1], "device": "cpu",
}  # fmt: skip


PLACES = 6  # that kills must have hit


def child(out: Path) -> int:
    pid = os.fork()
    if pid == 0:
        run_experiment(Experiment.from_values({**VALUES, "out": out}), resume=True, bookmark_seconds=0)
        os._exit(0)
    return pid


def warm_up() -> None:
    """Load, and import, what every child would otherwise spend its short life on."""
    import sklearn.cluster  # noqa: F401

    torch.optim.AdamW([torch.zeros(1)])  # imports torch's compiler
    wanted = Experiment.from_values(VALUES)
    open_stream(wanted.stream, wanted.options, wanted.load_backbone().preprocessing)


def where(out: Path) -> str:
    """How far the run has come, as its files tell."""
    seeds = sorted(out.glob("seed-*"))
    parts = [sorted(p.name for p in seed.rglob("*") if p.is_file() and p.suffix != ".tmp") for seed in seeds]
    return str(parts)


def run_killed(out: Path, kills: int, longest: float, chance: random.Random) -> tuple[int, set[str], float]:
    """One run, killed at most so many times; also the places of the kills, and how long the last child took."""
    killed, places = 0, set()
    while True:
        began = time.monotonic()
        pid = child(out)
        if killed < kills:
            time.sleep(chance.uniform(0.0, longest))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, f"a child failed with code {os.WEXITSTATUS(status)}"
            return killed, places, time.monotonic() - began
        killed += 1
        places.add(where(out))


def main() -> None:
    out, kills, longest = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    chance = random.Random(0)
    torch.set_num_threads(1)
    warm_up()
    killed, places, seconds = run_killed(out / "0", kills, longest, chance)
    runs = 1
    # On a busy machine many kills may hit one place: then there are more of them.
    while killed < kills or (len(places) < PLACES and killed < 3 * kills):
        more, elsewhere, _ = run_killed(out / str(runs), max(kills - killed, PLACES), longest, chance)
        killed, places, runs = killed + more, places | elsewhere, runs + 1
    print(f"{killed} {len(places)} {seconds:.2f}")


if __name__ == "__main__":
    main()
