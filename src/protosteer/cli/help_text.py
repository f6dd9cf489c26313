"""How `--help` looks: examples, options in groups, and words instead of Python types."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

EXAMPLES = {
    "learn": ("learn shop.protosteer photos/january", "learn shop.protosteer photos/february --preset instant"),
    "predict": ("predict shop.protosteer new/ --reject 0.05", "predict shop.protosteer new/ --out rows.csv"),
    "embed": ("embed mini photos/ --out embedded.parquet",),
    "correct": ("correct shop.protosteer new/7.jpg cat", "correct shop.protosteer --undo"),
    "evaluate": ("evaluate shop.protosteer test/ --html report.html",),
    "sort": ("sort shop.protosteer camera/ sorted/ --at-least 0.9", "sort sorted/ --undo"),
    "suggest": ("suggest shop.protosteer unlabelled/ --count 20", "suggest shop.protosteer --check photos/january"),
    "rename": ("rename shop.protosteer cup mug",),
    "join": ('join shop.protosteer "Tiger Lily" "tiger lily" --as "tiger lily"',),
    "adapt": ("adapt photos/typical -o shop.prompt", "learn shop.protosteer photos/january --adapted shop.prompt"),
    "forget": ("forget shop.protosteer cat", "forget shop.protosteer --task january --certificate removed.json"),
    "merge": ("merge berlin.protosteer paris.protosteer -o both.protosteer",),
    "inspect": ("inspect shop.protosteer --plot similar.png",),
    "export": ("export shop.protosteer --onnx exported/", "export shop.protosteer --web page/"),
    "push": ("push shop.protosteer me/shop --license apache-2.0", "push shop.protosteer me/shop --dry-run"),
    "pull": ("pull me/shop",),
    "verify": ("verify removed.json shop.protosteer photos/february",),
    "history": ("history shop.protosteer --keep-versions 5",),
    "undo": ("undo shop.protosteer",),
    "serve": ("serve shop.protosteer --allow-teach", "serve shop=a.protosteer birds.protosteer --port 8080"),
    "demo": ("demo", "demo photos my-photos/"),
    "run": (
        "run split-digits --method protosteer,cpp,ncm --seeds 0,1,2",
        "run folder:photos --backbone mini --tasks 5",
    ),
    "bench": ("bench prediction",),
    "compare": ("compare runs/* --plot curve.png --test",),
    "evaluate-run": ("evaluate-run runs/split-digits-cpp-nano --sweep neighbours=1,3,5",),
    "tune": ("tune slca split-digits --out slca.toml",),
    "reproduce": ("reproduce losses --scale mini",),
    "report": ("report runs/split-digits-cpp-nano", "report shop.protosteer --test test/ -o shop.html"),
    "methods": ("methods", "methods ranpac"),
    "backbones": ("backbones --try photos/january",),
    "datasets": ("datasets", "datasets get cifar100"),
}
GROUPS = {
    "Learning": "adapted config dependent grid holdout independent preset set settings skip-known sweep",
    "Benchmark": "base blurry class-order class-orders crop data-dir disjoint draw image-size increment seeds shots stream "
    "task-file tasks test-per-class train-per-class validation",
    "Backbone and device": "backbone device precision threads weights",
    "Parallel work": "address engine shard",
    "Output": "csv explain html json latex log logger markdown out pareto plot reliability top",
}
MIN_GROUPED = 8  # options, from which they are shown in groups
WORDS = {"Path": "PATH", "str": "TEXT", "int": "N", "float": "NUMBER"}


def arrange(command: Any) -> Any:
    """Prepare a command and those below it for `--help`, and return it."""
    for name, subcommand in walk("", command):
        subcommand.help = unwrap(subcommand.help or "")
        if lines := EXAMPLES.get(name):
            subcommand.epilog = "\n\n".join(
                ["Examples:" if len(lines) > 1 else "Example:", *(f"  protosteer {line}" for line in lines)]
            )
        options = [p for p in subcommand.params if p.param_type_name == "option"]
        for parameter in subcommand.params:
            _name_value(parameter)
            if len(options) >= MIN_GROUPED and parameter in options and parameter.rich_help_panel is None:
                parameter.rich_help_panel = _group(parameter)
        subcommand.collect_usage_pieces = lambda context, entry=subcommand: usage(entry)
        if hasattr(subcommand, "get_help_option"):
            _hide_type_of_help(subcommand)
    return command


def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield a command and all commands below it by name."""
    yield name, command
    for inner_name, inner in getattr(command, "commands", {}).items():
        yield from walk(f"{name} {inner_name}".strip(), inner)


def unwrap(text: str) -> str:
    """Return paragraphs of one line each, which a terminal wraps once."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in paragraphs)


def usage(command: Any) -> list[str]:
    """Return the words of a usage line after the command's name: arguments, options, commands."""
    words = []
    for parameter in (p for p in command.params if p.param_type_name == "argument"):
        word = parameter.metavar or f"{parameter.name.upper()}{'...' if parameter.nargs != 1 else ''}"
        word += "..." if parameter.nargs != 1 and not word.endswith(("...", "]")) else ""
        words.append(word if parameter.required else f"[{word}]")
    return [*words, "[OPTIONS]", *(["COMMAND"] if getattr(command, "commands", None) else [])]


def _name_value(parameter: Any) -> None:
    """Show no type for flags and arguments, and a word or the choices for other options."""
    descriptor = getattr(parameter, "type_descriptor", None)
    if parameter.param_type_name == "argument" or getattr(parameter, "is_flag", False):
        parameter.display_type_rich = lambda ctx: None
    elif parameter.metavar is None and descriptor is not None:
        choices = getattr(descriptor, "choices", None)
        words = str(getattr(descriptor, "annotation", ""))
        parameter.metavar = "|".join(choices) if choices else next((v for k, v in WORDS.items() if k in words), "TEXT")


def _group(parameter: Any) -> str | None:
    names = {option.lstrip("-") for option in parameter.opts}
    return next((group for group, members in GROUPS.items() if names & set(members.split())), None)


def _hide_type_of_help(command: Any) -> None:
    original = command.get_help_option

    def option(context: Any) -> Any:
        help_option = original(context)
        if help_option is not None:
            help_option.display_type_rich = lambda ctx: None
        return help_option

    command.get_help_option = option
