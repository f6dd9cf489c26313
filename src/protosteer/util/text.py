"""Format text for messages: plurals, short lists, suggestions, and untrusted names."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence

from protosteer.errors import DataError

NAME_LENGTH = 200  # characters of a class's or task's name


def counted(number: int, thing: str) -> str:
    """Format a number with its noun, such as 1 image, 2 classes."""
    if number == 1:
        return f"1 {thing}"
    return f"{number:,} {thing}{'es' if thing.endswith('s') else 's'}"


def listed(names: Sequence[str], limit: int = 10) -> str:
    """List the first names, and how many more there are; "none" if there are none."""
    suffix = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) + suffix) or "none"


def suggestion(word: str, candidates: Iterable[str]) -> str:
    """Suggest the known word nearest to an unknown one, or list them all."""
    names = list(candidates)
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean '{matches[0]}'?" if matches else f"there are: {listed(names, limit=50)}"


def similar_names(names: Iterable[str], known_names: Iterable[str]) -> list[tuple[str, str]]:
    """Pair names with others, or with known names, that differ by case, blanks, signs or one letter.

    Those are probably typing errors. Names that differ in a digit, and words of less than five letters, are not.
    """
    base_names, new_names = dict.fromkeys(known_names), dict.fromkeys(names)
    shape_owners: dict[str, str] = {}  # a name without blanks and signs, and without each one of its letters
    pairs: list[tuple[str, str]] = []
    for name in dict.fromkeys([*base_names, *new_names]):
        text = "".join(c for c in name.casefold() if c.isalnum())
        letters = [i for i, c in enumerate(text) if not c.isdigit()] if len(text) >= 5 else []
        shapes = [shape for shape in (text, *(text[:i] + text[i + 1 :] for i in letters)) if shape]
        match = next((shape_owners[shape] for shape in shapes if shape in shape_owners), None)
        if match is not None and name in new_names and name not in base_names:
            pairs.append((name, match))
        for shape in shapes:
            shape_owners.setdefault(shape, name)
    return pairs


def printable(name: str) -> str:
    """Replace characters of an untrusted name that move the cursor or begin a new line."""
    return "".join(c if c.isprintable() else "?" for c in name)


def check_name(name: str, subject: str, max_length: int = NAME_LENGTH) -> None:
    """Raise `DataError` with code `bad-name` if a name of a class or task does not fit into a line of text."""
    if not name.strip():
        raise DataError(f"{subject} has no name; give it one", code="bad-name")
    if len(name) > max_length:
        message = f"{subject} {name[:20]!r}... has a name of {len(name):,} characters; give it at most {max_length}"
        raise DataError(message, code="bad-name")
    if not name.isprintable() and any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in name):
        message = f"{subject} {name!r} has control characters or broken letters in its name; rename it"
        raise DataError(message, code="bad-name")


def one_line(text: str) -> str:
    """Join the lines of a message."""
    return " ".join(text.split())


# Characters that move the cursor, colour the screen or begin a new line.
_CONTROL = dict.fromkeys([*range(32), *range(127, 160), 0x2028, 0x2029], "?")


def without_control(text: str) -> str:
    """Replace control characters alone; other characters stay, so that the name still finds the file."""
    return text.translate(_CONTROL)
