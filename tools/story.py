"""Plays the story of docs/tutorials/your-images.md: runs every command in it, and compares or replaces what it prints.

    python tools/story.py docs/tutorials/your-images.md            # do the commands still print what the page says?
    python tools/story.py docs/tutorials/your-images.md --write    # put what they print into the page

The page is the script: in its ```console blocks, lines that begin with "$ " are commands, the lines below
them their output. They run one after the other, in a folder with pictures of handwritten digits; `protosteer`
is this checkout's. What depends on the moment is left out (how far training is) or may differ (dates; figures
by a little, since processors round differently). A command that ends in " &" goes on until the page ends.
No weights are on the disk but those that are shipped, and nothing is fetched.
"""

from __future__ import annotations

import argparse
import glob
import io
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits

from protosteer.cli import main as protosteer

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
BATCHES = {
    "january": ("zero", "one", "two"),
    "february": ("three", "four"),
    "march": ("five", "six"),
    "april": ("seven", "eight"),
}
MORE = "two"  # of which more pictures come later
PER_CLASS, NEW_PER_CLASS = 20, 10
PORT = "8000"  # in the page; a free one is taken instead
CACHE = "~/.cache/protosteer"  # in the page; an empty folder is taken instead
SHELL = re.compile(r"[|<>;&$`]")  # what only a shell can do
PASSING = re.compile(r"^  [\w ]+(, (?:epoch|round) \d+ of \d+)?: .* left$")  # progress, for whoever waits
PICTURE = re.compile(r"]\(([^)]*\.png)\)")  # those that a command writes are copied to the page
DATE = re.compile(r"\d{4}-\d\d-\d\d(?: \d\d:\d\d)?|about \d+ (?:s|min)\b")  # and how long something takes
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
BAR = re.compile(r"[━╸]+")
SLACK = 0.02  # by which a figure may differ, as a share of it and at least absolutely
COUNT_SLACK = 0.2  # the same for a line that is a count and no more


@dataclass
class Step:
    """A command and its output on the page."""

    command: str
    output: str
    first: int  # lines of the page that are the output: [first, last)
    last: int


def steps(page: str) -> list[Step]:
    """List the commands of all console blocks, in order."""
    commands: list[Step] = []
    in_console = False
    for i, line in enumerate(page.splitlines()):
        if line.startswith("```"):
            in_console = not in_console and line.strip() == "```console"
        elif in_console and line.startswith("$ "):
            commands.append(Step(line[2:], "", i + 1, i + 1))
        elif in_console and commands:
            commands[-1].output += line + "\n"
            commands[-1].last = i + 1
    return commands


def write_photos(folder: Path) -> None:
    """Write folders of scikit-learn's digits: four batches and some more to learn from, and new pictures of all ten."""
    digits = load_digits()
    for batch, names in BATCHES.items():
        for name in names:
            _write(digits, NAMES.index(name), 0, PER_CLASS, folder / "photos" / batch / name)
    skip = PER_CLASS + NEW_PER_CLASS
    _write(digits, NAMES.index(MORE), skip, 10, folder / "photos" / "more" / MORE)
    for number, name in enumerate(NAMES):
        _write(digits, number, PER_CLASS, NEW_PER_CLASS, folder / "new" / name)


def _write(digits: object, number: int, skip: int, count: int, folder: Path) -> None:
    folder.mkdir(parents=True)
    images = digits.images[digits.target == number][skip : skip + count]  # type: ignore[attr-defined]
    for i, image in enumerate(images, 1):
        pixels = Image.fromarray((255 - 15.9 * image).astype(np.uint8))
        pixels.resize((64, 64), Image.Resampling.BICUBIC).save(folder / f"{i:02}.png")


def play(page: str, folder: Path) -> Iterator[tuple[Step, str]]:
    """Run the commands in `folder`; yield each with what it printed."""
    port = _free_port()
    with _shell() as environment:
        running: list[subprocess.Popen[str]] = []
        try:
            for step in steps(page):
                command = step.command.replace(PORT, port)
                if command.endswith(" &"):
                    running.append(_start(command.removesuffix(" &"), folder, environment, port))
                    yield step, step.output
                else:
                    printed = _run(command, folder, environment)
                    printed = printed.replace(environment["PROTOSTEER_CACHE"], CACHE)
                    yield step, clean(printed.replace(f":{port}", f":{PORT}"))  # not digits of a figure
        finally:
            for process in running:
                process.terminate()
                process.wait(30)


def _run(command: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a command and return its output. A plain protosteer command runs in this process: importing torch is slow."""
    if command.startswith("protosteer ") and not SHELL.search(command):
        words = shlex.split(command)[1:]
        words = [path for word in words for path in sorted(glob.glob(word, root_dir=folder)) or [word]]
        printed, place = io.StringIO(), os.getcwd()
        os.chdir(folder)
        try:
            with patch.dict(os.environ, environment), redirect_stdout(printed), redirect_stderr(printed):
                protosteer(words)
        finally:
            os.chdir(place)
        return printed.getvalue()
    words = ["bash", "-c", f"{command} 2>&1"]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True).stdout


def clean(text: str) -> str:
    """Return output as the page has it: no progress, no blank lines around tables, no spaces at the ends of lines."""
    lines = [line.rstrip() for line in text.splitlines() if not PASSING.match(line)]
    return "".join(f"{line}\n" for line in lines if line)


def differences(expected: str, actual: str) -> list[str]:
    """Return lines that differ by more than rounding; none if the page is still true.

    Rounding may also change the order of lines that have the same words.
    """
    expected_lines, actual_lines = expected.splitlines(), actual.splitlines()
    if len(expected_lines) != len(actual_lines):
        return [f"{len(expected_lines)} lines, now {len(actual_lines)}:", *actual_lines]
    pairs = zip(sorted(expected_lines, key=_words), sorted(actual_lines, key=_words), strict=True)
    return [f"- {a}\n+ {b}" for a, b in pairs if not _alike(a, b)]


def _words(line: str) -> str:
    """What a line says, but for figures, dates and bars."""
    return " ".join(NUMBER.sub("#", BAR.sub("", DATE.sub("DATE", line))).split())


def _alike(a: str, b: str) -> bool:
    if _words(a) != _words(b):
        return False
    slack = COUNT_SLACK if _words(a) == "#" else SLACK
    numbers = [[float(n.replace(",", "")) for n in NUMBER.findall(DATE.sub("", line))] for line in (a, b)]
    return all(abs(x - y) <= slack * max(1.0, abs(x)) for x, y in zip(*numbers, strict=True))


@contextmanager
def _shell() -> Iterator[dict[str, str]]:
    """An environment in which `protosteer` is this checkout, one thread wide so that figures repeat."""
    with tempfile.TemporaryDirectory() as place:
        command = Path(place) / "protosteer"
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m protosteer "$@"\n')
        command.chmod(0o755)
        path = [str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        yield os.environ | {
            "PATH": f"{place}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "100",
            "PROTOSTEER_CACHE": str(Path(place) / "cache"),
            "HF_HOME": str(Path(place) / "cache"),
            "HF_HUB_OFFLINE": "1",
        }


def _start(command: str, folder: Path, environment: dict[str, str], port: str) -> subprocess.Popen[str]:
    """A server, once it listens."""
    words, silent = ["bash", "-c", f"exec {command}"], subprocess.DEVNULL
    process = subprocess.Popen(words, cwd=folder, env=environment, stdout=silent, stderr=silent, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", int(port))) == 0:
                return process
        time.sleep(0.1)
    raise RuntimeError(f"{command} does not answer")


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as callback:
        return str(callback.getsockname()[1])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--write", action="store_true", help="put what the commands print into the page")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # so that figures repeat
    page = options.page.read_text(encoding="utf-8")
    lines, shift, wrong = page.splitlines(), 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_photos(folder)
        for step, printed in play(page, folder):
            print(f"$ {step.command}\n{printed}", end="", flush=True)
            changes = differences(step.output, printed)
            wrong += bool(changes)
            lines[step.first + shift : step.last + shift] = printed.splitlines()
            shift += len(printed.splitlines()) - (step.last - step.first)
        if options.write:
            options.page.write_text("\n".join(lines) + "\n", encoding="utf-8")
            for picture in PICTURE.findall(page):
                if (folder / Path(picture).name).is_file():
                    shutil.copyfile(folder / Path(picture).name, options.page.parent / picture)
            return 0
    print(f"{wrong} commands print something else than {options.page} says" if wrong else "the page is true")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
