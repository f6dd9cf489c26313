"""CONTRIBUTING.md lists the rooms from the ground up; a room imports from itself and those above it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "protosteer"
DOORS = ("__init__", "__main__", "assets")  # the public names, the command, and data


def listed_rooms() -> list[str]:
    """Names in the first column of the table of rooms, in order."""
    rows = re.findall(r"^\| (`.+?`) \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M)
    return [
        name.removesuffix("/").removesuffix(".py") for row in rows for name in re.findall(r"`(.+?)`", row)
    ]


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_rooms(path: Path) -> set[tuple[str, int]]:
    """Rooms that a file imports from, wherever in it, and the lines."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "protosteer" and len(parts) > 1 and parts[1] != "__version__":
                found.add((parts[1], node.lineno))
    return found


FILES = sorted(path for path in PACKAGE.rglob("*.py") if room_of(path) not in DOORS)


def test_the_table_lists_every_room_and_no_other():
    assert sorted(listed_rooms()) == sorted({room_of(path) for path in FILES})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    order = listed_rooms()
    own = order.index(room_of(path))
    wrong = [f"line {line}: {room}" for room, line in imported_rooms(path) if order.index(room) > own]
    assert not wrong, f"{path.relative_to(PACKAGE)} imports from rooms below it: {', '.join(wrong)}"


def test_a_wrong_edge_would_be_found(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from protosteer.cli import main\n    import protosteer.report.plots\n")
    assert imported_rooms(file) == {("cli", 2), ("report", 3)}


def test_no_file_is_too_long_to_read():
    long = [str(path) for path in FILES if path.read_text(encoding="utf-8").count("\n") > 400]
    assert not long
