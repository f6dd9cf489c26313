"""Kill `protosteer learn` and `protosteer forget` at random moments and see whether anything is lost.

    python tools/kills.py --kills 100

On made-up pictures, with the backbone inside the package. Each round runs a command undisturbed once, so that it is
known what must come out; then kills it (SIGKILL) at a random moment, and again, until it has come to its end. After
every kill the model must be the old one or one that an undisturbed run also writes, and at the end it must be, to
the bit, that of the undisturbed run, with nothing beside it.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image

# The first four, too, so that no fork has to load what they load.
import protosteer.cli
import protosteer.data.augment
import protosteer.runtime.progress_bar
import protosteer.workflows.learn_folder
from protosteer.errors import ProtosteerError
from protosteer.model import file as model_file
from protosteer.runtime.checkpoint import CheckpointFile

_TRAINED = ("epochs=15", "batch_size=16", "neck_hidden=64", "augmentation=none")


@dataclass
class Tally:
    kills: int = 0
    rounds: int = 0
    found: Counter[str] = field(default_factory=Counter)  # what the file was after a kill
    leftovers: int = 0  # files that a killed process left, all removed by the next
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.found.items()))
        return (
            f"{self.kills} kills in {self.rounds} rounds; the file was: {states}; "
            f"{self.leftovers} leftovers; {len(self.problems)} problems"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="how many in all (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument("--minutes", type=float, default=60.0, help="end after so many (default: 60)")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # a process with more cannot be forked
    chance, tally, end = random.Random(asked.seed), Tally(), time.monotonic() + 60 * asked.minutes
    with tempfile.TemporaryDirectory() as folder:
        rounds = _rounds(Path(folder))
        while tally.kills < asked.kills and time.monotonic() < end:
            for attempt in rounds:
                attempt.play(chance, tally, asked.kills, end)
                print(tally.line(), flush=True)
    for problem in tally.problems:
        print(problem)
    return 1 if tally.problems else 0


@dataclass(frozen=True)
class Round:
    """A command on a model, and the states that the file has when nothing disturbs it."""

    words: list[str]
    model: Path
    before: bytes | None
    states: list[bytes]
    seconds: float

    @classmethod
    def prepare(cls, words: list[str], model: Path) -> Round:
        before = _content(model)
        states: list[bytes] = []
        began = time.monotonic()

        def look() -> None:
            now = _content(model)
            if now is not None and now != before and now not in states:
                states.append(now)

        process = _Command(words)
        process.wait(math.inf, look)
        last = _content(model)
        if process.code or last is None:
            raise SystemExit(f"protosteer {' '.join(words)} failed undisturbed")
        return cls(words, model, before, [*(s for s in states if s != last), last], time.monotonic() - began)

    def play(self, chance: random.Random, tally: Tally, most: int, end: float) -> None:
        """Killed again and again until it ends by itself; now and then it is let alone."""
        _put(self.model, self.before)
        tally.rounds += 1
        while True:
            process = _Command(self.words)
            undisturbed = tally.kills >= most or time.monotonic() > end or chance.random() < 0.15
            if process.wait(math.inf if undisturbed else chance.uniform(0.0, 1.1) * self.seconds):
                break
            process.kill()
            tally.kills += 1
            self._look(tally)
        if process.code and _content(self.model) != self.states[-1]:
            tally.problems.append(f"{self.words[0]} failed after {tally.kills} kills (code {process.code})")
        elif _content(self.model) != self.states[-1]:
            tally.problems.append(f"{self.words[0]}: other bits after {tally.kills} kills")
        elif process.code == 0 and self._beside():
            tally.problems.append(f"{self.words[0]}: left {self._beside()[0].name} beside the model")

    def _look(self, tally: Tally) -> None:
        now = _content(self.model)
        names = {self.before: "old", self.states[-1]: "new"} | dict.fromkeys(self.states[:-1], "usable")
        if now not in names:
            tally.problems.append(f"{self.words[0]}: neither old nor new after {tally.kills} kills")
        tally.found[names.get(now, "damaged")] += 1
        tally.leftovers += len(self._beside())
        try:
            if now is not None:
                model_file.read(self.model)
        except ProtosteerError as error:
            tally.problems.append(str(error))

    def _beside(self) -> list[Path]:
        return [path for path in self.model.parent.iterdir() if path != self.model]


def _rounds(folder: Path) -> list[Round]:
    """A first task, a second one, and a class that is forgotten, each on a model of its own."""
    for name, classes in {"spring": ["ant", "bee"], "summer": ["cat", "dog"]}.items():
        for number, label in enumerate(classes):
            _pictures(folder / "photos" / name / label, number, 12)
    settings = [word for setting in _TRAINED for word in ("--set", setting)]
    found: list[Round] = []
    for name, words in {
        "first": ["learn", "MODEL", str(folder / "photos" / "spring"), "--backbone", "nano", *settings],
        "second": ["learn", "MODEL", str(folder / "photos" / "summer")],
        "third": ["forget", "MODEL", "ant"],
    }.items():
        model = folder / name / "shop.protosteer"
        model.parent.mkdir()
        if found:
            shutil.copy(found[0].model, model)
        found.append(Round.prepare([str(model) if word == "MODEL" else word for word in words], model))
    return found


def _pictures(folder: Path, colour: int, count: int) -> None:
    folder.mkdir(parents=True)
    noise = np.random.default_rng(colour)
    for i in range(count):
        pixels = noise.integers(0, 120, (32, 32, 3), dtype=np.uint8)
        pixels[..., colour % 3] += 120
        Image.fromarray(pixels).save(folder / f"{i:02}.png")


class _Command:
    """`protosteer WORDS` in a process of its own, forked, so that it need not load everything anew.

    It keeps its training at every step: a kill between two is the more telling.
    """

    def __init__(self, words: list[str]):
        self.code: int | None = None  # once it has ended
        self.pid = os.fork()
        if self.pid:
            return
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            CheckpointFile.__init__.__defaults__ = (0.0,)
            os._exit(protosteer.cli.main(words))
        finally:
            os._exit(70)

    def wait(self, seconds: float, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Whether it has ended by then."""
        end = time.monotonic() + seconds
        while self.code is None and time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
            meanwhile()
            time.sleep(0.002)
        return self.code is not None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _put(path: Path, content: bytes | None) -> None:
    for old in path.parent.iterdir():
        old.unlink()
    if content is not None:
        path.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
