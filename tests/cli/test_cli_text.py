"""What each command says, compared with tests/cli/snapshots; `UPDATE_SNAPSHOTS=1 pytest FILE` writes them anew.

Numbers and the folder of the test are masked, and help is taken from the commands themselves, so that neither another
machine nor another version of typer changes a snapshot.
"""

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expect import run_cli
from photo_toys import photos
from protosteer.cli import commands, main
from protosteer.cli.help_text import EXAMPLES

SNAPSHOTS = Path(__file__).parent / "snapshots"
TRAINED = "--set epochs=1 --set batch_size=8 --set neck_hidden=16 --set augmentation=none --backbone nano"
# In this order, in one folder: later lines use what earlier ones have written.
RUNS = {
    "learn": [
        f"learn shop.protosteer spring {TRAINED}",
        "learn shop.protosteer mixed --preset instant --dry-run",
        "learn shop.protosteer mixed --preset instant",
    ],
    "predict": ["predict shop.protosteer new --top 2 --reject 0.05", "predict shop.protosteer new/ant --explain"],
    "evaluate": ["evaluate shop.protosteer new"],
    "embed": ["embed shop.protosteer new --out embedded.csv"],
    "correct": [
        "correct shop.protosteer new/ant/00.png yak",
        "correct shop.protosteer --log",
        "correct shop.protosteer --undo",
    ],
    "suggest": ["suggest shop.protosteer new --count 2", "suggest shop.protosteer --check mixed --count 1"],
    "sort": ["sort shop.protosteer new sorted --at-least 0.9", "sort sorted --undo"],
    "rename": ["rename shop.protosteer cow calf", "rename shop.protosteer calf cow"],
    "join": ["join shop.protosteer ant bee --as insect"],
    "undo": ["undo shop.protosteer"],
    "inspect": ["inspect shop.protosteer"],
    "merge": ["merge shop.protosteer other.protosteer -o both.protosteer"],
    "adapt": [f"adapt spring -o my.backbone {TRAINED}", "inspect my.backbone"],
}


def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if command.callback and not (name == "" and command.params == []):
        yield name, command
    for inner_name, inner in getattr(command, "commands", {}).items():
        yield from walk(f"{name} {inner_name}".strip(), inner)


COMMANDS = dict(walk("", commands()))


def help_of(name: str) -> str:
    command = COMMANDS[name]
    lines = [f"$ protosteer {name} --help".replace("  ", " "), *(command.help or "").splitlines(), ""]
    lines += [*(command.epilog or "").replace("\n\n", "\n").splitlines(), ""]
    for parameter in command.params:
        words = "/".join([*parameter.opts, *parameter.secondary_opts])
        lines.append(f"{parameter.metavar or words if parameter.param_type_name == 'argument' else words}")
        lines.append(f"    {parameter.help}")
    return "\n".join(line.rstrip() for line in lines)


def masked(text: str, place: Path) -> str:
    text = re.sub(r"\d+(?:[.,]\d+)*", "#", text.replace(str(place), "PLACE"))
    lines = (re.sub(r"[ ─]{2,}", "  ", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("text")
    photos(root / "spring", ["ant", "bee"], 6)
    photos(root / "mixed", ["bee", "cow"], 5, seed=1)
    photos(root / "new", ["ant", "yak"], 2, seed=5)
    photos(root / "summer", ["cat", "dog"], 6)
    (root / "mixed" / "bee" / "again.png").write_bytes((root / "spring" / "bee" / "00.png").read_bytes())
    (root / "mixed" / "cow" / "other.png").write_bytes((root / "spring" / "ant" / "00.png").read_bytes())
    (root / "mixed" / "cow" / "broken.png").write_bytes(b"no image")
    learn = ["learn", str(root / "other.protosteer"), str(root / "summer"), "--preset", "instant"]
    assert main([*learn, "--backbone", "nano"]) == 0
    return root


@pytest.fixture(scope="module")
def shown(place: Path) -> dict[str, str]:
    """The text of each command: help, then what runs of it print to both streams."""
    texts = {name: help_of(name) for name in COMMANDS}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name, lines in RUNS.items():
            for line in lines:
                texts[name] += f"\n\n$ protosteer {line}\n{masked(said(line), place)}"
    return texts


def said(line: str) -> str:
    """Standard output and standard error of a command that must succeed."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = main(shlex.split(line))
    assert code == 0, text.getvalue()
    return text.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS, ids=lambda name: name or "protosteer")
def test_a_command_says_what_its_snapshot_says(name: str, shown: dict[str, str]) -> None:
    path = SNAPSHOTS / f"{name.replace(' ', '-') or 'protosteer'}.txt"
    if "UPDATE_SNAPSHOTS" in os.environ:
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown[name] + "\n")
    assert shown[name] + "\n" == path.read_text()


def test_every_snapshot_has_a_command() -> None:
    names = {f"{name.replace(' ', '-') or 'protosteer'}.txt" for name in COMMANDS}
    assert {path.name for path in SNAPSHOTS.iterdir()} == names


def test_every_command_has_examples_that_parse_and_no_python_types(capsys):
    assert EXAMPLES.keys() == COMMANDS.keys() - {"", "datasets get"}
    for line in (shlex.split(line) for lines in EXAMPLES.values() for line in lines):
        COMMANDS[line[0]].make_context(line[0], line[1:])
    text = run_cli(capsys, "learn", "--help").out
    assert "MODEL FOLDER... [OPTIONS]" in text and "Backbone and device" in text and "photos/january" in text
    assert not re.search(r"<(bool|list|str|path|int)|\{MODEL", text, re.IGNORECASE)
