"""Finds private words of the glossary in pages, docstrings, comments and messages: python tools/prose.py

Each pattern is narrow, so that what it finds is wrong: extend it if a phrase comes back, not to forbid a plain word.
`<!-- prose: off -->` on a page's line excuses that line.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/**/*.md")
CODE = ("src/**/*.py", "examples/*.py")
# What not to write, and what to write instead.
GLOSSARY = {
    r"\b(?:whoever|anybody|nobody|strangers?)\b": "you, a client, an untrusted source; for code, the class",
    r"(?-i:\bWho) (?:has|knows|wants|needs|may|can|does|did)\b": "If you ...",
    r"\bby the paper's rule\b": "CPP inference (preset `paper`)",
    r"\b(?:read|reads|predict\w*|models?|exports?|images?) (?:as|by) evidence\b": "the default classifier",
    r"\b(?:coarse|fine) evidence\b": "shared-space score, task-prompt score",
    r"\bdomain prompts?\b|\bprompts? for all classes\b|\ban adapted backbone\b": "shared prompt",
    r"\b(?:task's own prompts?|whose own prompts?)\b": "task-specific prompt",
    r"\b(?:left out in turn|images? left out|left-out)\b": "leave-one-out",
    r"\b(?:likeliest|surest)\b": "top-1, most probable, most confident",
    r"\bin doubt\b": "uncertain",
    r"\bsharing out\b|\bshared out\b": "split into tasks",
    r"\bpolite kill\b": "SIGTERM",
    r"\brefused in one line\b|\bare refused\b|\bis refused\b": "rejected with an error",
    r"\bsealed\b": "checksummed",
    r"\bbookmarks?\b(?!=)": "checkpoint",
    r"\b(?:made|written|learned|begun) anew\b": "again, from scratch",
    r"\bis written whole\b|\bare written whole\b": "is saved atomically",
    r"\bwas taken for\b|\bbeen taken for\b": "was predicted as",
    r"\b(?:surveys?|surveyed)\b(?!`| ->)": "scan",
    r"\blessons?\b|\bis lent\b|\bare lent\b": "task data",
}
ALLOWED = {"docs/help/compatibility.md", "CHANGELOG.md"}  # name what things were called


def main() -> int:
    """Print every finding; return 1 if there is one."""
    lines = [*pages(), *sources()]
    for line in lines:
        print(line)
    print(f"{len(lines)} private words" if lines else "no private words", file=sys.stderr)
    return bool(lines)


def pages() -> Iterator[str]:
    """Yield findings in pages; code is skipped."""
    for path in sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}):
        name = path.relative_to(ROOT).as_posix()
        if name in ALLOWED:
            continue
        text = re.sub(r"^```.*?^```$", blanked, path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for number, line in enumerate(re.sub(r"`[^`\n]*`", "``", text).splitlines(), 1):
            if "prose: off" not in line:
                yield from findings(name, number, line)


def blanked(block: re.Match[str]) -> str:
    """Return as many empty lines."""
    return "\n" * block[0].count("\n")


def sources() -> Iterator[str]:
    """Yield findings in docstrings, comments and other strings with a space."""
    for path in sorted({path for pattern in CODE for path in ROOT.glob(pattern)}):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                for offset, line in enumerate(re.sub(r"`[^`\n]*`", "``", node.value).splitlines()):
                    yield from findings(name, node.lineno + offset, line)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield from findings(name, token.start[0], token.string)


def findings(name: str, number: int, line: str) -> Iterator[str]:
    """Yield what is wrong in a line."""
    for pattern, better in GLOSSARY.items():
        for match in re.finditer(pattern, line, re.IGNORECASE):
            yield f"{name}:{number}: {match[0]!r}: write {better}"


if __name__ == "__main__":
    sys.exit(main())
