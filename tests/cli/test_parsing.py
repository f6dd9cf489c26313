"""Messages name parameters in Python and flags on the command line; nothing below it knows a flag."""

import ast
import functools
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import typer

import protosteer
import protosteer.cli.demo
from expect import expect_error
from protosteer.cli import app, main
from protosteer.cli.options import FLAGS, in_flags, parse_settings
from protosteer.errors import DataError, ProtosteerWarning, SettingsError

ROOT = Path(protosteer.__file__).parent
# The command line itself, a program that stands on its own, beside an exported model, and a card that shows commands.
OUTSIDE = (ROOT / "cli", ROOT / "assets", ROOT / "sharing.py")
FLAG = re.compile(r"(?<![-\w])--(?!help\b)[a-z]")  # every program has --help


@functools.cache
def texts_of(path: Path) -> list[tuple[int, str]]:
    return list(strings(path.read_text(encoding="utf-8")))


def modules() -> list[Path]:
    return [path for path in ROOT.rglob("*.py") if not any(path.is_relative_to(place) for place in OUTSIDE)]


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Texts and their lines. Comments and docstrings are left out: they may name what they like."""
    tree = ast.parse(source)
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.lineno, node.value


def flags_named(texts: Iterable[tuple[int, str]]) -> list[int]:
    """Lines of the strings that have a flag in them."""
    return [line for line, text in texts if FLAG.search(text)]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('x = "choose --out"', [1]),
        ('y = 1\nx = f"choose {y} with --skip-known"', [2]),
        ('def f():\n    """As `run --json`."""\n    return "see protosteer --help" # --out', []),
        ('x = "a--b", "---", "well -- no"', []),
    ],
)
def test_a_flag_in_a_string_is_found(source: str, lines: list[int]) -> None:
    assert flags_named(strings(source)) == lines


def test_nothing_below_the_command_line_names_a_flag() -> None:
    assert len(modules()) > 50
    assert [f"{path}:{line}" for path in modules() for line in flags_named(texts_of(path))] == []


def test_nothing_below_the_command_line_reads_its_words() -> None:
    """But what a process of its own was started with, at the end of a module that is one."""
    imported = {path: path.read_text(encoding="utf-8").split('if __name__ == "__main__":')[0] for path in modules()}
    assert [str(path) for path, source in imported.items() if "sys.argv" in source] == []


def test_every_flag_that_stands_for_a_parameter_exists() -> None:
    commands = typer.main.get_command(app).commands.values()
    options = {name for command in commands for option in command.params for name in option.opts}
    assert {flag.split()[0] for flag in FLAGS.values()} <= options


def test_every_parameter_that_has_a_flag_is_named_by_some_message() -> None:
    told = in_flags("\n".join(text for path in modules() for _, text in texts_of(path)))
    assert [flag for flag in FLAGS.values() if flag not in told] == []


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("or pass weights=FILE (short names: nano)", "or pass --weights FILE (short names: nano)"),
        ("choose another out=, or overwrite=True", "choose another --out, or --overwrite"),
        ("with task_renames=", "with --rename-task OLD=NEW"),
        ("learn with a share held out (holdout=0.1), or", "learn with a share held out (--holdout 0.1), or"),
        ("class 'out=' in /a/out=/b, layout=, -out=, seeds = 3", None),  # names that users have given
    ],
)
def test_parameters_become_flags(message: str, shown: str | None) -> None:
    assert in_flags(message) == (shown or message)


def test_errors_and_warnings_are_told_with_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*_: object, **__: object) -> None:
        warnings.warn("no weights; pass weights=FILE", ProtosteerWarning, stacklevel=1)
        raise DataError("x.png cannot be read; leave it out with skip_unreadable=True")

    monkeypatch.setattr(protosteer.cli.demo, "run_demo", work)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "warning: no weights; pass --weights FILE",
        "error: x.png cannot be read; leave it out with --skip-unreadable",
    ]


def test_settings_as_they_are_typed() -> None:
    given = parse_settings(["epochs=3", "learning_rate=0.1", "prompts=true", "loss=supcon"])
    assert given == {"epochs": 3, "learning_rate": 0.1, "prompts": True, "loss": "supcon"}
    with expect_error("not-a-pair", SettingsError, word="epochs"):
        parse_settings(["epochs"])
