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


def listed(names: Sequence[str], most: int = 10) -> str:
    """List the first names, and how many more there are; "none" if there are none."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return (", ".join(names[:most]) + more) or "none"


def suggestion(word: str, known: Iterable[str]) -> str:
    """Suggest the known word nearest to an unknown one, or list them all."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"there are: {listed(names, most=50)}"


def similar_names(names: Iterable[str], known: Iterable[str]) -> list[tuple[str, str]]:
    """Pair names with others, or with known names, that differ by case, blanks, signs or one letter.

    Those are probably typing errors. Names that differ in a digit, and words of less than five letters, are not.
    """
    earlier, new = dict.fromkeys(known), dict.fromkeys(names)
    shape_owners: dict[str, str] = {}  # a name without blanks and signs, and without each one of its letters
    pairs: list[tuple[str, str]] = []
    for name in dict.fromkeys([*earlier, *new]):
        plain = "".join(c for c in name.casefold() if c.isalnum())
        letters = [i for i, c in enumerate(plain) if not c.isdigit()] if len(plain) >= 5 else []
        shapes = [shape for shape in (plain, *(plain[:i] + plain[i + 1 :] for i in letters)) if shape]
        near = next((shape_owners[shape] for shape in shapes if shape in shape_owners), None)
        if near is not None and name in new and name not in earlier:
            pairs.append((name, near))
        for shape in shapes:
            shape_owners.setdefault(shape, name)
    return pairs


def printable(name: str) -> str:
    """Replace characters of an untrusted name that move the cursor or begin a new line."""
    return "".join(c if c.isprintable() else "?" for c in name)


def check_name(name: str, what: str, most: int = NAME_LENGTH) -> None:
    """Raise `DataError` with code `bad-name` if a name of a class or task does not fit into a line of text."""
    if not name.strip():
        raise DataError(f"{what} has no name; give it one", code="bad-name")
    if len(name) > most:
        message = f"{what} {name[:20]!r}... has a name of {len(name):,} characters; give it at most {most}"
        raise DataError(message, code="bad-name")
    if not name.isprintable() and any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in name):
        message = f"{what} {name!r} has control characters or broken letters in its name; rename it"
        raise DataError(message, code="bad-name")


def one_line(text: str) -> str:
    """Join the lines of a message."""
    return " ".join(text.split())


# Characters that move the cursor, colour the screen or begin a new line.
_CONTROL = dict.fromkeys([*range(32), *range(127, 160), 0x2028, 0x2029], "?")


def without_control(text: str) -> str:
    """Replace control characters only, so that a file is still found by its name."""
    return text.translate(_CONTROL)
