"""How soon `protosteer --help` answers: a fresh Python that imports torch against one that prints our help."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from statistics import median

from protosteer.bench.timing import Ratio, interleaved

TARGET = 1.0
SIDES = {"torch": ("-c", "import torch"), "help": ("-m", "protosteer", "--help")}


def run(repeats: int) -> list[Ratio]:
    times = interleaved({name: partial(_child, *words) for name, words in SIDES.items()}, repeats)
    notes = ["import torch {:.2f} s, help {:.2f} s".format(*map(median, times.values()))]
    about = 'start-up: python -c "import torch" / protosteer --help'
    return [Ratio.of("help", about, times["torch"], times["help"], TARGET, notes)]


def _child(*words: str) -> None:
    """Runs this Python once more, silently."""
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
