"""Kill the commands that write files at random moments, or let the disk be full, and see whether anything is lost.

    python tools/kills.py --kills 1000
    python tools/kills.py --faults 200

On made-up pictures, with the backbone inside the package. Each command runs undisturbed once, so that it is known what
must come out. With `--kills` it is then killed (SIGKILL) at a random moment, and again, until it has come to its end.
After every kill the result must be the old one or one that an undisturbed run also writes, and at the end it must be, to
the bit, that of the undisturbed run, with nothing beside it. With `--faults` no file can grow beyond a random size, as on a
full disk, or the folder is read-only (as root on Linux alone): the command must end with code 2 and one
line, and the result must be the old one.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image

# The first ones, too, so that no fork has to load what they load.
import protosteer.cli
import protosteer.data.augment
import protosteer.runtime.progress_bar
import protosteer.workflows.learn_folder
import protosteer.workflows.sort_files
from protosteer.errors import ProtosteerError
from protosteer.model import file as model_file
from protosteer.runtime.checkpoint import CheckpointFile

_TRAINED = ("epochs=15", "batch_size=16", "neck_hidden=64", "augmentation=none")
Content = Mapping[str, bytes]  # of files, by their paths in a folder


@dataclass
class Tally:
    kills: int = 0
    faults: int = 0
    rounds: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # state of the result after each kill or fault
    commands: Counter[str] = field(default_factory=Counter)  # kills or faults of each command
    leftovers: int = 0  # files that a killed process left, all removed by the next
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.outcomes.items()))
        commands = ", ".join(f"{name} {count}" for name, count in self.commands.items())
        return (
            f"{self.kills} kills, {self.faults} faults in {self.rounds} rounds ({commands}); the result was: {states}; "
            f"{self.leftovers} leftovers; {len(self.problems)} problems"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=0, help="how many in all")
    parser.add_argument("--faults", type=int, default=0, help="commands on a full disk or in a read-only folder")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument("--minutes", type=float, default=60.0, help="end after so many (default: 60)")
    parser.add_argument("--only", nargs="*", default=[], help="commands (default: all)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a process with more cannot be forked
    chance, tally, num_shown, end = random.Random(options.seed), Tally(), 0, time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        rounds = [r for r in _rounds(Path(folder)) if not options.only or r.name in options.only]
        while (tally.kills < options.kills or tally.faults < options.faults) and time.monotonic() < end:
            for command_round in rounds:
                if tally.kills < options.kills:
                    command_round.play(chance, tally, options.kills, end)
                if tally.faults < options.faults:
                    command_round.fail(chance, tally)
            print(tally.line(), *tally.problems[num_shown:], sep="\n", flush=True)
            num_shown = len(tally.problems)
    return 1 if tally.problems else 0


@dataclass(frozen=True)
class Round:
    """A command that changes what is in a folder, and the states that its result has when nothing disturbs it.

    Attributes:
        name: The command.
        words: Its words.
        folder: What it changes is below this folder.
        result: A file or folder in it, which must be old or new as a whole.
        before: What was in the folder.
        states: The result as it can be after the command began; the last one is that of the end.
        files: Names of all files in the folder at the end.
        seconds: How long it takes.
        moves: The result may be partly new; no file may be lost.
        repeats: Running it again after it has ended changes nothing.
    """

    name: str
    words: list[str]
    folder: Path
    result: str
    before: Content
    states: list[Content]
    files: set[str]
    seconds: float
    moves: bool
    repeats: bool

    @classmethod
    def prepare(
        cls, name: str, words: list[str], folder: Path, result: str, moves: bool = False, repeats: bool = True
    ) -> Round:
        content_before, states, began = _content(folder), list[Content](), time.monotonic()
        part_before = _part(content_before, result)

        def look() -> None:
            part_now = _part(_content(folder), result)
            if part_now and part_now != part_before and part_now not in states and not moves and name == "learn":
                states.append(part_now)

        process = _Command(words)
        process.wait(math.inf, look)
        content_after = _content(folder)
        result_part = _part(content_after, result)
        if process.code or not content_after or (result_part == part_before and not moves):
            raise SystemExit(f"protosteer {' '.join(words)} failed undisturbed: {process.said()}")
        states = [*(s for s in states if s != result_part), result_part]
        files = {*map(_without_version, content_after)}
        return cls(name, words, folder, result, content_before, states, files, time.monotonic() - began, moves, repeats)

    def play(self, chance: random.Random, tally: Tally, max_kills: int, end: float) -> None:
        """Run the command and kill it until it ends by itself; sometimes it is not killed."""
        _put(self.folder, self.before)
        tally.rounds += 1
        while True:
            process = _Command(self.words)
            undisturbed = tally.kills >= max_kills or time.monotonic() > end or chance.random() < 0.15
            if process.wait(math.inf if undisturbed else chance.uniform(0.0, 1.1) * self.seconds):
                break
            process.kill()
            tally.kills += 1
            tally.commands[self.name] += 1
            state = self._look(tally)
            if state == "new" and not self.repeats:
                return
        content = _content(self.folder)
        if _part(content, self.result) != self.states[-1]:
            tally.problems.append(f"{self.name}: code {process.code} and another result; {process.said()}")
        elif process.code == 0 and (leftovers := {*map(_without_version, content)} - self.files):
            tally.problems.append(f"{self.name}: left {sorted(leftovers)[0]}")

    def fail(self, chance: random.Random, tally: Tally) -> None:
        """Run the command on a disk that is full from some size on, or in a read-only folder."""
        _put(self.folder, self.before)
        tally.rounds, tally.faults = tally.rounds + 1, tally.faults + 1
        tally.commands[self.name] += 1
        read_only = os.getuid() == 0 and chance.random() < 0.3
        largest = max(map(len, self.states[-1].values()))
        process = _Command(self.words, self.folder if read_only else None, int(chance.uniform(0, largest)))
        process.wait(math.inf)
        content, output = _content(self.folder), process.said()
        kind = "read-only" if read_only else "full"
        tally.outcomes[f"{kind} with code {process.code}"] += 1
        location = f"{self.name} ({kind})"
        if "Traceback" in output or process.code not in (0, 1, 2):
            tally.problems.append(f"{location}: code {process.code}, {output[-300:]}")
        elif (
            process.code
            and not self.moves
            and _part(content, self.result)
            not in [
                _part(self.before, self.result),
                *self.states[:-1],
            ]
        ):
            tally.problems.append(f"{location}: failed, but the result changed; {output[-300:]}")
        elif self.moves and not _none_lost(self.before, content):
            tally.problems.append(f"{location}: an image is lost")
        elif process.code == 0 and not self.moves and _part(content, self.result) != self.states[-1]:
            tally.problems.append(f"{location}: succeeded with another result; {output[-300:]}")
        elif process.code and {path for path in content if path.rpartition("/")[2].startswith(".")} - {*self.before}:
            tally.leftovers += 1

    def _look(self, tally: Tally) -> str:
        content = _content(self.folder)
        part, part_before = _part(content, self.result), _part(self.before, self.result)
        state = "new" if part == self.states[-1] else "old" if part == part_before else "damaged"
        state = "usable" if state == "damaged" and part in self.states else state
        if state == "damaged" and self.moves and _none_lost(self.before, content):
            state = "partly done"
        if state == "damaged":
            tally.problems.append(f"{self.name}: neither old nor new after {tally.kills} kills")
        tally.outcomes[state] += 1
        tally.leftovers += len({*map(_without_version, content)} - {*map(_without_version, self.before)} - self.files)
        for path in content:
            if path.endswith(".protosteer") and not path.rpartition("/")[2].startswith("."):
                try:
                    model_file.read(self.folder / path)
                except ProtosteerError as error:
                    tally.problems.append(str(error))
        return state


def _rounds(folder: Path) -> list[Round]:
    """Prepare every command that writes, each in its own folder, which begins with the same model."""
    for name, classes in {"spring": ["ant", "bee"], "summer": ["cat", "dog"]}.items():
        for number, label in enumerate(classes):
            _pictures(folder / "photos" / name / label, number, 12)
    _pictures(folder / "new", 1, 6)
    image, settings = str(folder / "new" / "00.png"), [word for value in _TRAINED for word in ("--set", value)]
    spring, summer = (str(folder / "photos" / name) for name in ("spring", "summer"))
    rounds: list[Round] = []

    def add(
        name: str, words: list[str], result: str = "shop.protosteer", setup: list[str] | None = None, **flags: bool
    ) -> None:
        place = folder / f"{len(rounds)}"
        place.mkdir()
        model = place / "shop.protosteer"
        if rounds:
            shutil.copy(rounds[0].folder / "shop.protosteer", model)
        if name == "sort":
            shutil.copytree(folder / "new", place / "in")
        if name == "merge":
            shutil.copy(other_model, place / "other.protosteer")
        for command in [setup, words] if setup else [words]:
            command[:] = [word.replace("MODEL", str(model)).replace("FOLDER", str(place)) for word in command]
        if setup and (process := _Command(setup)).wait(math.inf) and process.code:
            raise SystemExit(f"protosteer {' '.join(setup)} failed: {process.said()}")
        rounds.append(Round.prepare(name, words, place, result, **flags))

    add("learn", ["learn", "MODEL", spring, "--backbone", "nano", *settings])
    add("learn", ["learn", "MODEL", summer])
    other_model = folder / "other.protosteer"
    shutil.copy(rounds[1].folder / "shop.protosteer", other_model)
    with_words = ["--rename-task", "summer=winter", "--rename-task", "spring=autumn"]
    add("forget", ["forget", "MODEL", "ant"], repeats=False)
    add("correct", ["correct", "MODEL", image, "ant"], repeats=False)
    add("confirm", ["correct", "MODEL", str(folder / "new"), "--confirm"])
    add("correct --undo", ["correct", "MODEL", "--undo"], setup=["correct", "MODEL", image, "yak"], repeats=False)
    add("rename", ["rename", "MODEL", "ant", "emu"], repeats=False)
    add("join", ["join", "MODEL", "ant", "bee", "--as", "emu"], repeats=False)
    add("undo", ["undo", "MODEL"], setup=["rename", "MODEL", "ant", "emu"], repeats=False)
    add(
        "merge",
        ["merge", "MODEL", "FOLDER/other.protosteer", "-o", "FOLDER/both.protosteer", *with_words],
        "both.protosteer",
    )
    add("adapt", ["adapt", spring, "-o", "FOLDER/my.backbone", "--backbone", "nano", *settings], "my.backbone")
    add("export", ["export", "MODEL", "--onnx", "FOLDER/onnx"], "onnx")
    add("sort", ["sort", "MODEL", "FOLDER/in", "FOLDER/out", "--mode", "move"], "out", moves=True)
    return rounds


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

    def __init__(self, words: list[str], read_only: Path | None = None, largest: int | None = None):
        self.code: int | None = None  # once it has ended
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(writer)
            return
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(writer, 2)
            CheckpointFile.__init__.__defaults__ = (0.0,)
            if read_only is not None:
                os.chmod(read_only, 0o555)
                _drop_capabilities()
            elif largest is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
            os._exit(protosteer.cli.main(words))
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            raise
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

    def said(self) -> str:
        """What it wrote to standard error."""
        os.set_blocking(self._reader, False)
        try:
            return os.read(self._reader, 2**16).decode(errors="replace")
        except BlockingIOError:
            return ""

    def __del__(self) -> None:
        os.close(self._reader)


def _drop_capabilities() -> None:
    """Make permissions of files hold for root, too (Linux)."""
    header, no_capabilities = struct.pack("Ii", 0x20080522, 0), bytes(24)
    if ctypes.CDLL(None, use_errno=True).capset(header, no_capabilities):
        raise OSError(ctypes.get_errno(), "capset")


def _content(folder: Path) -> Content:
    files = {}
    for path in sorted(folder.rglob("*")):
        try:
            if path.is_file():
                files[str(path.relative_to(folder))] = path.read_bytes()
        except FileNotFoundError:  # it was there a moment ago
            continue
    return files


def _part(content: Content, result: str) -> Content:
    """Select the files of a result, without hidden ones: a log has times."""
    result_files = {path: data for path, data in content.items() if path == result or path.startswith(f"{result}/")}
    return {path: data for path, data in result_files.items() if not path.rpartition("/")[2].startswith(".")}


def _without_version(path: str) -> str:
    """Return a path without the number of a version, which no killed process uses again."""
    return re.sub(r"\d+(?=\.protosteer$)", "N", path) if ".versions/" in path else path


def _none_lost(before: Content, after: Content) -> bool:
    pictures = Counter(data for path, data in before.items() if path.endswith(".png"))
    return not pictures - Counter(data for path, data in after.items() if path.endswith(".png"))


def _put(folder: Path, content: Content) -> None:
    os.chmod(folder, 0o755)
    shutil.rmtree(folder)
    folder.mkdir()
    for path, data in content.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


if __name__ == "__main__":
    sys.exit(main())
