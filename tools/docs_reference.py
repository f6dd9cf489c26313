"""Reference pages that are generated from the code when the documentation site is built."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src" / "protosteer"


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table; line breaks and bars in cells are escaped."""
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines) + "\n"


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def attributes(kind: type) -> dict[str, str]:
    """Return name and text of every line under "Attributes:" in a google-style docstring."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", text, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in entries}


def commands() -> str:
    """Return every command with its arguments and options, from typer."""
    from protosteer.cli import commands as build
    from protosteer.cli.help_text import usage, walk

    parts = ["# Command line\n\nEvery command has `--help` and `--debug`, which shows the traceback of an error.\n"]
    parts += [
        "Exit codes: 0 success, 1 a part failed (such as one method of several), 2 a mistake in the command or the files, "
        "130 Ctrl-C. Results go to standard output, everything else to standard error.\n"
    ]
    for name, command in list(walk("", build()))[1:]:
        parts += [f"## {name}\n", f"```text\nprotosteer {' '.join([name, *usage(command)])}\n```\n", command.help, ""]
        examples = [line.strip() for line in (command.epilog or "").splitlines() if line.startswith("  ")]
        parts += ["```sh", *examples, "```", ""] if examples else []
        rows = [(_option(p), _text(p)) for p in command.params if "--help" not in p.opts]
        parts += [table(("argument or option", "meaning"), rows)] if rows else []
    return "\n".join(parts)


def _option(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.is_flag:
        return names
    return f"{names} `{parameter.metavar or parameter.name.upper()}`"


def _text(parameter: Any) -> str:
    text = (getattr(parameter, "help", None) or "").strip()
    show_default = getattr(parameter, "show_default", True)
    default = parameter.default
    if show_default and default not in (None, False, (), []) and not callable(default) and "default" not in text:
        text += f" Default: `{default}`."
    return text + (" Required." if parameter.required and parameter.param_type_name == "option" else "")


def settings() -> str:
    """Return the tables of settings and presets."""
    from protosteer.settings import PRESETS, Settings, preset

    bounds, meanings = Settings.bounds(), attributes(Settings)
    rows = [
        (f"`{name}`", f"`{value!r}`", _allowed(bounds[name]), meanings[name])
        for name, value in Settings().to_dict().items()
    ]
    names = sorted({key for name in PRESETS for key in preset(name)}, key=list(Settings().to_dict()).index)
    presets = [[f"`{name}`", *(f"`{getattr(Settings.preset(p), name)!r}`" for p in PRESETS)] for name in names]
    return (
        "# Settings and presets\n\nA preset is a set of settings: `--preset fast --set epochs=20`, or "
        '`Settings.preset("fast", epochs=20)`. `Settings()` is the preset `fast`.\n\n'
        f"## Presets\n\n{table(['setting', *(f'`{p}`' for p in PRESETS)], presets)}\n"
        "[CPP](../explanation/cpp.md#presets) explains `paper`, `paper-text` and `authors`; "
        "[The default classifier](../explanation/default-classifier.md) the others.\n\n"
        f"## Settings\n\n{table(('setting', 'default', 'allowed', 'meaning'), rows)}"
    )


def _allowed(bounds: Any) -> str:
    if "choices" in bounds:
        return ", ".join(f"`{choice}`" for choice in bounds["choices"])
    signs = (("at_least", "≥"), ("above", ">"), ("at_most", "≤"))
    return ", ".join(f"{sign} {bounds[kind]:g}" for kind, sign in signs if kind in bounds)


def methods() -> str:
    """Return the table of methods with their papers and settings."""
    from protosteer.evaluation.method_info import describe
    from protosteer.methods import METHODS

    parts = ["# Methods\n\n`protosteer run BENCHMARK --method NAME` runs one; `protosteer methods NAME` prints this.\n"]
    for about in map(describe, METHODS.values()):
        source = about.source
        facts = {
            "paper": f"{source.authors}, {source.title}, {source.venue} {source.year}" if source.title else "",
            "stores images": about.rehearsal,
            "stores single feature vectors": about.features,
            "trains": about.trains,
            "learns more of a known class": "yes" if about.supports_repeated_classes else "no",
            "settings": ", ".join(f"`{name}={value!r}`" for name, value in about.settings.items()),
        }
        text = re.sub(r"(?<=\S)\n(?=\S)", " ", about.about)
        parts += [f"## {about.name}\n\n{text}\n", table(("", ""), ((k, v) for k, v in facts.items() if v))]
    return "\n".join(parts)


def errors() -> str:
    """Return the error classes, and every code with an example of its message."""
    from protosteer import errors as kinds

    classes = [
        kind for _, kind in inspect.getmembers(kinds, inspect.isclass) if issubclass(kind, kinds.ProtosteerError)
    ]
    rows = [(f"`{k.__name__}`", f"`{k.default_code}`", (k.__doc__ or "").splitlines()[0]) for k in classes]
    codes: dict[str, tuple[str, str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for code, kind, message in _raised(path):
            if code not in codes or len(message) > len(codes[code][1]):
                codes[code] = (kind, message)
    return (
        "# Errors\n\nEvery error that you can fix is a `protosteer.ProtosteerError`. Its message is one line: what is "
        "wrong, where, what to do. Programs should rely on `error.code` and `error.details`, which stay when the wording "
        "improves. The command line prints the message and exits with code 2; the service answers with a status from 400 "
        "on and the message as `detail`. [Troubleshooting](../help/troubleshooting.md) has the frequent ones.\n\n"
        f"## Classes\n\n{table(('class', 'default code', 'when'), rows)}\n"
        f"## Codes\n\n{table(('code', 'class', 'message'), ((f'`{c}`', f'`{k}`', m) for c, (k, m) in sorted(codes.items())))}"
    )


def _raised(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield code, class and message of every error that a file creates."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    messages: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _words(node.value):
            messages.setdefault(f"{node.targets[0].id}:{node.lineno}", _words(node.value))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args or not ast.unparse(node.func).endswith("Error"):
            continue
        code = next((k.value for k in node.keywords if k.arg == "code"), None)
        if not isinstance(code, ast.Constant):
            continue
        text, message = _words(node.args[0]), node.args[0]
        if isinstance(message, ast.Name):  # the nearest assignment above
            lines = [int(k.partition(":")[2]) for k in messages if k.startswith(f"{message.id}:")]
            nearest_line = max((line for line in lines if node.lineno - 12 < line <= node.lineno), default=None)
            text = messages[f"{message.id}:{nearest_line}"] if nearest_line else ""
        yield str(code.value), ast.unparse(node.func).rpartition(".")[2], text


def _words(node: ast.expr) -> str:
    """Return a string literal, with … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ""


def http() -> str:
    """Return routes with parameters, bodies and answers, from the service's OpenAPI description, and its limits."""
    import torch

    import protosteer as ps
    from protosteer.serve.app import create_app
    from protosteer.serve.limits import Limits

    learner = ps.Learner(ps.Backbone.load("nano"))
    learner.add_class("any", torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    described = create_app(learner, "model.protosteer").openapi()
    parts = ["# HTTP schema\n\nGenerated from `/openapi.json`. [HTTP API](http.md) has an example of every route.\n"]
    for path, ways in described["paths"].items():
        if path.startswith("/models/{model}/"):
            continue
        for method, way in ways.items():
            parts += [f"## {method.upper()} {path}\n\n{way.get('description') or way.get('summary', '')}\n"]
            rows = [
                (f"`{p['name']}`", p["in"], _schema(p["schema"]), p.get("description", ""))
                for p in way.get("parameters", ())
            ]
            parts += [table(("parameter", "in", "type", "meaning"), rows)] if rows else []
            for status, answer in way["responses"].items():
                content: dict[str, Any] = next(iter(answer.get("content", {}).values()), {})
                parts += [f"- {status}: {answer.get('description', '')} {_schema(content.get('schema', {}))}".rstrip()]
            parts += [""]
    parts += ["## Schemas\n"]
    for name, schema in described["components"]["schemas"].items():
        parts += [f"### {name}\n\n{schema.get('description', '')}\n"]
        fields = schema.get("properties", {}).items()
        described_fields = [(f"`{field}`", _schema(kind), kind.get("description", "")) for field, kind in fields]
        parts += [table(("field", "type", "meaning"), described_fields)]
    limits = [(f"`{field.name}`", f"{field.default:g}") for field in dataclasses.fields(Limits)]
    parts += ["## Defaults of `Limits`\n", table(("limit", "default"), limits)]
    return "\n".join(parts)


def _schema(schema: Any) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_schema(part) for part in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_schema(schema.get('items', {}))}"
    return str(schema.get("type", "")) or "any"


PAGES: dict[str, Callable[[], str]] = {
    "reference/cli.md": commands,
    "reference/settings.md": settings,
    "reference/methods.md": methods,
    "reference/errors.md": errors,
    "reference/openapi.md": http,
}
