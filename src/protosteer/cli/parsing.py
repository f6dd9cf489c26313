"""Words of the command line: what was typed, as Python means it; what Python says, as it is typed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any

import typer

from protosteer.errors import SettingsError

# How messages of the library name a parameter, and what stands for it here. A value may follow the sign.
FLAGS = {
    "folder=": "--onnx",
    "holdout=": "--holdout",
    "host=": "--host",
    "out=": "--out",
    "overwrite=True": "--overwrite",
    "port=": "--port",
    "resume=True": "--resume",
    "seeds=": "--seeds",
    "skip_unreadable=True": "--skip-unreadable",
    "task_renames=": "--rename-task OLD=NEW",
    "weights=": "--weights",
}
# Not within a longer word, a path or quotes: there it is part of a name that a user has given.
_NAMED = re.compile(rf"(?<![\w./'\"-])({'|'.join(map(re.escape, FLAGS))})(?=(\w?))")


def in_flags(message: str) -> str:
    """A message of the library with the flags that stand for the parameters it names."""
    return _NAMED.sub(lambda found: FLAGS[found[1]] + (" " if found[2] else ""), message)


def command_line() -> list[str]:
    """The command that runs, as it was typed."""
    return ["protosteer", *sys.argv[1:]]


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE, where a value is JSON (5, 0.1, true) or else a bare word."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise SettingsError(f"--set {pair}: write NAME=VALUE, for instance --set epochs=20")
        try:
            values[name.strip()] = json.loads(text)
        except (ValueError, RecursionError):  # also of numbers without end
            values[name.strip()] = text.strip()
    return values


def parse_pairs(words: list[str], option: str, known: Collection[str]) -> dict[str, str]:
    """old=new, several times. Of several signs in a word, the first after a known name counts."""
    pairs: dict[str, str] = {}
    for word in words:
        places = [i for i, character in enumerate(word) if character == "=" and 0 < i < len(word) - 1]
        if not places:
            raise typer.BadParameter(f"{word!r} is not old=new", param_hint=option)
        place = next((i for i in places if word[:i] in known), places[0])
        old, new = word[:place], word[place + 1 :]
        if old in pairs:
            raise typer.BadParameter(f"{old!r} is given two names", param_hint=option)
        pairs[old] = new
    return pairs
