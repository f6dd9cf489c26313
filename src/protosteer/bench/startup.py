"""How soon `protosteer --help` answers: a fresh Python that imports torch against one that prints our help."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from statistics import median

from protosteer.bench.timing import Ratio, interleaved

TARGET = 1.0
TORCH = ("-c", "import torch")
HELP = ("-m", "protosteer", "--help")
NOTHING = ("-c", "pass")
# `main` gives its exit code back, so the child can look at what it has imported meanwhile.
_LOOK = """
import sys
from protosteer.cli import main
sys.exit(main(["--help"]) or (10 if "torch" in sys.modules else 0))
"""
_SEEN = {0: "--help does not import torch", 10: "--help imports torch"}


def run(repeats: int) -> list[Ratio]:
    sides = {"torch": _child(*TORCH), "help": _child(*HELP), "nothing": _child(*NOTHING)}
    times = interleaved(sides, repeats)
    torch, ours, nothing = (median(seconds) for seconds in times.values())
    code = _child("-c", _LOOK)()
    notes = [
        f"help {ours:.2f} s, import torch {torch:.2f} s, Python alone {nothing:.2f} s",
        _SEEN.get(code, f"--help failed with exit code {code}"),
    ]
    about = 'start-up: python -c "import torch" / protosteer --help'
    return [Ratio.of("help", about, times["torch"], times["help"], TARGET, notes)]


def _child(*arguments: str) -> Callable[[], int]:
    """Runs this Python once more, silently; its exit code."""
    command = [sys.executable, *arguments]
    return lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
